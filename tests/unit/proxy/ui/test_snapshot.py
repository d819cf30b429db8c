"""Tests that a snapshot adds up what workers know, and that its rates are those of what came in between."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvparams_proxy.ui.advice import ADVICE
from kvparams_proxy.ui.quantiles import quantile
from kvparams_proxy.ui.snapshot import Snapshot, SnapshotBuilder, hide_addresses
from kvparams_proxy.ui.worker_part import ENDED_WORKERS, DecisionRow, EngineFacts, RequestRow, StoreFacts, WorkerPart

OK = 'kvparams_proxy_requests_total{outcome="ok"}'


def engine(id: str = "d0", **changes: Any) -> EngineFacts:
    facts = EngineFacts(
        *(id, id, "decode", "east", "nixl", "", "ready", "closed", 1, 10, 0, 0, 0.0, 5, 100, 50, 20, 10, 0.5),
        *(None, None, None),
        *(None, None, None, "it answers probes", 0.0),
    )
    return facts._replace(**changes)


def request(id: str, started: float = 0.0, total_ms: float = 10.0, **changes: Any) -> RequestRow:
    row = RequestRow(
        id=id,
        tenant="",
        model="m",
        endpoint="/v1/completions",
        stream=True,
        outcome="ok",
        status=200,
        error=None,
        route=[["decode", "d0"]],
        started=started,
        total_ms=total_ms,
        spans=[["created", "", 0.0], ["decode", "d0", 1.0], ["done", "", total_ms]],
        prompt_tokens=1,
        cached_tokens=None,
        completion_tokens=1,
        retries=0,
        answer_bytes=1,
        trace=None,
        decision=None,
    )
    row.update(changes)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return row


def part(worker: int = 0, **changes: Any) -> dict[str, object]:
    whole = WorkerPart(
        worker=worker,
        policy="round_robin",
        modes=[],
        needed=["decode"],
        roles={"decode": {"total": 1, "ready": 1, "draining": 0, "broken": 0, "waiting": 2, "usable": 1}},
        exchange=None,
        engines=[engine()],
        counters={OK: 10.0},
        states={"pending": 1, "encoding": 5, "prefilling": 2, "decoding": 3},
        running=[],
        recent=[],
        failed=[],
        slow=[],
        flows=[],
        stores=[],
        prefixes=None,
        sampled=4,
    )
    return {**whole, **changes}


class Builder:
    """Builds at once what `SnapshotBuilder` builds in steps."""

    def __init__(self) -> None:
        self.builder = SnapshotBuilder("1")
        self.forget = self.builder.forget

    def build(self, parts: Sequence[Mapping[str, object]], now_s: float, epoch_s: float) -> Snapshot:
        steps = self.builder.build(parts, now_s, epoch_s)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value


def build(*parts: Mapping[str, object]) -> Snapshot:
    return Builder().build(parts, 100.0, 1e9)


def test_counts_of_workers_are_added_and_those_of_exited_workers_too() -> None:
    legs = 'kvparams_proxy_legs_total{instance="d0",role="decode"}'
    ended = {ENDED_WORKERS: {OK: 100.0, legs: 7.0, "kvparams_proxy_loop_lag_seconds_sum": 9.0}}
    found = build(part(1), part(2), ended)
    assert found["counters"] == {OK: 120.0}
    assert found["workers"] == 2
    assert found["states"] == {"pending": 2, "encoding": 10, "prefilling": 4, "decoding": 6}
    assert found["roles"]["decode"]["waiting"] == 4
    assert found["roles"]["decode"]["total"] == 1  # one engine, however many workers know it
    (row,) = found["engines"]
    assert (row.in_flight, row.tokens, row.legs) == (2, 20, 17)


def test_no_rate_is_negative_after_a_worker_was_replaced() -> None:
    legs = 'kvparams_proxy_legs_total{instance="d0",role="decode"}'
    builder = Builder()
    builder.build([part(1), part(2)], 100.0, 1e9)
    found = builder.build([part(1), {ENDED_WORKERS: {legs: 5.0}}], 105.0, 1e9)
    (row,) = found["engines"]
    assert (row.legs_per_s, row.prompt_tokens_per_s, row.answer_tokens_per_s) == (None, None, None)


def test_the_worst_state_that_a_worker_sees_is_shown() -> None:
    bad = part(2, engines=[engine(state="broken", breaker="open", wait_s=2.0)])
    for parts in ((part(1), bad), (bad, part(1))):
        (row,) = build(*parts)["engines"]
        assert (row.state, row.breaker, row.wait_ms) == ("broken", "open", 2000.0)


def test_rates_are_none_at_first_and_then_those_of_what_came_in_between() -> None:
    builder = Builder()
    first = builder.build([part()], 100.0, 1e9)
    assert first["rates"] == {OK: None}
    assert first["engines"][0].legs_per_s is None
    later = part(counters={OK: 30.0}, engines=[engine(legs=9, prompt_tokens=300, cached_tokens=200)])
    second = builder.build([later], 102.0, 1e9)
    assert second["rates"] == {OK: 10.0}
    row = second["engines"][0]
    assert (row.legs_per_s, row.prompt_tokens_per_s, row.hit_ratio) == (2.0, 100.0, 0.75)
    builder.forget()
    assert builder.build([later], 103.0, 1e9)["rates"] == {OK: None}


def test_a_counter_that_went_back_has_no_rate() -> None:
    builder = Builder()
    builder.build([part()], 100.0, 1e9)
    found = builder.build([part(counters={OK: 3.0}, engines=[engine(legs=1)])], 101.0, 1e9)
    assert found["rates"] == {OK: None}
    assert found["engines"][0].legs_per_s is None


def test_rates_look_back_some_seconds_and_not_further() -> None:
    builder = Builder()
    counts = [1000.0 if second < 30 else 1000.0 + second for second in range(60)]
    found = [builder.build([part(counters={OK: count})], float(n), 1e9) for n, count in enumerate(counts)]
    assert found[-1]["rates"][OK] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("usable", "ready", "status"),
    [(1, 1, "ok"), (1, 0, "degraded"), (0, 0, "unavailable"), (None, None, "unavailable")],
)
def test_the_status_is_that_of_the_roles_that_are_needed(usable: int | None, ready: int | None, status: str) -> None:
    counts = {"total": 1, "ready": ready, "draining": 0, "broken": 0, "waiting": 0, "usable": usable}
    roles = {} if usable is None else {"decode": counts}
    assert build(part(roles=roles))["status"] == status


def test_requests_of_workers_are_merged_in_order_and_bounded() -> None:
    many = [request(f"a{n}", 100.0 - n) for n in range(30)]
    found = build(
        part(1, recent=many, slow=[request("s", total_ms=5.0)]),
        part(2, recent=[request("b", 99.5)], slow=[request("t", total_ms=9.0)]),
    )
    assert [row["id"] for row in found["requests"]["recent"][:3]] == ["a0", "b", "a1"]
    assert len(found["requests"]["recent"]) == 16
    assert [row["id"] for row in found["requests"]["slow"]] == ["t", "s"]


@pytest.mark.parametrize(
    ("expected", "confirmed", "health"),
    [(0, 0, "unknown"), (100, 80, "ok"), (100, 60, "degraded"), (100, 10, "failing")],
)
def test_a_store_is_as_well_as_what_was_found_there(expected: int, confirmed: int, health: str) -> None:
    (store,) = build(part(stores=[StoreFacts("s", 2, 2, 1, expected, confirmed)]))["stores"]
    assert store["health"] == health


def test_flows_are_shares_of_the_rate_of_decode_legs() -> None:
    builder = Builder()
    flows = [["east", "west", 3, 300], ["east", "east", 1, 50]]
    assert builder.build([part(flows=flows)], 100.0, 1e9)["flows"][0]["per_s"] is None
    found = builder.build([part(flows=flows, engines=[engine(legs=13)])], 102.0, 1e9)
    assert [(way["from"], way["to"], way["per_s"]) for way in found["flows"]] == [
        ("east", "west", 3.0),
        ("east", "east", 1.0),
    ]


def test_errors_say_what_they_mean_and_what_to_do() -> None:
    counters = {
        OK: 5.0,
        'kvparams_proxy_requests_total{outcome="gone"}': 1.0,
        'kvparams_proxy_leg_failures_total{kind="timeout",role="prefill"}': 2.0,
        'kvparams_proxy_leg_failures_total{kind="busy",role="prefill"}': 0.0,
        'kvparams_proxy_refusals_total{status="418"}': 3.0,
        'kvparams_proxy_handoffs_refused_total{reason="missing"}': 4.0,
    }
    found = build(part(counters=counters))["errors"]
    assert [(row["kind"], row["count"]) for row in found] == [
        ("handoff: missing", 4),
        ("HTTP 418", 3),
        ("prefill leg: timeout", 2),
        ("gone", 1),
    ]
    assert all(row["meaning"] and row["action"].endswith(".") for row in found)


def test_every_kind_of_failed_leg_and_every_status_has_advice() -> None:
    from kvparams_proxy.telemetry.metrics import FAILURE_KINDS

    assert set(ADVICE["kvparams_proxy_leg_failures_total"]) == set(FAILURE_KINDS)


def test_names_that_contain_addresses_are_replaced_wherever_they_stand() -> None:
    decision = DecisionRow(
        chosen="d-10.0.0.1",
        prompt_tokens=1,
        cached=0,
        fetched=0,
        computed=1,
        wait_ms=0.0,
        fetch_ms=0.0,
        compute_ms=0.0,
        source="d-10.0.0.1",
        others=[["d-10.0.0.1", 3], ["d1", 2]],
        candidates=2,
    )
    row = request("r", route=[["decode", "d-10.0.0.1"]], spans=[["decode", "d-10.0.0.1", 0.0]], decision=decision)
    found = build(part(engines=[engine("d-10.0.0.1")], recent=[row], failed=[row], slow=[row], running=[row]))
    assert "10.0.0.1" in str(found)
    hidden = hide_addresses(found, {"d-10.0.0.1": "decode-abc"})
    assert "10.0.0.1" not in str(hidden)
    assert str(hidden).count("decode-abc") == 1 + 4 * 5
    assert "10.0.0.1" in str(found)  # admins still see it


def test_quantiles_are_those_of_prometheus() -> None:
    family = "kvparams_proxy_time_to_first_byte_seconds"
    counters = {
        f'{family}_bucket{{le="{le}"}}': value
        for le, value in (("0.1", 0.0), ("0.5", 10.0), ("1.0", 20.0), ("+Inf", 20.0))
    }
    assert quantile(family, 0.5, counters) == pytest.approx(0.5)
    assert quantile(family, 0.75, counters) == pytest.approx(0.75)
    assert quantile(family, 0.25, counters) == pytest.approx(0.3)
    assert quantile(family, 0.5, counters, counters) is None
    assert quantile(family, 0.5, {}) is None
    above = {f'{family}_bucket{{le="0.1"}}': 0.0, f'{family}_bucket{{le="+Inf"}}': 4.0}
    assert quantile(family, 0.5, above) == 0.1


def test_bytes_of_engines_are_rates_and_none_where_the_engine_does_not_say() -> None:
    builder = Builder()
    builder.build([part(engines=[engine(transferred=100.0, loaded=5.0)])], 100.0, 1e9)
    found = builder.build([part(engines=[engine(transferred=1100.0, loaded=4.0)])], 102.0, 1e9)
    (row,) = found["engines"]
    assert (row.transfer_bytes_per_s, row.load_bytes_per_s, row.save_bytes_per_s) == (500.0, None, None)
    assert row.legs_per_s == 0.0  # an engine that has restarted costs only the rate of its own counter


def test_two_workers_that_read_the_same_counter_do_not_count_it_twice() -> None:
    builder = Builder()
    for at_s, one, other in ((100.0, 100.0, 90.0), (101.0, 150.0, 180.0)):
        both = [part(1, engines=[engine(transferred=one)]), part(2, engines=[engine(transferred=other)])]
        (row,) = builder.build(both, at_s, 1e9)["engines"]
    assert row.transfer_bytes_per_s == 80.0


def test_bytes_are_divided_among_the_ways_to_a_group() -> None:
    ways = [["east", "east", 3, 300], ["west", "east", 1, 100], ["west", "west", 1, 50]]
    builder = Builder()
    for at_s, moved in ((100.0, 0.0), (110.0, 4000.0)):
        engines = [
            engine("d0", transferred=moved),
            engine("d1", group="west"),
            engine("p1", role="prefill", group="west", transferred=moved / 4),
        ]
        found = builder.build([part(engines=engines, flows=ways)], at_s, 1e9)
    rates = {(way["from"], way["to"]): way["bytes_per_s"] for way in found["flows"]}
    pushed = 100.0 / 3
    assert rates == {
        ("east", "east"): 300.0,
        ("west", "east"): pytest.approx(100.0 + 2 * pushed, abs=0.01),
        ("west", "west"): pytest.approx(pushed, abs=0.01),
    }
    unknown = build(part(flows=ways))["flows"]
    assert {way["bytes_per_s"] for way in unknown} == {None}


def test_the_reason_is_that_of_the_worst_state() -> None:
    bad = engine(state="not_ready", reason="no connection to the engine (refused)", since=7.0)
    for parts in ((part(1), part(2, engines=[bad])), (part(1, engines=[bad]), part(2))):
        (row,) = build(*parts)["engines"]
        assert (row.reason, row.since) == (bad.reason, 7.0)
