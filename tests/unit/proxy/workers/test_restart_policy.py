"""Tests when a worker that exited is restarted, and when the proxy gives up."""

from kvparams_proxy.workers.restart_policy import GiveUp, RestartPolicy, RestartWorker, WorkerEnd
from kvparams_proxy.workers.worker_start import StartFailure

KILLED = WorkerEnd("signal SIGKILL", 1.0, was_ready=True)
CRASHED = WorkerEnd("status 1", 0.2, was_ready=False)
REFUSED = WorkerEnd("status 2", 0.2, was_ready=False, failure=StartFailure(2, "kvparams: no such policy"))


def serving(*numbers: int) -> RestartPolicy:
    policy = RestartPolicy()
    for number in numbers:
        policy.ready(number)
    return policy


def delays(policy: RestartPolicy, number: int, ends: list[WorkerEnd]) -> list[float]:
    found: list[float] = []
    for end in ends:
        decision = policy.ended(number, end)
        assert isinstance(decision, RestartWorker)
        found.append(decision.delay_s)
    return found


def test_a_worker_is_restarted_at_once_and_then_later_and_later() -> None:
    assert delays(serving(1), 1, [KILLED] * 9) == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]


def test_half_a_minute_of_life_makes_the_next_restart_immediate() -> None:
    stable, short = KILLED._replace(lived_s=30.0), KILLED._replace(lived_s=29.9)
    assert delays(serving(1), 1, [KILLED] * 3 + [stable, KILLED]) == [0, 0.1, 0.2, 0, 0.1]
    assert delays(serving(1), 1, [KILLED] * 3 + [short, KILLED]) == [0, 0.1, 0.2, 0.4, 0.8]


def test_each_worker_has_a_delay_of_its_own() -> None:
    policy = serving(1, 2)
    assert delays(policy, 1, [KILLED] * 3) == [0, 0.1, 0.2]
    assert delays(policy, 2, [KILLED] * 2) == [0, 0.1]


def test_a_start_that_fails_three_times_alike_ends_the_proxy() -> None:
    policy = RestartPolicy()
    assert delays(policy, 2, [CRASHED] * 2) == [0, 0.1]
    said = policy.ended(2, CRASHED)
    assert said == GiveUp(1, "kvparams proxy: worker 2 exited 3 times during startup (status 1)")


def test_starts_that_fail_differently_are_tried_again() -> None:
    other = CRASHED._replace(cause="signal SIGBUS")
    assert len(delays(RestartPolicy(), 1, [CRASHED, CRASHED, other] * 3)) == 9


def test_the_proxy_goes_on_once_a_worker_was_ready() -> None:
    assert len(delays(serving(1), 2, [CRASHED] * 9)) == 9


def test_what_a_worker_says_of_its_first_start_ends_the_proxy_with_its_status() -> None:
    assert RestartPolicy().ended(1, REFUSED) == GiveUp(2, "kvparams: no such policy")


def test_what_a_worker_says_later_is_reported_once() -> None:
    policy, other = serving(1), REFUSED._replace(failure=StartFailure(1, "another"))
    reports = [policy.ended(1, end) for end in (REFUSED, REFUSED, KILLED, REFUSED, other, REFUSED)]
    said = [each.report for each in reports if isinstance(each, RestartWorker)]
    assert said == ["kvparams: no such policy", None, None, None, "another", "kvparams: no such policy"]
