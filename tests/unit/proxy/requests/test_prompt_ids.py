"""Tests that a client's token ids stand in a document only where the engine computes exactly these."""

import json
from typing import Any

import pytest

from kvparams.instances import RequestFacts
from kvparams.jsontext.document import JSONLimits
from kvparams.routing.managers.leg_documents import request_members
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.endpoints import EndpointKind
from tests.support.proxy.steps import read_all

IDS = list(range(300, 900))
GENERATE: dict[str, Any] = {"token_ids": IDS, "sampling_params": {}}


def facts_of(kind: EndpointKind, **body: Any) -> RequestFacts:
    return read_all(kind, json.dumps({"model": "m", **body}).encode(), "r", "t", JSONLimits()).facts


@pytest.mark.parametrize(
    ("kind", "body", "routed"),
    [
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 200}, IDS[-200:]),
        ("completions", {"prompt": [IDS], "truncate_prompt_tokens": 200}, IDS[-200:]),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 200, "truncation_side": "left"}, IDS[-200:]),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 200, "truncation_side": "right"}, IDS[:200]),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 599}, IDS[-599:]),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": -1}, IDS),  # to how many, only the engine knows
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 0}, IDS),  # the engine refuses it
        ("generate", {**GENERATE, "content_parts": [{"type": "image_url", "url": "data:"}]}, IDS),
    ],
)
def test_ids_that_the_engine_may_change_are_for_routing_alone(
    kind: EndpointKind, body: dict[str, Any], routed: list[int]
) -> None:
    facts = facts_of(kind, **body)
    assert (facts.token_ids, facts.prompts, facts.prompt_tokens) == (None, 1, len(routed))
    assert list(facts.routing_ids or ()) == routed
    assert request_members(facts, None) == {}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completions", {"prompt": IDS}),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": None}),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 600}),
        ("completions", {"prompt": IDS, "truncate_prompt_tokens": 5000, "truncation_side": "right"}),
        ("completions", {"prompt": IDS, "echo": True, "add_special_tokens": True, "suffix": None}),
        ("completions", {"prompt": IDS, "prompt_embeds": None, "use_beam_search": False}),
        ("generate", GENERATE),
        ("generate", {**GENERATE, "content_parts": [], "features": None}),
    ],
)
def test_other_ids_stand_in_the_document(kind: EndpointKind, body: dict[str, Any]) -> None:
    facts = facts_of(kind, **body)
    assert list(facts.token_ids or ()) == IDS
    assert (facts.routing_ids, facts.prompt_tokens) == (None, 600)
    assert request_members(facts, None)


@pytest.mark.parametrize("value", ["200", 1.5, True, [200], -2])
def test_a_truncation_that_is_no_number_is_refused(value: object) -> None:
    """An engine would take some of these for numbers, and cut the prompt after all."""
    with pytest.raises(ProxyError) as caught:
        facts_of("completions", prompt=IDS, truncate_prompt_tokens=value)
    assert (caught.value.status, caught.value.param) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(("embeds", "prompts"), [("AAAA", 2), (["AAAA"], 2), (["AAAA", "BBBB"], 3)])
def test_prompts_that_come_as_embeddings_are_counted(embeds: object, prompts: int) -> None:
    """An engine answers them beside `prompt`, so neither ids nor one hand-over speak of the whole request."""
    facts = facts_of("completions", prompt=IDS, prompt_embeds=embeds)
    assert (facts.prompts, facts.token_ids, facts.routing_ids) == (prompts, None, None)
    assert facts_of("completions", prompt="words", prompt_embeds=embeds).prompts == prompts


@pytest.mark.parametrize(("beams", "alone"), [(True, True), (False, False), (None, False)])
def test_a_beam_search_is_answered_by_one_engine(beams: bool | None, alone: bool) -> None:
    assert facts_of("completions", prompt=IDS, use_beam_search=beams).prompt_scored is alone
    messages = [{"role": "user", "content": "Who is there?"}]
    assert facts_of("chat", messages=messages, use_beam_search=beams).prompt_scored is alone
