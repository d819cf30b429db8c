"""Tests the members of vLLM #12957: the law of the round trip, and reading them from a request."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams import InvalidParams, KVTransferParams, TokenPrefix, dump, legacy_params, parse, read_request, write

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
KEYS = st.lists(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=9), max_size=4)
NATIVE = st.dictionaries(
    st.text(max_size=6), st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none()), max_size=3
)


def one_prompt() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "prefix_prompt_ids": st.none() | IDS,
            "kvcache_load_keys": st.none() | KEYS,
            "kvcache_store_keys": st.none() | KEYS,
        },
    ).filter(bool)


@st.composite
def several_prompts(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 4))
    made: dict[str, Any] = {}
    for name, entries in (("prefix_prompt_ids", IDS), ("kvcache_load_keys", KEYS), ("kvcache_store_keys", KEYS)):
        if draw(st.booleans()):
            made[name] = draw(st.lists(st.none() | entries, min_size=size, max_size=size))
    if not made:
        made["prefix_prompt_ids"] = draw(st.lists(st.none() | IDS, min_size=size, max_size=size))
    return made


@given(one_prompt() | several_prompts(), NATIVE)
def test_what_was_read_is_written_back_as_it_was(members: dict[str, Any], native: dict[str, Any]) -> None:
    """Spec-mandated, 1.0#9.6: also through the documents and their JSON, and from text."""
    value = {**native, **members}
    found = legacy_params.read_legacy_params(value)
    documents = found.to_params("r", "t")
    assert legacy_params.write_legacy_params(documents, batched=found.batched, native=found.native) == value
    through_json = [parse(json.dumps(dump(params))) for params in documents]
    assert legacy_params.write_legacy_params(through_json, batched=found.batched, native=found.native) == value
    assert legacy_params.read_legacy_params(json.dumps(value)) == found


@given(st.lists(st.tuples(IDS, st.none() | KEYS, st.none() | KEYS), min_size=1, max_size=4))
def test_what_was_written_is_read_back(said: list[tuple[list[int], list[str] | None, list[str] | None]]) -> None:
    """Ours: the other direction, for documents that the trio can say."""
    documents = [
        parse(
            {
                "version": "1.0",
                "request_id": "r",
                "transfer": {"id": f"t-{index}", "attempt": 1},
                "phase": "decode" if load and not store else "prefill",
                "mode": "store",
                "prefix": {"count": len(ids), "packed": TokenPrefix.pack(ids).packed},
                "load_keys": load,
                "store_keys": store,
            }
        )
        for index, (ids, load, store) in enumerate(said)
    ]
    assert (
        list(
            legacy_params.read_legacy_params(legacy_params.write_legacy_params(documents, batched=True)).to_params(
                "r", "t"
            )
        )
        == documents
    )


def document(**members: object) -> KVTransferParams:
    return parse(
        {
            "version": "1.0",
            "request_id": "r",
            "transfer": {"id": "t", "attempt": 1},
            "phase": "prefill",
            "mode": "store",
            **members,
        }
    )


def test_every_form_of_the_prefix_is_written_as_a_list() -> None:
    for prefix in ([1, 2], {"count": 2, "ids": [1, 2]}, {"count": 2, "packed": "AQAAAAIAAAA="}):
        assert legacy_params.write_legacy_params([document(prefix=prefix)]) == {"prefix_prompt_ids": [1, 2]}


def test_a_digest_is_not_written_as_a_trio() -> None:
    """Spec-mandated, 1.0#9.7."""
    hidden = document(prefix={"count": 1, "digest": "sha256:" + "0" * 64})
    with pytest.raises(InvalidParams) as caught:
        legacy_params.write_legacy_params([document(prefix=[1]), hidden], batched=True)
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [((1, "prefix"), "conflict")]


def test_in_a_batch_a_member_that_some_documents_lack_is_null_for_them() -> None:
    documents = [document(store_keys=["a"]), document(load_keys=["b"])]
    assert legacy_params.write_legacy_params(documents, batched=True) == {
        "kvcache_load_keys": [None, ["b"]],
        "kvcache_store_keys": [["a"], None],
    }


def test_several_documents_without_a_batch_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="batch"):
        legacy_params.write_legacy_params([document(), document()])


def test_a_request_that_carries_the_trio_is_named_by_its_reader() -> None:
    """Spec-mandated, 1.0#9.4."""
    value = {"prefix_prompt_ids": [1], "kvcache_store_keys": ["k"]}
    for given_value in (value, json.dumps(value)):
        found = read_request(given_value, request_id="cmpl-7")
        assert found is not None
        assert (found.request_id, found.transfer.id, found.transfer.attempt) == ("cmpl-7", "cmpl-7", 1)
        assert (found.phase, found.mode, found.store_keys) == ("prefill", "store", ("k",))
    other = read_request(value, request_id="http://x/7", transfer_id="t7")
    assert other is not None
    assert (other.request_id, other.transfer.id) == ("http://x/7", "t7")


def test_a_trio_without_a_name_is_refused() -> None:
    """Spec-mandated, 1.0#9.4: its reader makes no id up."""
    with pytest.raises(InvalidParams) as caught:
        read_request({"kvcache_load_keys": ["k"]})
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [(("request_id",), "missing")]


def test_an_id_that_no_document_can_carry_is_refused() -> None:
    with pytest.raises(InvalidParams) as caught:
        read_request({"kvcache_load_keys": ["k"]}, request_id="a b")
    assert {problem.path for problem in caught.value.problems} == {("request_id",), ("transfer", "id")}


def test_a_trio_for_several_prompts_is_not_one_document() -> None:
    with pytest.raises(InvalidParams) as caught:
        read_request({"kvcache_load_keys": [["k"], ["l"]]}, request_id="r")
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [((), "conflict")]


def test_the_document_wins_over_a_trio_beside_it() -> None:
    """Spec-mandated, 1.0#2.4: even over one that is broken."""
    params = document(load_keys=["ours"])
    assert read_request(write(params, {"kvcache_load_keys": 7})) == params
