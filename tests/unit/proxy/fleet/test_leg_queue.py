"""Tests limits, the queue before them, breakers and slow starts, as a request meets them."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerLimits, BreakerState
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member, MemberState
from tests.support.proxy.clock import Clock

DECODE = Role.DECODE


class LeastLoad:
    """Whoever has least to do."""

    def choose(self, candidates: Sequence[Any], request: RequestFacts, turn: int) -> Any:
        return min(candidates, key=lambda candidate: candidate.in_flight)


class Client:
    """A request that may have to wait, and writes down what it hears."""

    def __init__(self, facts: RequestFacts) -> None:
        self.facts = facts
        self.instance: Instance | None = None
        self.error: ProxyError | None = None

    def granted(self, instance: Instance) -> None:
        assert self.instance is None
        assert self.error is None
        self.instance = instance

    def refused(self, error: ProxyError) -> None:
        assert self.instance is None
        assert self.error is None
        self.error = error


class Rig:
    """A fleet of decode instances, a clock, and clients."""

    def __init__(self, decode: int = 1, policy: Any = None, **changes: Any) -> None:
        self.clock = Clock()
        instances = [Instance(f"d{number}", "b", DECODE, "http://h:1", "nixl") for number in range(decode)]
        policies = dict.fromkeys(Role, policy or RoundRobin())
        self.fleet = Fleet(instances, policies, self.clock.now, self.clock.call_later, **changes)

    def ask(self, tenant: str = "", priority: int = 0, tokens: int = 0, model: str | None = None) -> Client:
        facts = RequestFacts("r", "t", model, 1, 1, None, None, tenant, priority, tokens)
        client = Client(facts)
        client.instance = self.fleet.acquire(DECODE, facts, (), client)
        return client

    def required(self, tenant: str = "", priority: int = 0, tokens: int = 0, model: str | None = None) -> str | None:
        """What a request is told before its first leg."""
        facts = RequestFacts("r", "t", model, 1, 1, None, None, tenant, priority, tokens)
        try:
            self.fleet.check_admission([DECODE], facts)
        except ProxyError as error:
            return f"{error.status} {error.code}"
        return None

    def retry(self, client: Client, avoid: str) -> Client:
        again = Client(client.facts)
        again.instance = self.fleet.acquire(DECODE, again.facts, {avoid}, again)
        return again

    def refused(self, **more: Any) -> ProxyError:
        with pytest.raises(ProxyError) as caught:
            self.ask(**more)
        return caught.value

    def end(self, client: Client) -> None:
        assert client.instance is not None
        self.fleet.release(client.instance, client.facts)

    def member(self, id: str = "d0") -> Member:
        return next(member for member in self.fleet.members if member.instance.id == id)

    @property
    def waiting(self) -> int:
        return self.fleet.health()[DECODE].waiting


def limited(decode: int = 1, requests: int | None = 1, tokens: int | None = None, **queue: Any) -> Rig:
    return Rig(decode, limits={DECODE: RoleLimits(requests, tokens)}, queue=QueueLimits(**queue))


# late binding


def test_a_leg_waits_until_an_instance_has_room_and_is_bound_only_then() -> None:
    rig = limited(decode=2)
    first, second = rig.ask(), rig.ask()
    waits = rig.ask()
    assert (waits.instance, rig.waiting) == (None, 1)
    rig.end(second)
    assert waits.instance is second.instance
    assert [member.in_flight for member in rig.fleet.members] == [1, 1]
    rig.end(first)
    rig.end(waits)
    assert [member.in_flight for member in rig.fleet.members] == [0, 0]


def test_who_gives_up_is_not_granted_anything() -> None:
    rig = limited()
    runs, leaves, stays = rig.ask(), rig.ask(), rig.ask()
    rig.fleet.cancel_wait(leaves)
    rig.fleet.cancel_wait(leaves)
    rig.end(runs)
    assert leaves.instance is None
    assert stays.instance is not None


def test_a_whole_queue_may_be_served_in_one_go() -> None:
    """Each ends as soon as it is granted; that must not be as deep as the queue is long."""
    rig = limited(waiting=3000)

    class Hasty(Client):
        def granted(self, instance: Instance) -> None:
            super().granted(instance)
            rig.end(self)

    running = rig.ask()
    hasty = [Hasty(running.facts) for _ in range(3000)]
    for client in hasty:
        assert rig.fleet.acquire(DECODE, client.facts, (), client) is None
    rig.end(running)
    assert all(client.instance is not None for client in hasty)
    assert rig.member().in_flight == 0


def test_a_new_instance_takes_those_who_wait() -> None:
    rig = limited()
    rig.ask()
    waits = rig.ask()
    member = rig.fleet.add(Instance("d1", "b", DECODE, "http://h:1", "nixl"))
    assert waits.instance is None
    rig.fleet.record_probe(member, True, None)
    assert waits.instance is member.instance


def test_tokens_are_a_limit_of_their_own_and_who_has_more_runs_alone() -> None:
    rig = limited(requests=None, tokens=100)
    small, more = rig.ask(tokens=60), rig.ask(tokens=60)
    assert more.instance is None
    rig.end(small)
    assert more.instance is not None
    huge = rig.ask(tokens=1000)
    assert huge.instance is None
    rig.end(more)
    assert huge.instance is not None
    assert rig.ask(tokens=1).instance is None


def test_a_large_one_is_not_starved_by_small_ones_and_holds_up_one_instance_only() -> None:
    rig = limited(decode=2, requests=None, tokens=100)
    running = [rig.ask(tokens=50) for _ in range(2)]
    large = rig.ask(tokens=80)
    assert large.instance is None
    small = [rig.ask(tokens=10) for _ in range(20)]
    served = [client for client in small if client.instance is not None]
    assert {client.instance for client in served if client.instance} == {running[1].instance}
    assert len(served) == 5
    rig.end(running[0])
    assert large.instance is running[0].instance


def test_a_large_one_is_not_starved_by_those_of_another_model_on_the_same_instance() -> None:
    rig = limited(requests=None, tokens=100)
    rig.fleet.record_probe(rig.member(), True, frozenset("a"))
    running = rig.ask(tokens=50, model="a")
    large = rig.ask(tokens=80, model="a")
    small = rig.ask(tokens=10)
    assert small.instance is None
    rig.end(running)
    assert large.instance is not None
    assert small.instance is not None


def test_those_of_another_model_do_not_wait_behind_this_one() -> None:
    rig = limited(decode=2)
    rig.fleet.record_probe(rig.member("d0"), True, frozenset("a"))
    rig.fleet.record_probe(rig.member("d1"), True, frozenset("b"))
    rig.ask(model="a")
    assert rig.ask(model="a").instance is None
    other = rig.ask(model="b")
    assert other.instance is rig.member("d1").instance
    waits = rig.ask(model="b")
    rig.end(other)
    assert waits.instance is not None


def test_even_a_full_queue_does_not_hold_up_who_can_run_elsewhere() -> None:
    rig = limited(decode=2, waiting=1)
    rig.fleet.record_probe(rig.member("d0"), True, frozenset("a"))
    rig.fleet.record_probe(rig.member("d1"), True, frozenset("b"))
    assert [rig.ask(model="a").instance is None for _ in range(2)] == [False, True]
    assert rig.refused(model="a").code == "queue_full"
    assert rig.ask(model="b").instance is not None


def test_a_retry_waits_for_another_instance_rather_than_go_back_and_holds_nobody_up() -> None:
    rig = limited(decode=2, requests=2)
    clients = [rig.ask() for _ in range(4)]
    failed = next(client for client in clients if client.instance is rig.member("d0").instance)
    rig.end(failed)
    again = rig.retry(failed, avoid="d0")
    assert again.instance is None
    assert rig.ask().instance is rig.member("d0").instance
    rig.end(next(client for client in clients if client.instance is rig.member("d1").instance))
    assert again.instance is rig.member("d1").instance


# who is next


def test_a_higher_priority_goes_first_and_tenants_take_turns() -> None:
    rig = limited()
    running = rig.ask()
    flood = [rig.ask("flood") for _ in range(5)]
    quiet = rig.ask("quiet")
    urgent = rig.ask("flood", priority=1)
    order: list[Client] = []
    for _ in range(7):
        rig.end(running)
        (running,) = (c for c in (*flood, quiet, urgent) if c.instance is not None and c not in order)
        order.append(running)
    assert order == [urgent, flood[0], quiet, *flood[1:]]


# bounds


def test_a_full_queue_answers_503_and_a_full_share_429() -> None:
    rig = limited(waiting=3, per_tenant=2)
    for tenant in ("", "ann", "ann"):
        rig.ask(tenant)
    error = rig.refused(tenant="ann")
    assert (error.status, error.code) == (429, "rate_limited")
    assert rig.ask("bob").instance is None
    error = rig.refused(tenant="bob")
    assert (error.status, error.code) == (503, "queue_full")
    assert rig.waiting == 3


def test_a_flood_gives_way_to_who_has_less_waiting() -> None:
    rig = limited(waiting=4)
    rig.ask()
    flood = [rig.ask("flood") for _ in range(4)]
    assert rig.ask("quiet").error is None
    (error,) = [client.error for client in flood if client.error is not None]
    assert (error.status, error.code) == (429, "rate_limited")
    assert flood[-1].error is error
    assert rig.waiting == 4


def test_without_a_queue_what_finds_no_room_is_refused_at_once() -> None:
    rig = limited(waiting=0)
    runs = rig.ask()
    assert rig.refused().code == "queue_full"
    rig.end(runs)
    assert rig.ask().instance is not None


def test_who_has_waited_too_long_is_told_so_in_time() -> None:
    rig = limited(wait_s=5.0)
    rig.ask()
    first = rig.ask()
    rig.clock.pass_time(3.0)
    second = rig.ask()
    rig.clock.pass_time(1.9)
    assert first.error is None
    rig.clock.pass_time(0.2)
    assert first.error is not None
    assert (first.error.status, first.error.code) == (503, "queue_timeout")
    assert second.error is None
    rig.clock.pass_time(3.0)
    assert second.error is not None
    assert rig.waiting == 0
    assert rig.clock.pending == 0


def test_when_one_that_was_in_the_way_has_waited_too_long_the_others_go_on() -> None:
    rig = limited(requests=None, tokens=100, wait_s=5.0)
    rig.ask(tokens=50)
    large = rig.ask(tokens=80)
    rig.clock.pass_time(1.0)
    small = rig.ask(tokens=10)
    assert small.instance is None
    rig.clock.pass_time(4.0)
    assert large.error is not None
    assert small.instance is not None


def test_who_gives_up_because_another_has_waited_too_long_hears_nothing() -> None:
    rig = limited(wait_s=5.0)
    running = rig.ask()
    other = Client(running.facts)

    class Pair(Client):
        def refused(self, error: ProxyError) -> None:
            super().refused(error)
            rig.fleet.cancel_wait(other)

    first = Pair(running.facts)
    for client in (first, other):
        assert rig.fleet.acquire(DECODE, client.facts, (), client) is None
    rig.clock.pass_time(5.0)
    assert first.error is not None
    assert other.error is None
    assert rig.waiting == 0


def test_what_may_not_wait_later_is_foreseen() -> None:
    """And nothing is taken, kept or counted for it."""
    rig = limited(waiting=3, per_tenant=2)
    running = rig.ask("ann")
    for tenant in ("ann", "ann", "bob"):
        assert rig.required(tenant) is None
        rig.ask(tenant)
    assert [rig.required(tenant) for tenant in ("ann", "bob")] == ["429 rate_limited", "503 queue_full"]
    assert rig.required("bob", priority=1) is None  # another would make room
    assert rig.waiting == 3
    rig.end(running)
    assert [rig.required(tenant) for tenant in ("ann", "bob")] == [None, None]


def test_without_a_queue_it_is_foreseen_whether_there_is_room() -> None:
    rig = limited(decode=2, waiting=0)
    first = rig.ask()
    assert rig.required() is None
    rig.ask()
    assert rig.required() == "503 queue_full"
    rig.end(first)
    assert rig.required() is None


def test_a_full_queue_of_others_says_nothing_of_who_can_run_elsewhere() -> None:
    rig = limited(decode=2, waiting=1)
    rig.fleet.record_probe(rig.member("d0"), True, frozenset("a"))
    rig.fleet.record_probe(rig.member("d1"), True, frozenset("b"))
    for _ in range(2):
        rig.ask(model="a")
    assert [rig.required(model=model) for model in ("a", "b")] == ["503 queue_full", None]
    assert rig.required(model="c") == "503 no_decode_instance"


def test_nothing_is_foreseen_where_there_are_no_limits() -> None:
    rig = Rig(queue=QueueLimits(waiting=0))
    for _ in range(9):
        assert rig.required() is None
        assert rig.ask().instance is not None


def test_retry_after_is_as_long_as_the_queue_takes_to_drain() -> None:
    rig = limited(waiting=19, wait_s=1000.0)
    running = rig.ask()
    waiting = [rig.ask() for _ in range(19)]
    assert rig.refused().retry_after_s == 60  # nothing has ever ended
    for _ in range(100):
        rig.clock.pass_time(0.5)
        rig.end(running)
        running = next(client for client in waiting if client.instance is not None)
        waiting.remove(running)
        waiting.append(rig.ask())
    after = rig.refused().retry_after_s
    assert after is not None
    assert 9 <= after <= 11


def test_a_fleet_that_closes_refuses_whoever_waits_and_leaves_no_timer() -> None:
    rig = limited()
    runs = rig.ask()
    waits = rig.ask()
    rig.fleet.close()
    assert waits.error is not None
    assert waits.error.status == 503
    assert rig.clock.pending == 0
    assert rig.refused().code == "shutting_down"
    rig.end(runs)
    assert rig.member().in_flight == 0


# those who are down


def test_nobody_waits_for_a_role_that_is_down() -> None:
    rig = limited()
    runs = rig.ask()
    waits = rig.ask()
    assert runs.instance is not None
    rig.fleet.record_failure(runs.instance, connected=False)
    assert waits.error is not None
    assert waits.error.code == "no_decode_instance"
    assert rig.refused().retry_after_s == 5


def failing(rig: Rig, client: Client) -> None:
    """Its leg fails, as the executor tells it."""
    rig.end(client)
    assert client.instance is not None
    rig.fleet.record_failure(client.instance, connected=True)


@pytest.mark.parametrize("breaker", [True, False])
def test_a_worker_that_fails_at_once_does_not_attract_all_traffic(breaker: bool) -> None:
    """It looks idle, always: least load gives it nearly everything. Without a breaker, which is the control."""
    limits = BreakerLimits() if breaker else BreakerLimits(10_000, 10_000, 10_000)
    rig = Rig(4, LeastLoad(), breaker=limits)
    bad = 0
    good: list[Client] = []
    for number in range(1000):  # ten in a second; each takes two where it does not fail
        client = rig.ask()
        if client.instance is rig.member("d0").instance:
            bad += 1
            failing(rig, client)
        else:
            good.append(client)
        if len(good) > 20:
            done = good.pop(0)
            rig.end(done)
            assert done.instance is not None
            rig.fleet.record_success(done.instance)
        if number % 50 == 0:
            rig.fleet.record_probe(rig.member("d0"), True, None)  # its probes are always well
        rig.clock.pass_time(0.1)
    if breaker:
        assert 5 <= bad <= 25
    else:
        assert bad > 900


def broken(rig: Rig, *, busy: bool = False, id: str = "d0") -> None:
    """This instance has failed; all others are well."""
    while rig.member(id).state is MemberState.READY:
        rig.fleet.record_failure(rig.member(id).instance, connected=True, busy=busy)


def chosen(rig: Rig, count: int = 6) -> list[Client]:
    """Who of so many requests at once is given the first instance."""
    return [client for client in [rig.ask() for _ in range(count)] if client.instance is rig.member().instance]


def test_a_broken_instance_is_tried_with_one_leg_at_a_time() -> None:
    rig = Rig(2, breaker=BreakerLimits(open_s=4.0))
    broken(rig)
    assert chosen(rig) == []
    rig.clock.pass_time(3.9)
    assert chosen(rig) == []
    rig.clock.pass_time(0.1)
    (trial,) = chosen(rig)  # one, not two
    failing(rig, trial)
    rig.clock.pass_time(7.9)
    assert chosen(rig) == []
    rig.clock.pass_time(0.1)
    (trial,) = chosen(rig)
    rig.end(trial)
    assert trial.instance is not None
    rig.fleet.record_success(trial.instance)
    assert len(chosen(rig)) == 3


def test_where_nobody_is_well_those_are_used_that_answer_probes() -> None:
    """Those on trial before those that are left alone; the trial itself is one leg, as ever."""
    rig = Rig(2, breaker=BreakerLimits(open_s=4.0))
    broken(rig)
    broken(rig, id="d1")
    assert [len(chosen(rig)), rig.fleet.panic_legs(DECODE)] == [3, 6]
    assert rig.required() is None
    assert not rig.fleet.has_candidates(DECODE, None)  # whoever can do without it does
    failing(rig, rig.ask())  # what fails then makes nothing worse
    assert [rig.member(id).breaker.opened for id in ("d0", "d1")] == [1, 1]
    rig.fleet.record_probe(rig.member(), True, None)
    rig.clock.pass_time(2.0)
    assert rig.member().breaker.state is BreakerState.HALF_OPEN
    assert rig.member("d1").breaker.state is BreakerState.OPEN
    clients = chosen(rig)
    assert len(clients) == 6
    failing(rig, clients[0])
    assert 0 < len(chosen(rig)) < 6
    rig.fleet.record_probe(rig.member(), False, None)
    assert chosen(rig) == []  # who cannot be reached is not used
    rig.fleet.record_probe(rig.member("d1"), False, None)
    assert rig.refused().code == "no_decode_instance"


def test_limits_hold_for_those_that_are_suspected_too() -> None:
    rig = Rig(1, limits={DECODE: RoleLimits(2)}, queue=QueueLimits(waiting=1), breaker=BreakerLimits(open_s=4.0))
    broken(rig)
    first, _, waits = (rig.ask() for _ in range(3))
    assert (waits.instance, rig.waiting) == (None, 1)
    assert rig.refused().code == "queue_full"
    rig.end(first)
    assert waits.instance is rig.member().instance


def test_who_waits_is_not_refused_when_the_last_one_that_is_well_fails() -> None:
    rig = Rig(1, limits={DECODE: RoleLimits(1)}, breaker=BreakerLimits(consecutive=1, open_s=4.0))
    runs, waits = rig.ask(), rig.ask()
    failing(rig, runs)
    assert waits.instance is rig.member().instance


def test_who_says_that_it_is_busy_is_believed_until_its_breaker_is_half_open() -> None:
    rig = Rig(breaker=BreakerLimits(open_s=4.0))
    broken(rig, busy=True)
    error = rig.refused()
    assert (error.status, error.code, error.retry_after_s) == (503, "no_decode_instance", 4)
    assert "busy" in error.message
    rig.clock.pass_time(4.0)
    assert len(chosen(rig)) == 6
    failing(rig, rig.ask())  # in another way
    assert len(chosen(rig)) == 6


def test_a_trial_that_told_nothing_makes_room_for_another() -> None:
    rig = Rig(2, breaker=BreakerLimits(open_s=4.0))
    broken(rig)
    rig.clock.pass_time(4.0)
    (trial,) = chosen(rig)
    rig.end(trial)  # its client left
    rig.clock.pass_time(0.0)
    assert len(chosen(rig)) == 1


def test_a_failed_trial_is_not_followed_by_one_that_waited() -> None:
    """The leg is released before it is told how it went."""
    rig = Rig(2, limits={DECODE: RoleLimits(1)}, breaker=BreakerLimits(consecutive=1, open_s=4.0))
    steady = next(c for c in (rig.ask(), rig.ask()) if c.instance is rig.member("d1").instance)
    first = Client(steady.facts)
    first.instance = rig.member("d0").instance
    failing(rig, first)
    waits = rig.ask()
    assert waits.instance is None
    rig.clock.pass_time(4.0)
    assert waits.instance is rig.member("d0").instance
    next_one = rig.ask()
    failing(rig, waits)
    rig.clock.pass_time(0.0)
    assert next_one.instance is None
    rig.end(steady)
    assert next_one.instance is rig.member("d1").instance


def test_an_engine_that_was_restarted_is_tried_at_once() -> None:
    rig = Rig(2, breaker=BreakerLimits(open_s=15.0), slow_start_s=0.0)
    broken(rig)
    assert chosen(rig) == []
    came_back(rig)
    assert len(chosen(rig)) == 1  # with one leg


def test_good_probes_bring_the_trial_forward() -> None:
    """Two are enough to half what is left, and half of that: nobody else need do anything."""
    rig = Rig(2, breaker=BreakerLimits(open_s=16.0, longest_s=16.0))
    broken(rig)
    rig.fleet.record_probe(rig.member(), True, None)
    rig.clock.pass_time(4.0)
    rig.fleet.record_probe(rig.member(), True, None)
    rig.clock.pass_time(1.9)
    assert chosen(rig) == []
    rig.clock.pass_time(0.1)
    assert rig.member().breaker.state is BreakerState.HALF_OPEN
    assert len(chosen(rig)) == 1
    assert rig.member().state is MemberState.BROKEN


# slow start


def came_back(rig: Rig, id: str = "d0") -> Member:
    member = rig.member(id)
    rig.fleet.record_probe(member, False, None)
    rig.fleet.record_probe(member, True, None)
    return member


def test_who_has_just_come_back_gets_its_share_little_by_little() -> None:
    rig = Rig(3, LeastLoad(), slow_start_s=10.0)
    member = came_back(rig)
    for _ in range(40):
        rig.ask()
    others = [m.in_flight for m in rig.fleet.members if m is not member]
    assert member.in_flight == 1  # it looks idle and yet it gets one
    assert sum(others) == 39
    rig.clock.pass_time(5.0)
    for _ in range(40):
        rig.ask()
        others = [m.in_flight for m in rig.fleet.members if m is not member]
        assert member.in_flight <= 0.5 * sum(others) / 2 + 1
    assert member.in_flight >= 14
    rig.clock.pass_time(5.0)
    for _ in range(40):
        rig.ask()
    assert member.in_flight == 40


def test_a_slow_start_can_be_turned_off() -> None:
    """The control of the above."""
    rig = Rig(3, LeastLoad(), slow_start_s=0.0)
    member = came_back(rig)
    for _ in range(30):
        rig.ask()
    assert member.in_flight == 10


def test_when_all_have_just_come_back_nobody_is_held_back() -> None:
    rig = Rig(2, LeastLoad())
    for id in ("d0", "d1"):
        came_back(rig, id)
    for _ in range(10):
        rig.ask()
    assert [member.in_flight for member in rig.fleet.members] == [5, 5]


def test_at_the_start_of_the_proxy_nobody_starts_slowly() -> None:
    rig = Rig(2, LeastLoad())
    for member in rig.fleet.members:
        rig.fleet.record_probe(member, True, None)
    rig.fleet.drain("d1")
    for _ in range(10):
        rig.ask()
    rig.fleet.drain("d1", False)
    for _ in range(10):
        rig.ask()
    assert [member.in_flight for member in rig.fleet.members] == [10, 10]


def test_those_who_came_before_the_first_request_do_not_start_slowly() -> None:
    rig = Rig(2, LeastLoad())
    came_back(rig)
    rig.fleet.startup_complete()
    for _ in range(10):
        rig.ask()
    assert [member.in_flight for member in rig.fleet.members] == [5, 5]


def test_those_who_wait_are_served_as_a_slow_start_goes_on() -> None:
    """Nothing but time makes the room."""
    rig = Rig(2, limits={DECODE: RoleLimits(10)})
    member = came_back(rig)
    clients = [rig.ask() for _ in range(20)]
    assert member.in_flight == 1
    assert rig.waiting == 9
    rig.clock.pass_time(5.5)
    assert member.in_flight == 6
    rig.clock.pass_time(5.0)
    assert all(client.instance is not None for client in clients)
