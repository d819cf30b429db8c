"""A model's chat template, rendered as the engine renders it.

The environment is that of transformers 5.19 (utils/chat_template_utils.py) as vLLM 0.32.0 uses it: jinja2's immutable
sandbox, blocks trimmed, `tojson`, `strftime_now`, `raise_exception`, loop controls, `{% generation %}`. The operator
provides the template, but a client provides its input; so the output is bounded in size and time.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from time import monotonic
from typing import Final, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvparams_proxy.tokenization.content_format import ContentFormat, detect_content_format
from kvparams_proxy.tokenization.errors import UnsupportedChatError
from kvparams_proxy.tokenization.template_inputs import template_messages, template_variables

__all__ = ["ChatTemplate", "RenderLimitError"]

_MOST_S: Final = 1.0
_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind the message that goes on, to find its end again: transformers' own word, should a template look at it."""


class RenderLimitError(ValueError):
    """The rendered chat is too long, or takes too long to render."""


class ChatTemplate:
    """Renders one chat template."""

    def __init__(self, text: str, specials: Mapping[str, str], most_s: float = _MOST_S) -> None:
        """Compiles the template.

        Args:
            text: the template.
            specials: `bos_token` and such, by name.
            most_s: for how long it may render one chat.

        Raises:
            jinja2.TemplateError: it is none.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationExtension, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        globals_ = cast("dict[str, Callable[..., object]]", environment.globals)
        globals_["raise_exception"] = _raise
        globals_["strftime_now"] = _now
        parsed = environment.parse(text)
        self._format: ContentFormat = detect_content_format(parsed)
        self._declared = frozenset(meta.find_undeclared_variables(parsed))
        self._developer = '"developer"' in text or "'developer'" in text
        self._continues = "content" in text
        self._template = environment.from_string(text)
        self._specials = dict(specials)
        self._most_s = most_s

    def render(self, document: Mapping[str, object], max_chars: int) -> str:
        """Returns the prompt of a chat request.

        Raises:
            UnsupportedChatError: it cannot be rendered here.
            RenderLimitError: it would be longer than `max_chars`, or take too long.
            jinja2.TemplateError: the template refuses it.
        """
        messages = template_messages(document.get("messages"), self._format, developer=self._developer)
        given = {**self._specials, "tools": None, "documents": None, **template_variables(document, self._declared)}
        going_on = given.pop("continue_final_message")
        if not going_on:
            return self._bounded({**given, "messages": messages}, max_chars)
        if given["add_generation_prompt"]:
            raise UnsupportedChatError("a message that goes on has no generation prompt: the engine refuses both")
        return self._going_on(given, messages, max_chars)

    def _bounded(self, given: Mapping[str, object], max_chars: int) -> str:
        until_s = monotonic() + self._most_s
        parts: list[str] = []
        left = max_chars
        for part in self._template.generate(given):
            left -= len(part)
            if left < 0 or monotonic() > until_s:
                raise RenderLimitError("a chat's prompt is too long, or takes too long")
            parts.append(part)
        return "".join(parts)

    def _going_on(self, given: Mapping[str, object], messages: list[dict[str, object]], max_chars: int) -> str:
        """Returns the text up to the end of the last message, without what closes it."""
        last = dict(messages[-1])
        content = last["content"]
        if isinstance(content, list):
            parts = [dict(part) for part in cast("list[dict[str, str]]", content)]
            if not parts:
                raise UnsupportedChatError("there is no text to go on from")
            final = parts[-1]["text"]
            parts[-1]["text"] += _TAG
            last["content"] = parts
        else:
            final = cast("str", content)
            last["content"] = final + _TAG
        rendered = self._bounded({**given, "messages": [*messages[:-1], last]}, max_chars + len(_TAG))
        tag = _TAG.strip()
        if not self._continues or final.strip() not in rendered or tag not in rendered:
            raise UnsupportedChatError("the template does not show the message that goes on")
        end = rendered.rindex(tag)
        kept = rendered[:end]
        return kept if rendered.startswith(_TAG, end) else kept.rstrip()


class _GenerationExtension(Extension):
    """Accepts `{% generation %}` blocks, which mark assistants' text; for a prompt they have no effect."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own form

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block to a call, so that variables set in it stay local."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    """Formats the time on this machine: an engine in another time zone writes another date at night."""
    return datetime.now().strftime(form)
