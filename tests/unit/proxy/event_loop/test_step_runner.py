"""Tests work in steps: nothing delays the event loop, and short work does not wait for long work."""

import asyncio
import time
from collections.abc import Generator

from kvparams_proxy.event_loop.step_runner import StepRunner
from tests.support.processor import is_within
from tests.support.waiting import until

STEP_S = 0.0005


def work(steps: int) -> Generator[None, None, int]:
    """So many steps of half a millisecond."""
    for _ in range(steps):
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            pass
        yield
    return steps


def ignored(steps: int) -> None:
    """Work that nobody waits for."""


def failed(error: Exception) -> None:
    raise AssertionError(error)


async def test_short_work_does_not_wait_for_long_work() -> None:
    """40 pieces of half a second each are under way; a short one is done within a few turns, and they go on."""
    runner = StepRunner(asyncio.get_running_loop())
    loop = asyncio.get_running_loop()
    ended: list[int] = []
    begun = 0

    def long_work() -> Generator[None, None, int]:
        nonlocal begun
        begun += 1
        return (yield from work(1000))

    long = [runner.run(long_work(), ended.append, failed) for _ in range(40)]
    await until(lambda: begun == 40)
    waits: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        done: asyncio.Future[int] = loop.create_future()
        runner.run(work(1), done.set_result, failed)
        assert await asyncio.wait_for(done, 5) == 1
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(0)
    assert sorted(waits)[len(waits) // 2] < 0.1, waits
    assert ended == []
    for each in long:
        each.cancel()


async def test_long_work_goes_on_while_short_work_comes() -> None:
    """Short work without an end: a long piece is completed all the same."""
    runner = StepRunner(asyncio.get_running_loop())
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    runner.run(work(60), done.set_result, failed)
    over, pending = False, 50

    def again(_: int) -> None:
        nonlocal pending
        if over:
            pending -= 1
        else:
            runner.run(work(1), again, failed)

    for _ in range(pending):
        runner.run(work(1), again, failed)
    assert await asyncio.wait_for(done, 10) == 60
    over = True
    await until(lambda: pending == 0)


async def test_each_turn_is_short_however_much_there_is_to_do() -> None:
    runner = StepRunner(asyncio.get_running_loop())
    for _ in range(30):
        runner.run(work(200), ignored, failed)
    longest = 0.0
    for _ in range(100):
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    assert is_within(longest, 0.02)
