"""Tests jobs, worker pools and arenas: results, time-outs, and who owns a buffer meanwhile."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvparams_connectors.arena import Arena
from kvparams_connectors.jobs import Job, WorkerPool
from tests.support.waiting import wait_stays_true_for

WAIT_S = 10.0


def a_job(deadline_s: float = WAIT_S) -> Job[str]:
    return Job(time.monotonic() + deadline_s, "timed out")


def test_a_job_is_pending_then_done_and_settled() -> None:
    job = a_job()
    assert (job.done(), job.settled()) == (False, False)
    job.finish("value")
    assert (job.done(), job.settled(), job.result()) == (True, True, "value")


def test_a_deadline_ends_the_wait_and_not_the_work() -> None:
    job = a_job(0.0)
    assert job.done()
    assert job.result() == "timed out"
    assert not job.settled()
    job.finish("too late")
    assert job.settled()
    assert job.result() == "timed out"


def test_waiting_for_less_than_the_deadline_raises_and_the_job_goes_on() -> None:
    job = a_job()
    with pytest.raises(TimeoutError):
        job.result(0.0)
    job.finish("value")
    assert job.result() == "value"


def test_a_blocked_waiter_is_woken_by_the_result_and_by_the_deadline() -> None:
    job, late = a_job(), a_job(0.05)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(job.result), pool.submit(late.result)]
        job.finish("value")
        assert [future.result(WAIT_S) for future in waiting] == ["value", "timed out"]


def test_what_the_work_raises_is_raised_where_one_waits() -> None:
    job = a_job()
    job.fail(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        job.result()


def test_a_job_ends_once() -> None:
    job = a_job()
    job.finish("value")
    with pytest.raises(RuntimeError):
        job.finish("again")


def test_some_hear_before_those_who_wait() -> None:
    job = a_job()
    heard: list[object] = []
    job.add_before_done_callback(lambda value: heard.append((value, job.done(), job.settled())))
    job.add_before_done_callback(lambda value: heard.append(value))
    job.finish("value")
    job.add_before_done_callback(lambda value: heard.append(value))  # too late to be before
    assert heard == [("value", False, False), "value", "value"]
    assert (job.done(), job.settled(), job.result()) == (True, True, "value")


def test_they_hear_what_those_who_wait_hear() -> None:
    late, failed = a_job(0.0), a_job()
    heard: list[object] = []
    for job in (late, failed):
        job.add_before_done_callback(heard.append)
    assert late.done()
    late.finish("too late")
    failed.fail(OSError("broken"))
    assert heard == ["timed out", None]
    failed.add_before_done_callback(heard.append)
    assert heard[2:] == [None]


def test_a_job_ends_although_who_hears_first_raises() -> None:
    job = a_job()

    def defect(value: str | None) -> None:
        raise OSError(value)

    job.add_before_done_callback(defect)
    with pytest.raises(OSError, match="value"):
        job.finish("value")
    assert (job.settled(), job.result()) == (True, "value")


def test_who_comes_while_others_hear_first_hears_at_the_end() -> None:
    job = a_job()
    go, heard = threading.Event(), list[object]()
    job.add_before_done_callback(lambda _: go.wait(WAIT_S))
    with ThreadPoolExecutor(2) as pool:
        ending = pool.submit(job.finish, "value")
        coming = pool.submit(job.add_before_done_callback, heard.append)
        go.set()
        ending.result(WAIT_S)
        coming.result(WAIT_S)
    assert heard == ["value"]


def test_callbacks_come_when_the_work_has_ended_and_once() -> None:
    job = a_job(0.0)
    calls: list[str] = []
    job.add_settled_callback(lambda: calls.append("before"))
    assert job.done()
    assert calls == []  # the deadline has passed, the work has not ended
    job.finish("value")
    job.add_settled_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_an_offer_is_what_the_deadline_finds() -> None:
    job = a_job(0.0)
    job.set_partial_result("half")
    assert job.result() == "half"
    job.finish("whole")
    assert job.result() == "half"


def test_a_section_holds_the_wait_back_and_is_refused_when_the_wait_is_over() -> None:
    job = a_job(0.02)
    entered = threading.Event()
    leave = threading.Event()

    def work() -> list[bool]:
        with job.guarded_section() as first:
            entered.set()
            leave.wait(WAIT_S)
        with job.guarded_section() as second:
            pass
        return [first, second]

    with ThreadPoolExecutor(2) as pool:
        sections = pool.submit(work)
        assert entered.wait(WAIT_S)
        waiting = pool.submit(job.result)
        # Past the deadline too: somebody is writing.
        wait_stays_true_for(job.remaining_s() + 0.01, lambda: not job.done())
        assert not waiting.done()
        leave.set()
        assert waiting.result(WAIT_S) == "timed out"
        assert sections.result(WAIT_S) == [True, False]


def test_a_derived_job_follows_its_origin() -> None:
    job, failing, late = a_job(), a_job(), a_job(0.0)
    derived = [one.then(len) for one in (job, failing, late)]
    job.finish("four")
    failing.fail(OSError())
    assert late.done()
    late.finish("irrelevant")
    assert derived[0].result() == 4
    with pytest.raises(OSError):  # noqa: PT011
        derived[1].result()
    assert derived[2].result() == len("timed out")
    assert all(one.settled() for one in derived)


def test_a_derived_job_finds_at_its_deadline_what_its_origin_had_reached() -> None:
    job = a_job(0.0)
    derived = job.then(len)
    further = derived.then(str)
    job.set_partial_result("half")
    assert further.result() == "4"
    assert derived.result() == 4
    assert not derived.settled()
    job.finish("whole")
    assert derived.settled()


async def test_awaiting_gives_the_result_of_another_thread() -> None:
    lane = WorkerPool("test")
    job = lane.submit(lambda _: "value", WAIT_S, timed_out="timed out", refused="refused")
    assert await job == "value"
    assert await job == "value"
    assert lane.close()


async def test_awaiting_ends_at_the_deadline_and_wakes_nobody_afterwards() -> None:
    job = a_job(0.02)
    assert await job == "timed out"
    job.finish("late")
    assert await job == "timed out"


async def test_awaiting_lets_a_section_finish() -> None:
    job = a_job(0.02)
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with job.guarded_section():
            entered.set()
            leave.wait(WAIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(WAIT_S)
    waiting = asyncio.ensure_future(job)  # pyright: ignore[reportArgumentType]
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    leave.set()
    assert await asyncio.wait_for(waiting, WAIT_S) == "timed out"
    thread.join()


async def test_a_cancelled_wait_leaves_the_job_alone() -> None:
    job = a_job()
    waiting = asyncio.ensure_future(job)  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    job.finish("value")
    assert await job == "value"


def test_a_job_that_settles_after_its_loop_was_closed_hurts_nobody() -> None:
    job = a_job()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await job

    asyncio.run(give_up())
    job.finish("value")
    assert job.result() == "value"


def test_a_lane_does_jobs_in_order() -> None:
    lane = WorkerPool("test")
    order: list[int] = []
    jobs = [
        lane.submit(lambda _, number=number: order.append(number), WAIT_S, timed_out=None, refused=None)
        for number in range(20)
    ]
    assert [job.result() for job in jobs] == [None] * 20
    assert order == list(range(20))
    assert lane.close()


def test_work_whose_deadline_passed_while_it_waited_is_not_started() -> None:
    lane = WorkerPool("test")
    gate = threading.Event()
    started: list[str] = []
    first = lane.submit(lambda _: str(gate.wait(WAIT_S)), WAIT_S, timed_out="timed out", refused="refused")
    second = lane.submit(lambda _: started.append("second") or "x", 0.0, timed_out="timed out", refused="refused")
    assert second.result() == "timed out"
    assert not second.settled()
    gate.set()
    assert first.result() == "True"
    assert second.wait_settled(WAIT_S)
    assert started == []
    assert lane.close()


def test_a_full_or_closed_lane_refuses() -> None:
    lane = WorkerPool("test", max_waiting=1)
    gate, running = threading.Event(), threading.Event()

    def work(_: Job[str]) -> str:
        running.set()
        gate.wait(WAIT_S)
        return "done"

    first = lane.submit(work, WAIT_S, timed_out="timed out", refused="refused")
    assert running.wait(WAIT_S)
    second = lane.submit(work, WAIT_S, timed_out="timed out", refused="refused")
    third = lane.submit(work, WAIT_S, timed_out="timed out", refused="refused")
    assert third.done()
    assert third.result() == "refused"
    gate.set()
    assert lane.close()
    assert [first.result(), second.result()] == ["done", "done"]
    assert lane.submit(work, WAIT_S, timed_out="timed out", refused="refused").result() == "refused"


def test_closing_a_lane_gives_up_on_stuck_work_in_time() -> None:
    lane = WorkerPool("test")
    gate = threading.Event()
    job = lane.submit(lambda _: gate.wait(WAIT_S), WAIT_S, timed_out=False, refused=False)
    assert not lane.close(0.05)
    gate.set()
    assert job.result()
    assert lane.close(WAIT_S)


def test_an_exception_in_the_work_does_not_end_the_thread() -> None:
    lane = WorkerPool("test")

    def broken(_: Job[int]) -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        lane.submit(broken, WAIT_S, timed_out=0, refused=0).result()
    assert lane.submit(lambda _: 7, WAIT_S, timed_out=0, refused=0).result() == 7
    assert lane.close()


# ---- arenas


def test_slots_are_apart_aligned_and_keep_what_is_written() -> None:
    arena = Arena(1 << 20, 1000)
    slots = [slot for _ in range(arena.slots) if (slot := arena.lease()) is not None]
    assert len(slots) == (1 << 20) // 1024
    for number, slot in enumerate(slots):
        slot.view[:] = bytes([number % 251]) * 1000
    assert all(set(slot.view) == {number % 251} for number, slot in enumerate(slots))
    assert len(arena.memory) == arena.slots * 1024
    assert arena.lease() is None
    for slot in slots:
        slot.release()
    assert arena.free_slots == arena.slots


def test_an_arena_has_at_least_one_slot() -> None:
    assert Arena(10, 4096).slots == 1
    with pytest.raises(ValueError, match="slot"):
        Arena(10, 0)


def test_a_slot_is_given_back_once_even_if_it_was_leased_again() -> None:
    arena = Arena(64, 64)
    first = arena.lease()
    assert first is not None
    first.release()
    second = arena.lease()
    assert second is not None
    with pytest.raises(RuntimeError):
        first.release()
    assert arena.free_slots == 0


def test_a_lease_waits_for_a_slot_within_its_bound() -> None:
    arena = Arena(64, 64)
    first = arena.lease()
    assert first is not None
    assert arena.lease(0.01) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arena.lease, WAIT_S)
        first.release()
        assert waiting.result(WAIT_S) is not None
