"""A trace put to a server: each request at its time, whether or not others were answered.

A request's clock starts when it should have been sent, so that every delay counts.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.load_client import Pool, Tally, Target
from benchmarks.load_client import Request as Sent
from benchmarks.replay.trace import Request

__all__ = ["arrive"]

_LATEST_S: Final = 60.0
"""For the last answers, after the last request."""


async def arrive(
    trace: Sequence[Request], speed: float, port: int, body: Callable[[Request], bytes], *, stream: bool = False
) -> Tally:
    """Sends all requests at a multiple of their speed, the first one at once, and returns the results.

    Raises:
        TimeoutError: some were not answered within a minute of the last one.
    """
    loop, tally = asyncio.get_running_loop(), Tally()
    all_done = asyncio.Event()
    left = len(trace)

    def done(_: Sent) -> None:
        nonlocal left
        left -= 1
        if not left:
            all_done.set()

    path = "/v1/completions"
    pool = Pool(Target(port, path, b"", stream=stream), tally, done)
    wires = [Target(port, path, body(one)).request(0) for one in trace]
    start = loop.time() + 0.1
    for one, wire in zip(trace, wires, strict=True):
        due_s = start + (one.at - trace[0].at) / speed
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        pool.send(Sent(due_s, wire, measured=True))
    try:
        async with asyncio.timeout(_LATEST_S):
            await all_done.wait()
    finally:
        await pool.close()
    return tally
