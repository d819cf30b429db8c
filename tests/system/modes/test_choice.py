"""Tests which manager a request gets, and how modes are parsed, without any I/O."""

from collections.abc import Collection
from typing import Any

import pytest

from kvparams.dialects.store import STORE
from kvparams.instances import RequestFacts, Role
from kvparams.routing.managers.factory import create_manager, manager_names
from kvparams.routing.managers.mode_selector import ActiveManager, ManagerMode, ModeCondition, ModeSelector
from kvparams.routing.plan import LegFailed, LegResult
from kvparams_proxy.config.mode_parsing import mode_document, parse_mode_flag, parse_modes
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.execution.active_modes import ActiveModes
from tests.support.kvparams.planning import Table, fleet_of

FACTS = RequestFacts("r", "t", "m", 1, 1, None, None, tenant="acme", prompt_tokens=100, session="s")
AT = "/v1/completions"


def active(*modes: ManagerMode) -> ModeSelector:
    return ModeSelector([ActiveManager(mode, create_manager(mode.use, None, mode.options)) for mode in modes])


@pytest.mark.parametrize(
    ("when", "other"),
    [
        ({"model": frozenset("m")}, {"model": frozenset("n")}),
        ({"endpoint": frozenset([AT])}, {"endpoint": frozenset(["/v1/chat/completions"])}),
        ({"tenant": frozenset(["acme"])}, {"tenant": frozenset(["else"])}),
        ({"session": frozenset("s")}, {"session": frozenset("t")}),
        ({"stream": True}, {"stream": False}),
        ({"min_tokens": 100}, {"min_tokens": 101}),
        ({"max_tokens": 100}, {"max_tokens": 99}),
        ({"stream": True, "model": frozenset("m")}, {"stream": True, "model": frozenset("n")}),
    ],
)
def test_every_condition_must_hold(when: dict[str, Any], other: dict[str, Any]) -> None:
    assert ModeCondition(**when).matches(FACTS, AT, True)
    assert not ModeCondition(**other).matches(FACTS, AT, True)


def test_the_highest_priority_goes_first_and_of_equals_the_first_one() -> None:
    short, stream = ModeCondition(max_tokens=100), ModeCondition(stream=True)
    choice = active(
        ManagerMode("prefill_then_decode"), ManagerMode("aggregated", short, 1), ManagerMode("conditional", stream, 1)
    )
    assert choice.select_manager(FACTS, AT, True).roles == (Role.AGGREGATED,)
    longer = FACTS._replace(prompt_tokens=101)
    assert type(choice.select_manager(longer, AT, True)).__name__ == "Conditional"
    assert type(choice.select_manager(longer, AT, False)).__name__ == "PrefillThenDecode"


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ([ManagerMode("aggregated", ModeCondition(stream=True))], "one mode must be for all requests"),
        (
            [ManagerMode("aggregated"), ManagerMode("conditional")],
            "conditional is never used, because aggregated before it",
        ),
    ],
)
def test_there_is_always_an_answer_and_none_that_is_never_given(modes: list[ManagerMode], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        active(*modes)


def test_what_is_read_is_what_was_written() -> None:
    problems = ConfigProblems()
    written: list[Any] = [
        {"use": "conditional", "when": {"model": "m", "min_tokens": 5, "stream": False}, "priority": 3},
        {"use": "prefill_then_decode", "options": {"decode_first": True}},
    ]
    modes = parse_modes(written, "modes", problems)
    problems.raise_if_any()
    again = parse_modes([mode_document(mode) for mode in modes], "modes", problems)
    problems.raise_if_any()
    assert again == modes
    assert modes[0].when == ModeCondition(model=frozenset("m"), min_tokens=5, stream=False)


WRONG: list[tuple[object, str]] = [
    ({}, "modes: must be a list of 1 to 64"),
    ([], "modes: must be a list of 1 to 64"),
    ([5], "modes[0]: must be an object with use, when, priority, options"),
    ([{"use": "x"}], "modes[0].use: must be one of aggregated, "),
    ([{"use": "aggregated", "whne": {}}], "modes[0].whne: is not known here"),
    ([{"use": "aggregated", "when": {"tokens": 5}}], "modes[0].when.tokens: is not known here"),
    ([{"use": "aggregated", "when": {"model": []}}], "modes[0].when.model: must be text"),
    ([{"use": "aggregated", "when": {"min_tokens": -1}}], "modes[0].when.min_tokens: must be a whole number"),
    ([{"use": "aggregated", "when": {"stream": 1}}], "modes[0].when.stream: must be true or false"),
    ([{"use": "aggregated", "priority": "high"}], "modes[0].priority: must be a whole number"),
    (
        [{"use": "aggregated", "options": {"x": 1}}],
        "modes[0].options: 'x' is not an option of this mode; it has no options",
    ),
    ([{"use": "conditional", "options": {"fallback": 1}}], "modes[0].options: fallback must be true or false"),
    (
        [{"use": "conditional", "options": {"fallbak": True}}],
        "modes[0].options: 'fallbak' is not an option of this mode; did you mean fallback? known: remote_tokens, "
        "fallback",
    ),
    ([{"use": "aggregated", "when": {"stream": True}}], "modes: one mode must be for all requests"),
]


@pytest.mark.parametrize(("written", "said"), WRONG)
def test_what_cannot_be_used_is_refused_in_words(written: object, said: str) -> None:
    problems = ConfigProblems()
    parse_modes(written, "modes", problems)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  its words are looked at
        problems.raise_if_any()
    assert said in str(refused.value)


def test_the_flag_takes_options() -> None:
    assert parse_mode_flag("conditional,remote_tokens=9,fallback=true").options == {
        "remote_tokens": 9,
        "fallback": True,
    }
    for text, said in (
        ("nobody", f"must be one of {', '.join(manager_names())}"),
        ("conditional,fallback", "'fallback' must be OPTION=VALUE"),
        ("conditional,remote_tokens=x", "remote_tokens must be a whole number"),
        ("conditional,remote_tokens=" + 5_000 * "9", "remote_tokens must be a whole number"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_mode_flag(text)


def test_a_switch_keeps_the_managers_that_go_on_and_fails_whole() -> None:
    modes = ActiveModes([ManagerMode("prefill_then_decode")])
    heard: list[Collection[frozenset[Role]]] = []
    modes.set_change_listener(heard.append)
    first = modes.select_manager(FACTS, AT, True)
    modes.replace(
        [ManagerMode("aggregated", ModeCondition(min_tokens=101), 1), ManagerMode("prefill_then_decode")], "test"
    )
    assert modes.select_manager(FACTS, AT, True) is first
    assert modes.select_manager(FACTS._replace(prompt_tokens=101), AT, True) is not first
    with pytest.raises(ValueError, match="one mode must be"):
        modes.replace([ManagerMode("aggregated", ModeCondition(stream=True))], "test")
    assert modes.select_manager(FACTS, AT, True) is first
    assert heard == [{frozenset((Role.PREFILL, Role.DECODE))}, {frozenset(Role) - {Role.ENCODE}}]


def conditional(table: Table, tokens: int, **options: object) -> list[str]:
    plan = create_manager("conditional", None, options).legs(FACTS._replace(prompt_tokens=tokens), table)
    table.run(plan, lambda leg: LegResult({} if leg.answers_client else {"kvparams": RESULT}))
    return table.chosen


RESULT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
}


def test_a_prompt_goes_to_prefill_only_where_enough_of_it_is_new() -> None:
    assert conditional(Table(STORE), 511) == ["decode-0"]
    assert conditional(Table(STORE), 512) == ["prefill-0", "decode-0"]
    assert conditional(Table(STORE), 9, remote_tokens=8) == ["prefill-0", "decode-0"]
    for cached, chosen in (
        ({"decode-1": 1}, ["decode-1"]),
        ({"decode-0": 1, "decode-1": 2}, ["decode-1"]),
        ({"prefill-0": 100}, ["prefill-0", "decode-0"]),
    ):
        table = Table(STORE, fleet_of(1, 2))
        table.cached = cached
        assert conditional(table, 513 if len(cached) > 1 else 512) == chosen


def test_where_whoever_has_the_rest_is_full_the_prompt_is_computed_by_prefill() -> None:
    table = Table(STORE, fleet_of(1, 2))
    table.cached, table.full = {"decode-0": 512}, {"decode-0"}
    assert conditional(table, 600) == ["decode-1", "prefill-0", "decode-1"]
    assert table.given_back == ["decode-1"]
    assert [leg.instance.id for leg in table.legs] == ["prefill-0", "decode-1"]


def test_whoever_is_there_does_both_only_by_wish() -> None:
    for there, chosen in (((0, 1, 0), "decode-0"), ((1, 0, 0), "prefill-0"), ((1, 0, 1), "aggregated-0")):
        assert conditional(Table(STORE, fleet_of(*there)), 1000, fallback=True) == [chosen]
    assert create_manager("conditional").roles == (Role.PREFILL, Role.DECODE)
    assert create_manager("conditional", None, {"fallback": True}).roles == ()


def test_decode_first_takes_room_there_before_prefill_and_keeps_it() -> None:
    manager = create_manager("prefill_then_decode", None, {"decode_first": True})
    table = Table(STORE, fleet_of(2, 2), retries=1)
    fails = [LegFailed("broken", another=True)]

    def answer(leg: Any) -> LegResult | LegFailed:
        if leg.answers_client:
            return LegResult({})
        return fails.pop() if fails else LegResult({"kvparams": RESULT})

    table.run(manager.legs(FACTS, table), answer)
    assert table.chosen == ["decode-0", "prefill-0", "prefill-1"]
    assert table.given_back == []
