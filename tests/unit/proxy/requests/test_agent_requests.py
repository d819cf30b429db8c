"""Tests how `/v1/messages` and `/v1/responses` are checked and cut to a prefill leg, and the ids of responses."""

import json
import time
from typing import Any

import pytest

from kvparams.instances import Instance, Role
from kvparams.jsontext.document import JSONLimits, find_members
from kvparams.jsontext.editing import edit
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import AuthenticatedClient, tenant_cache_salt
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.requests.one_token_changes import one_token_changes
from kvparams_proxy.requests.response_ids import ResponseIds
from tests.support.processor import is_within
from tests.support.proxy.steps import read_all

MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Who"}], "max_tokens": 9}
RESPONSES: dict[str, Any] = {"model": "m", "input": "Who"}
BODIES: dict[EndpointKind, dict[str, Any]] = {"messages": MESSAGES, "responses": RESPONSES}


def parsed(kind: EndpointKind, client: AuthenticatedClient | None = None, **more: Any) -> ParsedRequest:
    body = json.dumps({**BODIES[kind], **more}).encode()
    return read_all(kind, body, "r", "t", JSONLimits(), client)


def cut(kind: EndpointKind, **more: Any) -> dict[str, Any]:
    body = json.dumps({**BODIES[kind], **more}).encode()
    spans = find_members(body)
    return json.loads(edit(body, spans, one_token_changes(kind, body, spans)))


@pytest.mark.parametrize(("kind", "name"), [("messages", "output_config"), ("responses", "text")])
def test_an_object_that_is_too_long_to_be_read_at_once_stays_as_it_is(kind: EndpointKind, name: str) -> None:
    for length, is_read in ((200 << 10, True), (13 << 20, False)):
        body = json.dumps({**BODIES[kind], name: {"format": {"type": "x", "pad": "x" * length}}}).encode()
        spans = find_members(body)
        begun = time.thread_time()
        changes = one_token_changes(kind, body, spans)
        assert is_within(time.thread_time() - begun, 0.02)
        assert (name in changes) is is_read


def test_a_prefill_leg_of_messages_has_one_token_and_the_same_prompt() -> None:
    prompt: dict[str, Any] = {
        "system": "s",
        "tools": [{"name": "t", "input_schema": {}}],
        "tool_choice": {"type": "any"},
    }
    answer = {"stop_sequences": ["a"], "stream": True, "output_config": {"effort": "low", "format": {"type": "x"}}}
    assert cut("messages", **prompt, **answer) == {
        **MESSAGES,
        **prompt,
        "max_tokens": 1,
        "stream": False,
        "output_config": {"effort": "low"},
    }


@pytest.mark.parametrize(
    ("thinking", "kept"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, None),
        ({"type": "disabled"}, {"type": "disabled"}),
        ({"type": "adaptive"}, {"type": "adaptive"}),
        (None, None),
    ],
)
def test_a_budget_for_thinking_is_not_prefills(thinking: object, kept: object) -> None:
    assert cut("messages", thinking=thinking).get("thinking") == kept


def test_a_prefill_leg_of_responses_stores_nothing() -> None:
    answer = {
        "stream": True,
        "store": True,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "stop": ["a"],
        "text": {"verbosity": "low", "format": {"type": "json_object"}},
    }
    assert cut("responses", instructions="i", reasoning={"effort": "low"}, **answer) == {
        **RESPONSES,
        "instructions": "i",
        "reasoning": {"effort": "low"},
        "max_output_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        "store": False,
        "text": {"verbosity": "low"},
    }


@pytest.mark.parametrize(
    ("kind", "more", "whole"),
    [
        ("messages", {}, False),
        ("messages", {"tool_choice": {"type": "any"}}, False),
        ("messages", {"tool_choice": {"type": "tool", "name": "t"}}, True),
        ("responses", {}, False),
        ("responses", {"truncation": "disabled", "background": False}, False),
        ("responses", {"truncation": "auto"}, True),
        ("responses", {"background": True}, True),
        ("responses", {"previous_response_id": "resp_1"}, True),
    ],
)
def test_what_cannot_be_split_is_run_by_one_engine(kind: EndpointKind, more: dict[str, Any], whole: bool) -> None:
    assert parsed(kind, **more).facts.prompt_scored is whole
    assert parsed(kind, **more).previous_response == more.get("previous_response_id")


@pytest.mark.parametrize(
    ("kind", "more", "param"),
    [
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"max_tokens": 0}, "max_tokens"),
        ("messages", {"messages": []}, "messages"),
        ("messages", {"messages": [{"content": "a"}]}, "messages[0]"),
        ("responses", {"input": ""}, "input"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": 7}, "input"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"previous_response_id": 7}, "previous_response_id"),
        ("responses", {"background": "yes"}, "background"),
    ],
)
def test_a_wrong_member_is_named(kind: EndpointKind, more: dict[str, Any], param: str) -> None:
    with pytest.raises(ProxyError) as refused:
        parsed(kind, **more)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("kind", ["messages", "responses"])
def test_the_cache_salt_is_the_tenants(kind: EndpointKind) -> None:
    client = AuthenticatedClient("k", "acme", 0, tenant_cache_salt("acme", None))
    own = parsed(kind, client)
    assert own.changes["cache_salt"] == json.dumps(tenant_cache_salt("acme", None)).encode()
    assert parsed(kind, client, cache_salt="s").facts.cache_salt == tenant_cache_salt("acme", "s")
    assert not parsed(kind).changes


@pytest.mark.parametrize("kind", ["messages", "responses"])
def test_a_long_body_is_read_as_a_short_one_is(kind: EndpointKind) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "word " * 400}]} for _ in range(60)]
    name = "messages" if kind == "messages" else "input"
    long: dict[str, Any] = {name: turns}
    found = parsed(kind, **long, kv_transfer_params={"remote_host": "h"})
    assert not found.is_document_complete
    assert json.loads(found.body) == {**BODIES[kind], name: turns}
    with pytest.raises(ProxyError):
        parsed(kind, **long, model=7)


def _instances(*names: str) -> list[Instance]:
    return [Instance(name, "1", Role.DECODE, f"http://{name}", "store") for name in names]


def test_an_id_leads_to_its_instance_and_only_its_tenant_there() -> None:
    ids, fleet = ResponseIds(b"secret"), _instances("d0", "d1", "d2")
    made = ids.make("acme", "d1")
    assert ids.make("acme", "d1") != made
    assert ids.find(made, "acme", fleet) is fleet[1]
    assert ResponseIds(b"secret").find(made, "acme", fleet) is fleet[1]
    assert ids.find(made, "other", fleet) is None
    assert ids.find(made, "acme", _instances("d0", "d2")) is None
    assert ResponseIds(b"another").find(made, "acme", fleet) is None
    assert ResponseIds().find(made, "acme", fleet) is None


def test_another_id_leads_nowhere() -> None:
    ids, fleet = ResponseIds(b"secret"), _instances("west")
    made = ids.make("", "west")
    assert ids.find(made, "", fleet) is fleet[0]
    for changed in (
        "",
        "resp_",
        made[:-1],
        made + "0",
        made.replace("resp_", "resp-"),
        "resp_" + "0" * 48,
        made[:-1] + "é",
    ):
        assert ids.find(changed, "", fleet) is None
    assert "west" not in made  # whose letters are no digits of hexadecimal numbers
