"""Detects the form of message content that a chat template reads: one text, or a list of parts.

vLLM decides this from the template itself: one that loops over a message's content wants parts (vLLM 0.32.0
renderers/hf.py, _detect_content_format). This module must decide as that function does for the same templates.
"""

from collections.abc import Iterator
from typing import Final, Literal

from jinja2 import nodes

__all__ = ["ContentFormat", "detect_content_format"]

ContentFormat = Literal["string", "openai"]

_MESSAGES: Final = "messages"
_CONTENT: Final = "content"


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """Returns `"openai"` where the template loops over the content of a message, else `"string"`.

    The loop may be direct, through a macro's parameter, or over a variable called `content`.
    """
    return "openai" if any(_loops_over_content(template)) else "string"


def _loops_over_content(template: nodes.Template) -> Iterator[bool]:
    messages = set(_message_names(template))
    inside: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        given = set(_content_parameters(template, macro, messages))
        for loop in macro.find_all(nodes.For):
            inside[id(loop)] = given or inside.get(id(loop), set())
    for loop in template.find_all(nodes.For):
        if any(_reads(loop.iter, name, _CONTENT) for name in messages):
            yield True
        elif isinstance(loop.iter, nodes.Name):
            names = inside.get(id(loop))
            yield loop.iter.name == _CONTENT if names is None else loop.iter.name in names


def _message_names(template: nodes.Template) -> Iterator[str]:
    """Yields the names of loop variables that stand for a message."""
    lists = [_MESSAGES]
    for name in lists:  # grows: a list under another name is the same list
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and target.name not in lists and _reads(assignment.node, name):
                lists.append(target.name)
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists):
            yield loop.target.name


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    """Yields the parameters of a macro that receive the content of a message in some call."""
    names = [argument.name for argument in macro.args]
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
            for name, value in given:
                if name in names and any(_reads(value, message, _CONTENT) for message in messages):
                    yield name


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Returns whether the node is the variable, or its member `key`: also filtered, tested or sliced."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test):
            if node.node is None:
                return False
            node = node.node
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        else:
            break
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not isinstance(node.arg, nodes.Const) or node.arg.value != key:
                return False
        elif not isinstance(node, nodes.Getattr) or node.attr != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
