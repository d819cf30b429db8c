"""Tests that errors carry data, survive a trip between processes, and are one tree."""

import copy
import multiprocessing
from typing import cast, get_args

import pytest

from kvparams import (
    InvalidParams,
    JSONTextError,
    KVParamsError,
    KVTransferParams,
    PluginError,
    Problem,
    UnsupportedVersion,
    parse,
    validation,
)
from kvparams.errors import ProblemKind

PROBLEMS = (Problem(("load_keys", 3), "length", "too long"), Problem((), "json", "not JSON"))


@pytest.mark.parametrize("kind", [InvalidParams, UnsupportedVersion, JSONTextError, PluginError])
def test_every_error_is_ours(kind: type[Exception]) -> None:
    assert issubclass(kind, KVParamsError)


def test_an_unsupported_version_is_an_invalid_document() -> None:
    assert issubclass(UnsupportedVersion, InvalidParams)
    assert issubclass(InvalidParams, ValueError)


def test_the_text_says_where_and_what() -> None:
    assert str(InvalidParams(PROBLEMS)) == "load_keys.3: too long [length]; document: not JSON [json]"


def test_a_name_that_a_terminal_would_obey_is_shown_as_json() -> None:
    assert str(Problem(("extensions", "\x1b[31m\nX", 0), "value", "no")) == (
        'extensions."\\u001b[31m\\nX".0: no [value]'
    )
    assert str(Problem(("\u202e", "\ud800", "naïve key"), "value", "no")) == '"\\u202e"."\\ud800".naïve key: no [value]'


def patterns(schema: object) -> set[str]:
    """Every regular expression of a schema."""
    if isinstance(schema, list):
        return {one for inner in cast("list[object]", schema) for one in patterns(inner)}
    if not isinstance(schema, dict):
        return set()
    members = cast("dict[str, object]", schema)
    here = set(cast("dict[str, object]", members.get("patternProperties", {})))
    here |= {one for one in [members.get("pattern")] if isinstance(one, str)}
    return here | {one for inner in members.values() for one in patterns(inner)}


def test_every_form_is_told_in_words() -> None:
    assert set(validation._FORMS) == patterns(KVTransferParams.model_json_schema())  # pyright: ignore[reportPrivateUsage]
    document = {"version": "1.0", "request_id": "r", "phase": "decode", "mode": "store"}
    wrong = {
        "transfer": {"id": "a b", "attempt": 1},
        "producer": {"id": "p", "address": "host"},
        "extensions": {"x": {"a": 1}},
    }
    with pytest.raises(InvalidParams) as caught:
        parse(document | wrong)
    told = {problem.path: problem.message.partition(": ")[2] for problem in caught.value.problems}
    assert told == {
        ("transfer", "id"): "of A-Z a-z 0-9 . _ ~ -",
        ("producer", "address"): "host:port, an IPv6 address in brackets",
        ("extensions", "x"): "a domain name backwards, such as com.example.tiers",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "UTF-16"),
        ("{}".encode("utf-16-be"), "UTF-16"),
        ("{}".encode("utf-32-le"), "UTF-16 or UTF-32"),
        (b"{", "EOF"),
    ],
)
def test_text_in_another_encoding_is_told(text: bytes, words: str) -> None:
    with pytest.raises(InvalidParams, match=words):
        parse(text)


@pytest.mark.parametrize("kind", [InvalidParams, UnsupportedVersion])
def test_an_error_survives_a_copy(kind: type[InvalidParams]) -> None:
    again = copy.copy(kind(PROBLEMS))
    assert type(again) is kind
    assert again.problems == PROBLEMS


def test_an_error_survives_a_trip_between_processes() -> None:
    """Ours: engines run their schedulers in processes of their own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(InvalidParams) as caught:
        pool.apply_async(parse, ({},)).get(timeout=60)
    assert {problem.kind for problem in caught.value.problems} == {"missing"}
    assert len(caught.value.problems) == 5


def test_kinds_are_mapped_to_the_closed_set() -> None:
    assert set(validation._KINDS.values()) <= set(get_args(ProblemKind))  # pyright: ignore[reportPrivateUsage]
