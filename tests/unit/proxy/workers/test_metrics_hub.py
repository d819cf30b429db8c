"""Tests that the supervisor loses no count of any worker, and that no counter goes backwards."""

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvparams_proxy.telemetry.metric_snapshots import encode_metric
from kvparams_proxy.workers.metrics_hub import MetricsHub, WorkerGauges


def send(hub: MetricsHub, serial: int, counts: dict[str, int], *, in_flight: int = 0) -> None:
    """Sends the parts of a snapshot, without its end."""
    legs = CounterMetricFamily("kvparams_proxy_legs", "text", labels=["instance"])
    for id, number in counts.items():
        legs.add_metric([id], number)
    running = GaugeMetricFamily("kvparams_proxy_in_flight", "text", value=in_flight)
    for metric in (legs, running):
        hub.receive(serial, metric.name.encode() + b"\n" + encode_metric(metric))


def shown(hub: MetricsHub) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in hub.merged():
        for sample in metric.samples:
            found[sample.labels.get("instance", sample.name)] = sample.value
    return found


def test_counters_of_a_killed_worker_stay_and_its_gauges_go() -> None:
    hub = MetricsHub()
    for serial in (1, 2):
        send(hub, serial, {"p0": 10 * serial}, in_flight=serial)
        hub.complete(serial)
    assert (shown(hub)["p0"], shown(hub)["kvparams_proxy_in_flight"]) == (30, 3)
    hub.end(1)
    assert (shown(hub)["p0"], shown(hub)["kvparams_proxy_in_flight"]) == (30, 2)
    send(hub, 3, {"p0": 1})
    hub.complete(3)
    assert shown(hub)["p0"] == 31


def test_half_a_snapshot_is_not_shown() -> None:
    hub = MetricsHub()
    send(hub, 1, {"p0": 1})
    assert "p0" not in shown(hub)
    hub.complete(1)
    send(hub, 1, {"p0": 7})
    hub.end(1)  # killed in the middle of it
    assert shown(hub)["p0"] == 1


def test_the_last_snapshot_of_a_worker_that_forgets_its_instances() -> None:
    hub = MetricsHub()
    send(hub, 1, {"p0": 5, "p1": 2})
    hub.complete(1)
    send(hub, 1, {"p1": 3})
    hub.complete(1, is_last=True)
    hub.end(1)
    assert (shown(hub)["p0"], shown(hub)["p1"]) == (5, 3)


def test_an_instance_that_all_workers_have_seen_leave_is_gone() -> None:
    hub = MetricsHub()
    send(hub, 1, {"p0": 5, "p1": 2})
    hub.complete(1)
    hub.end(1)
    assert shown(hub)["p0"] == 5, "nobody says that it has left"
    send(hub, 2, {"p1": 1})
    hub.complete(2)
    assert "p0" not in shown(hub)
    assert shown(hub)["p1"] == 3


def test_the_supervisor_counts_workers_and_its_own_process() -> None:
    gauges = WorkerGauges()
    gauges.ready, gauges.restarts = 3, 2
    found = shown(MetricsHub(gauges))
    assert (found["kvparams_proxy_workers"], found["kvparams_proxy_worker_restarts_total"]) == (3, 2)
    assert found["process_resident_memory_bytes"] > 1 << 20


class Workers(RuleBasedStateMachine):
    """Workers count, send, are killed and end in any order."""

    instances: ClassVar[tuple[str, ...]] = ("p0", "p1")

    def __init__(self) -> None:
        super().__init__()
        self.hub = MetricsHub()
        self.live: dict[int, dict[str, int]] = {}
        self.sent: dict[int, dict[str, int]] = {}
        self.kept = dict.fromkeys(self.instances, 0)
        self.serial = 0
        self.before: dict[str, float] = {}

    def pick(self, number: int) -> int | None:
        return sorted(self.live)[number % len(self.live)] if self.live else None

    @rule()
    def start(self) -> None:
        self.serial += 1
        self.live[self.serial] = dict.fromkeys(self.instances, 0)
        self.sync(self.serial)

    @rule(number=st.integers(0, 9), instance=st.sampled_from(instances), more=st.integers(1, 5))
    def counts(self, number: int, instance: str, more: int) -> None:
        if (serial := self.pick(number)) is not None:
            self.live[serial][instance] += more

    @rule(number=st.integers(0, 9))
    def sends(self, number: int) -> None:
        if (serial := self.pick(number)) is not None:
            self.sync(serial)

    @rule(number=st.integers(0, 9), half=st.booleans())
    def is_killed(self, number: int, half: bool) -> None:
        if (serial := self.pick(number)) is not None:
            if half:
                send(self.hub, serial, self.live[serial])
            self.ends(serial)

    @rule(number=st.integers(0, 9))
    def drains(self, number: int) -> None:
        if (serial := self.pick(number)) is not None:
            self.sent[serial] = dict(self.live[serial])
            send(self.hub, serial, self.live[serial])
            self.hub.complete(serial, is_last=True)
            self.ends(serial)

    def sync(self, serial: int) -> None:
        send(self.hub, serial, self.live[serial])
        self.hub.complete(serial)
        self.sent[serial] = dict(self.live[serial])

    def ends(self, serial: int) -> None:
        self.hub.end(serial)
        del self.live[serial]
        for id, number in self.sent.pop(serial).items():
            self.kept[id] += number

    @invariant()
    def all_that_was_sent_is_shown(self) -> None:
        found = shown(self.hub)
        for id in self.instances if self.serial else ():
            assert found[id] == self.kept[id] + sum(sent[id] for sent in self.sent.values())
            assert found[id] >= self.before.get(id, 0)
        self.before = found


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(stateful_step_count=30)


def test_without_its_end_a_worker_takes_its_counts_along() -> None:
    """The control: the counts of a worker that is only forgotten are gone."""

    class Forgetful(MetricsHub):
        def end(self, serial: int) -> None:
            self._workers.pop(serial, None)

    counts: list[float] = []
    for kind in (MetricsHub, Forgetful):
        hub = kind()
        for serial in (1, 2):
            send(hub, serial, {"p0": 10})
            hub.complete(serial)
        hub.end(1)
        counts.append(shown(hub)["p0"])
    assert counts == [20, 10]
