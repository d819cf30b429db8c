"""Plans of legs, without any I/O."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams import parse
from kvparams.codec import Template
from kvparams.coordination import LegAnswer, PrefillThenDecode
from kvparams.dialects import Dialect, HandoffMissing, NotSplittable
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.store import STORE
from kvparams.errors import InvalidParams
from kvparams.scheduling import Instance, RequestFacts, Role

HANDOFF: dict[str, object] = {
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "h",
    "remote_port": 5600,
    "remote_blocks_expiry_time": None,
    "future_key": {"kept": [2**62]},
}
RESULT: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["k"],
}


def facts(**changes: Any) -> RequestFacts:
    return RequestFacts("req", "tra", "m", 1, 1, None, None)._replace(**changes)


def instances() -> dict[Role, Instance]:
    return {role: Instance(f"{role}-0", "boot", role, "http://h:1", "x") for role in Role}


def run(dialect: Dialect, answer: Mapping[str, object], request: RequestFacts, members: Mapping[str, object]) -> Any:
    chosen: list[Role] = []
    fleet = instances()

    def choose(role: Role) -> Instance:
        chosen.append(role)
        return fleet[role]

    legs = PrefillThenDecode().legs(request, members, choose, lambda _: dialect)
    first = next(legs)
    assert chosen == [Role.PREFILL]  # decode is chosen when prefill is done, not before
    assert not first.answers_client
    second = legs.send(LegAnswer(answer))
    assert second.answers_client
    with pytest.raises(StopIteration):
        next(legs)
    return first, second


def params(leg: Any) -> dict[str, Any]:
    return json.loads(leg.changes["kv_transfer_params"])


def test_nixls_dictionary_goes_to_decode_as_it_came() -> None:
    first, second = run(NIXL, HANDOFF | {"kvparams": RESULT}, facts(), {"max_tokens": 1, "n": 1})
    assert params(first)["do_remote_decode"] is True
    told = params(second)
    document = parse(told.pop("kvparams"))
    assert told == HANDOFF
    assert document.load_keys == ("k",)
    assert set(second.changes) == {"kv_transfer_params"}
    assert first.changes["n"] is None
    assert "min_tokens" not in first.changes
    assert "max_completion_tokens" not in first.changes


@pytest.mark.parametrize(
    ("dialect", "answer", "error"),
    [
        (NIXL, {}, HandoffMissing),
        (NIXL, HANDOFF | {"remote_host": None}, HandoffMissing),
        (STORE, HANDOFF, HandoffMissing),
        (STORE, {"kvparams": 5}, InvalidParams),
        (STORE, {"kvparams": RESULT | {"version": "2.0"}}, InvalidParams),
    ],
)
def test_an_answer_that_cannot_be_handed_on_stops_the_plan(
    dialect: Dialect, answer: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(dialect, answer, facts(), {})


def test_what_a_connector_cannot_carry_is_refused_before_anything_runs() -> None:
    for request in (facts(prompts=2), facts(choices=2)):
        fleet = instances()
        with pytest.raises(NotSplittable):
            next(PrefillThenDecode().legs(request, {}, fleet.__getitem__, lambda _: NIXL))
        run(STORE, {"kvparams": RESULT}, request, {})


IDS = st.from_regex(r"[A-Za-z0-9._~-]{1,128}", fullmatch=True)


@given(IDS, IDS)
def test_a_template_writes_what_the_document_itself_would(request_id: str, transfer_id: str) -> None:
    document = parse(RESULT)
    changed = RESULT | {"request_id": request_id, "transfer": {"id": transfer_id, "attempt": 1}}
    assert json.loads(Template(document).fill(request_id, transfer_id)) == changed


@pytest.mark.parametrize("bad", ["", "a b", 'a"b', "a\\b", "x" * 129, "é", "a\n"])
def test_a_template_takes_identifiers_only(bad: str) -> None:
    template = Template(parse(RESULT))
    for ids in ((bad, "t"), ("r", bad)):
        with pytest.raises(InvalidParams):
            template.fill(*ids)
