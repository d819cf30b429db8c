"""Tests the rendering of a chat request; `tests/interop/vllm/test_vllm_tokenize.py` compares it with vLLM."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from kvparams_proxy.tokenization.chat_template import ChatTemplate, RenderLimitError
from kvparams_proxy.tokenization.errors import UnsupportedChatError
from kvparams_proxy.tokenization.template_inputs import template_messages
from tests.support.proxy.made_tokenizers import CHATML, LLAMA3, MISTRAL

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "hi"}
MOST = 10_000


def _rendered(template: str, *messages: dict[str, Any], **more: Any) -> str:
    return ChatTemplate(template, SPECIALS).render({"messages": list(messages), **more}, MOST)


def test_a_conversation_is_rendered_with_a_prompt_for_the_answer() -> None:
    said = {"role": "assistant", "content": "hello"}
    assert _rendered(CHATML, {"role": "system", "content": "Be brief."}, USER, said, USER) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_message_that_goes_on_is_left_open() -> None:
    said = {"role": "assistant", "content": "hello and"}
    more: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello and"
    assert _rendered(CHATML, USER, said, **more) == expected
    in_parts = {"role": "assistant", "content": [{"type": "text", "text": "hello and"}]}
    assert _rendered(LLAMA3, USER, in_parts, **more).endswith("assistant<|end_header_id|>\n\nhello and")
    with pytest.raises(UnsupportedChatError):  # as the engine does
        _rendered(CHATML, USER, said, continue_final_message=True)


def test_content_in_parts_is_text_for_a_template_that_wants_text_and_parts_for_one_that_loops() -> None:
    parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": None}]
    assert "user\none\ntwo<|im_end|>" in _rendered(CHATML, {"role": "user", "content": parts})
    assert "user<|end_header_id|>\n\nonetwo<|eot_id|>" in _rendered(LLAMA3, {"role": "user", "content": parts})


EACH = "{% for m in messages %}"
LOOP = "{% for c in content %}{% endfor %}"
MACRO = "{% macro f(a) %}{% for c in a %}{% endfor %}{% endmacro %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (EACH + "{{ m.content }}" + END, "string"),
        (EACH + "{% for c in m['content'] %}{{ c }}{% endfor %}" + END, "openai"),
        ("{% for m in messages[1:] %}{% for c in m.content | list %}{{ c }}{% endfor %}" + END, "openai"),
        ("{% set x = messages %}{% for m in x %}{% for c in m.content %}{{ c }}{% endfor %}" + END, "openai"),
        (EACH + "{% set content = m.content %}" + LOOP + END, "openai"),
        (MACRO + EACH + "{{ f(m.content) }}" + END, "openai"),
        (MACRO + EACH + "{{ f(a=m.content) }}" + END, "openai"),
        (MACRO + EACH + "{{ f(m.tools) }}" + END, "string"),
        ("{% macro f(content) %}" + LOOP + "{% endmacro %}" + EACH + END, "string"),
        (EACH + "{% for c in m.tool_calls %}{{ c }}{% endfor %}" + END, "string"),
    ],
)
def test_which_content_a_template_wants_is_seen_in_it(template: str, form: str) -> None:
    seen = ChatTemplate(template + "{{ messages[0].content is string }}", {})
    assert seen.render({"messages": [USER]}, MOST).endswith("True" if form == "string" else "False")


def test_tools_stand_as_the_engine_writes_them() -> None:
    tool = {"function": {"parameters": {"type": "object"}, "name": "look", "unknown": 1}, "type": "function"}
    expected = (
        '{"type": "function", "function": {"name": "look", "description": null, "parameters": {"type": "object"}}}'
    )
    assert expected in _rendered(CHATML, USER, tools=[tool])


def test_calls_of_tools_have_objects_for_arguments() -> None:
    def call(arguments: object) -> dict[str, Any]:
        function = {"name": "look", "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }

    assert '"arguments": {"a": 1}' in _rendered(CHATML, USER, call('{"a":1}'))
    assert '"arguments": {}' in _rendered(CHATML, USER, call("not JSON"))
    assert '"arguments": {}' in _rendered(CHATML, USER, call("[1]"))
    assert '{"arguments": {"a": 1}, "name": "look"}' in _rendered(MISTRAL, USER, call('{"a":1}'))


def test_further_variables_reach_a_template_that_reads_them_and_no_other() -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False, "padding": True, "bos_token": "<other>"}}
    assert _rendered(CHATML, USER, **off).endswith("<think>\n\n</think>\n\n")
    assert _rendered(CHATML, USER, reasoning_effort="none").endswith("<think>\n\n</think>\n\n")
    assert not _rendered(CHATML, USER, reasoning_effort="high").endswith("</think>\n\n")
    dated = {"chat_template_kwargs": {"date_string": "1 Jan 2026"}, "documents": [{"title": "A", "text": "B"}]}
    assert "Today Date: 1 Jan 2026\n\nA: B\n" in _rendered(LLAMA3, USER, **dated)
    assert _rendered(LLAMA3, USER, **off).startswith("<other>")


def test_a_developer_speaks_as_the_system_where_the_template_knows_none() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert _rendered(CHATML, developer, USER).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    system = {"role": "system", "content": "Be kind."}
    assert _rendered(CHATML, system, USER, developer).startswith("<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>")
    knows = "{% for m in messages %}{{ m.role == 'developer' }}{% endfor %}"
    assert _rendered(knows, developer) == "True"


def test_reasoning_has_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": "so", name: "because"}
        assert "<think>\nbecause\n</think>\n\nso" in _rendered(CHATML, USER, said)


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": []},
        {"messages": "hi"},
        {"messages": [1]},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
        {"tools": []},
        {"tools": [{"type": "function"}]},
    ],
)
def test_what_is_not_text_or_not_ours_to_render_is_left(more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedChatError):
        ChatTemplate(CHATML, SPECIALS).render({"messages": [USER], **more}, MOST)


def test_what_a_template_makes_is_bounded() -> None:
    with pytest.raises(RenderLimitError):
        _rendered(CHATML, {"role": "user", "content": "x" * MOST})
    assert _rendered(CHATML, {"role": "user", "content": "x" * (MOST - 100)})
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(RenderLimitError):
        ChatTemplate(slow, {}, most_s=0.05).render({"messages": [USER]}, MOST)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{% for a in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    with pytest.raises((TemplateError, OverflowError)):
        _rendered(template, USER)


def test_messages_are_text_and_never_a_template() -> None:
    said = "{{ 7 * 7 }}{% for a in messages %}x{% endfor %}"
    assert said in _rendered(CHATML, {"role": "user", "content": said})


MEMBERS = ("role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "tools", "reasoning", "id")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(MEMBERS) | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(messages=JSON | st.lists(JSON, max_size=4), tools=JSON, kwargs=JSON)
def test_no_request_breaks_it(messages: object, tools: object, kwargs: object) -> None:
    """It is rendered, or left: what a template raises is seen by its caller (`service.py`), of any class."""
    document = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    try:
        template_messages(messages, "openai", developer=False)
    except UnsupportedChatError:
        with pytest.raises(UnsupportedChatError):
            ChatTemplate("{{ messages }}{{ tools }}", {}).render(document, MOST)
        return
    try:
        assert isinstance(ChatTemplate("{{ messages }}{{ tools }}", {}).render(document, MOST), str)
    except (UnsupportedChatError, RenderLimitError):
        return
