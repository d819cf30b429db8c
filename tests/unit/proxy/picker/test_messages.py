"""Tests what is read from Envoy's messages, and what is written to it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.ext_proc import messages as ext_proc
from kvparams_proxy.ext_proc.message_types import ProcessingRequest
from kvparams_proxy.picker.usage_reader import UsageReader


def request(**metadata: dict[str, Any]) -> Any:
    made = ProcessingRequest()
    for namespace, value in metadata.items():
        made.metadata_context.filter_metadata[namespace.replace("__", ".")].update(value)
    return made


@pytest.mark.parametrize(
    ("value", "endpoints"),
    [
        ([], frozenset[str]()),
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        ("", frozenset[str]()),
    ],
)
def test_a_subset_is_a_list_or_a_text(value: object, endpoints: frozenset[str]) -> None:
    hint = request(envoy__lb__subset_hint={"x-gateway-destination-endpoint-subset": value})
    assert ext_proc.subset_hint(hint) == endpoints


def test_without_the_key_there_is_no_subset() -> None:
    assert ext_proc.subset_hint(request()) is None
    assert ext_proc.subset_hint(request(envoy__lb__subset_hint={"other": "x"})) is None
    assert ext_proc.subset_hint(request(envoy__lb={"x-gateway-destination-endpoint-subset": "a:1"})) is None


def test_who_has_answered_is_in_metadata_or_in_an_attribute() -> None:
    assert ext_proc.served_endpoint(request()) is None
    attributed = request()
    attributed.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "a:1"})
    assert ext_proc.served_endpoint(attributed) == "a:1"
    attributed.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": "b:2"})
    assert ext_proc.served_endpoint(attributed) == "b:2"


def test_header_and_metadata_name_the_same_endpoints() -> None:
    answer = ext_proc.destination_answer(["a:1", "b:2"], {"x-more": b"1"}, ["x-gone"])
    mutation = answer.request_headers.response.header_mutation
    headers = {each.header.key: each.header.raw_value for each in mutation.set_headers}
    assert headers == {ext_proc.DESTINATION: b"a:1,b:2", "x-more": b"1"}
    assert answer.dynamic_metadata.fields["envoy.lb"].struct_value[ext_proc.DESTINATION] == "a:1,b:2"
    assert list(mutation.remove_headers) == ["x-gone"]


@given(st.integers(0, 200_000), st.booleans())
def test_a_body_comes_back_whole_in_chunks_that_envoy_accepts(size: int, ends: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    chunks = [
        each.request_body.response.body_mutation.streamed_response
        for each in ext_proc.streamed_body(body[:size], ends=ends)
    ]
    assert b"".join(each.body for each in chunks) == body[:size]
    assert max(len(each.body) for each in chunks) < 64 << 10
    assert [each.end_of_stream for each in chunks] == [False] * (len(chunks) - 1) + [ends]


@pytest.mark.parametrize(("status", "told"), [(429, 429), (503, 503), (404, 404), (999, 500)])
def test_errors_are_immediate_responses(status: int, told: int) -> None:
    error = ProxyError(status, "kind", "said", code="a code", retry_after_s=7)
    immediate = ext_proc.immediate_error(error, "r1").immediate_response
    headers = {each.header.key: each.header.raw_value for each in immediate.headers.set_headers}
    assert (immediate.status.code, immediate.details) == (told, "a_code")
    assert headers["retry-after"] == b"7"
    assert headers["x-request-id"] == b"r1"
    assert b"said" in immediate.body.encode() if isinstance(immediate.body, str) else b"said" in immediate.body


@given(st.lists(st.binary(max_size=3000), max_size=5), st.integers(1, 50))
def test_usage_is_found_however_the_body_is_cut(before: list[bytes], size: int) -> None:
    usage = b'{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}'
    end = b'data: {"choices":[],"usage":' + usage + b"}\n\ndata: [DONE]\n"
    reader = UsageReader()
    for each in [*before, *(end[start : start + size] for start in range(0, len(end), size))]:
        reader.feed(each)
    assert reader.usage() == {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}


@pytest.mark.parametrize("body", [b"", b'{"usage":null}', b'{"usage":{"prompt', b'"usage":[1]'])
def test_a_body_without_usage_has_none(body: bytes) -> None:
    reader = UsageReader()
    reader.feed(body)
    assert reader.usage() is None
