"""Engines and their store go wrong every few seconds, under streams that go on: hardly anybody notices.

One spare of each role: of three engines two are enough, of two one. Every request has `DEADLINE_S`, longer than two
engines that fall silent one after the other under it (`--decode-timeout` each) and the answer computed behind them.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.connectors.valkey_server import ValkeyServer

from .backings import Backing, FileBacking, ValkeyBacking
from .cluster import Cluster, Usage, usage
from .faults import Fault, schedule
from .streams import Asked, Question, ask, question

DEADLINE_S = 30.0
EVERY_S = 5.0
SEED = 144
"""Of the faults: a decode engine is killed first, then a prefill engine stopped; in ten minutes all come often."""
FLAGS = ("--probe", "1", "--prefill-timeout", "6", "--decode-timeout", "3")
"""Silence longer than that is an engine that has stopped. The store's own time-out is 5 s."""
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."


def questions(seed: int, count: int) -> list[Question]:
    draw = random.Random(seed)
    found: list[Question] = []
    for number in range(count):
        prompt = f"{number}: " + " ".join(draw.choices(TEXT.split(), k=draw.choice((5, 30, 80, 150))))
        path = draw.choice(("/v1/completions", "/v1/chat/completions"))
        found.append(question(path, prompt, draw.randrange(30, 70)))
    return found


async def answered(port: int, asked: list[Question]) -> list[Question]:
    """With what one engine says to each."""
    found: list[Question] = []
    for start in range(0, len(asked), 16):
        some = asked[start : start + 16]
        seen = await asyncio.gather(*(ask(port, one, 60.0) for one in some))
        assert [one.seen for one in seen] == ["right"] * len(some)
        found += [Question(one.path, one.body, got.answer) for one, got in zip(some, seen, strict=True)]
    return found


async def client(port: int, number: int, asked: list[Question], until_s: float) -> list[Asked]:
    """One stream after the other. Half of them share their KV with nobody, so that prefill has work to do."""
    draw = random.Random(number)
    found: list[Asked] = []
    await asyncio.sleep(draw.random())
    while time.monotonic() < until_s:
        salt = f"{number}-{len(found)}" if draw.random() < 0.5 else None
        found.append(await ask(port, draw.choice(asked), DEADLINE_S, salt))
    return found


async def chaos(cluster: Cluster, faults: list[Fault], began_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        for fault in faults:
            await asyncio.sleep(began_s + fault.at_s - time.monotonic())
            group.create_task(cluster.suffer(fault))


async def calm(cluster: Cluster) -> Usage:
    """What the proxy holds when nothing is in flight, apart from connections that it keeps for the next requests."""
    async with asyncio.timeout(20):
        while await cluster.busy():  # noqa: ASYNC110  other processes say nothing when they are done
            await asyncio.sleep(0.1)
    seen = await cluster.gauges(cluster.proxy)
    kept = sum(value for name, value in seen.items() if name.startswith("kvparams_proxy_engine_connections"))
    found = usage(cluster.proxy)
    return Usage(found.rss_kib, found.descriptors - int(kept))


@asynccontextmanager
async def sharing(kind: str, path: Path, folder: Path) -> AsyncGenerator[Backing]:
    """The store that engines share: a file, or a real server."""
    if kind == "file":
        yield FileBacking(path)
        return
    with ValkeyServer(folder / "valkey", max_memory="256mb") as server:
        yield ValkeyBacking(server)


def quantiles(values: list[float]) -> list[float]:
    """The median, the 99th percentile and the largest, in seconds."""
    values = sorted(values)
    return [round(values[min(len(values) - 1, int(part * len(values)))], 2) for part in (0.5, 0.99, 1.0)]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "continuation"),
    [("file", True), ("file", False), ("valkey", True)],
    ids=["continued", "not continued", "continued, valkey"],
)
async def test_engines_and_store_go_wrong_and_streams_go_on(
    tmp_path: Path,
    store: Path,
    kind: str,
    continuation: bool,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    seconds, streams, engines = effort(11, 600), effort(12, 64), effort(2, 3)
    warm_s = effort(1, 20)
    # An engine's step: streams last for some seconds, and the machine has time for all of them.
    pace = ("--step-ms", str(effort(30, 80)), "--blocks", "2048")
    flags = (*FLAGS, *(("--continuation",) if continuation else ()))
    async with (
        sharing(kind, store, tmp_path) as backing,
        Cluster.running(tmp_path, backing, engines=engines, extra=pace, flags=flags) as cluster,
    ):
        one = next(server for server in cluster.engines if server.name == "decode-0")
        asked = await answered(int(one.url.rpartition(":")[2]), questions(1, effort(16, 120)))
        await asyncio.gather(*(client(cluster.port, n, asked, time.monotonic() + warm_s) for n in range(streams)))
        before = await calm(cluster)

        began_s = time.monotonic()
        faults = schedule(SEED, seconds, EVERY_S, engines, backing.faults)
        clients = asyncio.gather(*(client(cluster.port, n, asked, began_s + seconds) for n in range(streams)))
        await chaos(cluster, faults, began_s)
        seen = [one for each in await clients for one in each]

        after = await calm(cluster)
        counted = await cluster.gauges(cluster.proxy)
        hits = list(cluster.hits)

    ends = Counter(one.seen for one in seen)
    failed = [one for one in seen if one.seen != "right"]
    innocent = [
        one
        for one in failed
        if one.seen != "error event"
        or not any(h.who == one.route[-1] and h.from_s < one.ended_s and one.began_s < h.until_s for h in hits)
    ]
    record(
        {
            "seconds": seconds,
            "streams": streams,
            "faults": dict(Counter(f"{fault.target} {fault.kind}" for fault in faults)),
            "requests": len(seen),
            **ends,
            "errors": dict(Counter(one.said for one in failed)),
            "total_s": quantiles([one.ended_s - one.began_s for one in seen]),
            "failed_after_s": quantiles([one.ended_s - one.began_s for one in failed]) if failed else [],
            "retries": counted['kvparams_proxy_retries_total{allowed="yes"}'],
            "continuations": counted["kvparams_proxy_continuations_total"],
            "rss_kib": [before.rss_kib, after.rss_kib],
            "descriptors": [before.descriptors, after.descriptors],
        }
    )
    assert not ends.keys() & {"wrong", "cut", "late"}, [one for one in failed if one.seen in ("wrong", "cut", "late")][
        :3
    ]
    if continuation:
        assert ends["right"] >= 0.999 * len(seen), failed[:5]
        assert counted["kvparams_proxy_continuations_total"] > 0  # the control: streams did break
    else:
        assert failed
        assert not innocent, (innocent[:5], hits)
    assert len(seen) > streams * seconds / 8
    assert after.rss_kib - before.rss_kib < 16_384
    assert after.descriptors <= before.descriptors + 16
