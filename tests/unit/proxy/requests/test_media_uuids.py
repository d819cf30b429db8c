"""Tests that a client's name of an image never reaches an engine, which would take it for a content hash."""

import json
import re
from typing import Any

import pytest

from kvparams.jsontext.document import JSONLimits
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import AuthenticatedClient, tenant_cache_salt
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import ParsedRequest
from tests.support.proxy.steps import read_all

HASH = "5e" * 32
"""As vLLM's own."""
NAMES: list[Any] = [HASH, HASH * 2, "cat.jpg", "", 7, None]
URL = {"url": "data:image/png;base64,AAAA"}
MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": URL},
    {"image_url": URL},
    {"type": "text", "image_url": "data:"},
    {"type": "input_image", "image_url": "data:"},
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "audio_url", "audio_url": URL},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "video_url", "video_url": URL},
]
TEXT = {"type": "text", "text": 'the "uuid" of \u00e9, \U0001f600 and a\\b'}


def inbound(kind: EndpointKind, body: object, client: AuthenticatedClient | None = None) -> ParsedRequest:
    return read_all(kind, json.dumps(body).encode(), "r", "t", JSONLimits(), client)


def sent(kind: EndpointKind, body: object, client: AuthenticatedClient | None = None) -> Any:
    """What an engine is sent of it; where members stand is told right."""
    found = inbound(kind, body, client)
    document = json.loads(found.body)
    for name, span in found.member_spans.items():
        assert json.loads(found.body[span.value : span.end]) == document[name]
    return document


def chat(*parts: Any) -> dict[str, Any]:
    rest = [{"role": "system", "content": "Look."}, {"role": "user", "content": [TEXT]}]
    return {"model": "m", "messages": [*rest, {"role": "user", "content": [TEXT, *parts]}], "temperature": 0.5}


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_chat_is_taken_out_and_nothing_else(medium: dict[str, Any], name: object) -> None:
    found = inbound("chat", chat({**medium, "uuid": name}, medium))
    assert json.loads(found.body) == chat(medium, medium)
    assert found.was_stripped


def test_a_body_without_names_stays_as_it_is() -> None:
    for body in (chat(), chat(*MEDIA), {"model": "m", "messages": [{"role": "user", "content": "uuid", "uuid": HASH}]}):
        raw = json.dumps(body).encode()
        found = read_all("chat", raw, "r", "t", JSONLimits())
        assert found.body is raw
        assert not found.was_stripped


def test_a_name_that_is_spelled_with_escapes_is_taken_out() -> None:
    raw = json.dumps(chat({**MEDIA[0], "uuid": HASH})).encode().replace(b'"uuid":', b'"u\\u0075id":')
    assert HASH.encode() not in read_all("chat", raw, "r", "t", JSONLimits()).body


def test_what_is_called_the_same_elsewhere_is_the_clients() -> None:
    schema = {"properties": {"uuid": {"type": "string"}}}
    more = {"tools": [{"function": {"name": "f", "parameters": schema}}], "documents": [{"uuid": "x", "text": "y"}]}
    assert sent("chat", chat({**MEDIA[0], "uuid": HASH}) | more) == chat(MEDIA[0]) | more


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": None}, {"type": "image_url"}, {}])
def test_a_name_alone_is_refused(part: dict[str, Any]) -> None:
    """The engine that knows it may be another one."""
    bodies: list[tuple[EndpointKind, Any, str]] = [
        ("chat", chat({**part, "uuid": HASH}), "messages"),
        ("generate", {"token_ids": [1], "content_parts": [{**part, "uuid": HASH}]}, "content_parts"),
    ]
    for kind, body, where in bodies:
        with pytest.raises(ProxyError) as caught:
            inbound(kind, body)
        assert (caught.value.status, caught.value.param) == (400, where)


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "user", "content": [TEXT, {**MEDIA[3], "uuid": HASH}]}]},
        {"input": [{"type": "function_call_output", "output": [{**MEDIA[3], "uuid": HASH}]}]},
        {"messages": [{"role": "user", "content": [{**MEDIA[0], "uuid": HASH}]}]},
        {"query": "text", "documents": ["text", {"content": [{**MEDIA[0], "uuid": HASH}]}]},
        {"query": {"content": [{**MEDIA[0], "uuid": HASH}]}, "documents": "text"},
        {"data_1": [{"content": [{**MEDIA[0], "uuid": HASH}]}], "data_2": {"content": [{**MEDIA[0], "uuid": HASH}]}},
    ],
)
def test_other_endpoints_get_no_names_either(body: dict[str, Any]) -> None:
    found = sent("other", {"model": "m", **body})
    assert HASH not in json.dumps(found)
    assert found == json.loads(json.dumps({"model": "m", **body}).replace(f', "uuid": "{HASH}"', ""))


def test_a_long_list_of_token_ids_is_left_alone() -> None:
    body = json.dumps({"model": "m", "input": list(range(1000))}).encode()
    assert read_all("other", body, "r", "t", JSONLimits()).body is body


def test_parts_beside_token_ids_lose_their_names() -> None:
    parts = [{"type": "image_url", "url": "data:", "uuid": HASH}, {"type": "audio_url", "url": "data:"}]
    found = sent("generate", {"model": "m", "token_ids": [1, 2], "content_parts": parts})
    assert found["content_parts"] == [{"type": "image_url", "url": "data:"}, parts[1]]


def test_hashes_of_features_are_bound_to_the_tenant() -> None:
    """The engine wants them, so they are there, but are nobody else's and look like no hash of the engine's."""
    features = {
        "mm_hashes": {"image": [HASH, "x"], "audio": []},
        "mm_placeholders": {},
        "kwargs_data": {"image": ["A"]},
    }
    body = {"model": "m", "token_ids": [1, 2], "features": features, "sampling_params": {}}
    tenants = [None, *(AuthenticatedClient("k", name, 0, tenant_cache_salt(name, None)) for name in ("a", "b"))]
    found = [sent("generate", body, client)["features"] for client in tenants]
    for one in found:
        assert {name: value for name, value in one.items() if name != "mm_hashes"} == {
            name: value for name, value in features.items() if name != "mm_hashes"
        }
        assert [len(one["mm_hashes"][name]) for name in ("image", "audio")] == [2, 0]
    bound = {name for one in found for name in one["mm_hashes"]["image"]}
    assert len(bound) == 6
    assert not any(re.fullmatch("[0-9a-f]{64}|[0-9a-f]{128}", name) for name in bound)
    assert sent("generate", body, tenants[1])["features"] == found[1]


@pytest.mark.parametrize("hashes", [None, "x", ["x"], {"image": "x"}, {"image": [1, None, ["x"]]}, {}])
def test_features_that_are_none_are_the_engines_to_refuse(hashes: object) -> None:
    body = {"model": "m", "token_ids": [1], "features": {"mm_hashes": hashes}}
    assert sent("generate", body)["features"] == {"mm_hashes": hashes}
    odds: list[Any] = [None, "x", [], 7]
    for odd in odds:
        assert sent("generate", {"model": "m", "token_ids": [1], "features": odd})["features"] == odd
