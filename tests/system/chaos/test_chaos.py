"""Tests engines and a store that fail every few seconds under running streams: hardly any client notices.

Each role has one spare: of three engines two are enough, of two one. Every request has `DEADLINE_S`, longer than two
engines that fall silent one after the other under it (`--decode-timeout` each) and the answer computed behind them.

Where the proxy is beside an engine, clients do as a load balancer would: a client that was refused asks another proxy.
Such an engine has no spare: while it is away its own requests end with an error, and no other requests do.
"""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import until
from tests.system.chaos.backings import Backing, FileBacking, ValkeyBacking
from tests.system.chaos.cluster import Cluster, Usage
from tests.system.chaos.faults import Fault, schedule
from tests.system.chaos.streams import Asked, Question, ask, question
from tests.system.chaos.ways import WAYS, Way

DEADLINE_S = 30.0
EVERY_S = 5.0
SEED = 144
"""Of the faults: a decode engine is killed first, then a prefill engine stopped; in ten minutes all come often."""
FLAGS = ("--probe", "1", "--prefill-timeout", "6", "--decode-timeout", "3")
"""Silence longer than that is an engine that has stopped. The store's own time-out is 5 s."""
NOTICED_S = 2.0
"""After which an engine that is back is used again: a probe and a little."""
QUEUED = ("--probe", "1", "--prefill-timeout", "6", "--retries", "20")
"""Where work may wait in a queue, silence says nothing."""
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


async def client(cluster: Cluster, number: int, asked: list[Question], until_s: float) -> list[Asked]:
    """One stream after the other. Half of them share their KV with nobody, so that prefill has work to do."""
    draw = random.Random(number)
    found: list[Asked] = []
    ports = {name: int(server.url.rpartition(":")[2]) for name, server in cluster.fronts.items()}
    fronts = deque(ports)
    fronts.rotate(number)
    await asyncio.sleep(draw.random())
    while time.monotonic() < until_s:
        salt = f"{number}-{len(found)}" if draw.random() < 0.5 else None
        one = await ask(ports[fronts[0]], draw.choice(asked), DEADLINE_S, salt)
        one.front = fronts[0]
        found.append(one)
        if one.seen != "right":
            fronts.rotate(1)
            await asyncio.sleep(0.1)  # nobody asks as fast as it is refused
    return found


def on_trial(cluster: Cluster, one: Asked, seen: list[Asked]) -> bool:
    """Whether the engine beside its front had been hit, and nobody had been answered there since: one request is tried
    there then, and whoever comes before that has ended well is refused."""
    if not one.said.endswith(f"no_{cluster.way.beside}_instance"):
        return False
    hits = [hit for hit in cluster.hits if hit.who == one.front and hit.until_s <= one.ended_s]
    since_s = max((hit.until_s for hit in hits), default=None)
    well = [each.ended_s for each in seen if each.front == one.front and each.seen == "right"]
    return since_s is not None and not any(since_s < ended_s < one.began_s for ended_s in well)


def its_own(cluster: Cluster, one: Asked, *, continuation: bool) -> bool:
    """Whether a request had to fail: its front is beside an engine that was hit; or its stream came from one, and could
    not go on elsewhere."""
    way = cluster.way
    hit = {hit.who for hit in cluster.hits if hit.from_s < one.ended_s and one.began_s < hit.until_s + NOTICED_S}
    if way.beside is not None and one.front in hit:
        return one.seen in ("refused", "error event") or (way.inside and one.seen == "cut")
    return not continuation and one.seen == "error event" and one.route[-1] in hit


async def chaos(cluster: Cluster, faults: list[Fault], began_s: float) -> None:
    """Each in its time; but nothing more of a role is hit before all of it is used again, however slow the machine."""
    spare = {fault.target: asyncio.Lock() for fault in faults}

    async def suffer(fault: Fault) -> None:
        async with spare[fault.target]:
            await cluster.suffer(fault)
            if fault.target != "store":
                await asyncio.sleep(NOTICED_S)

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            await asyncio.sleep(began_s + fault.at_s - time.monotonic())
            group.create_task(suffer(fault))


async def calm(cluster: Cluster) -> Usage:
    """What the proxy holds when nothing is in flight, apart from connections that it keeps for the next requests."""

    async def is_idle() -> bool:
        return not await cluster.busy()

    await until(is_idle, 20.0, pause_s=0.05)
    seen = await cluster.counted()
    kept = sum(value for name, value in seen.items() if name.startswith("kvparams_proxy_engine_connections"))
    found = cluster.usage()
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


TRIED = [
    pytest.param(WAYS[0], "file", True, id="continued"),
    pytest.param(WAYS[0], "file", False, id="not continued"),
    pytest.param(WAYS[0], "valkey", True, id="continued, valkey"),
    *(pytest.param(way, "file", not way.inside, id=way.name, marks=pytest.mark.soak) for way in WAYS[1:]),
]
"""Which way, over what, and whether streams go on elsewhere; in an engine's own server they do not."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "kind", "continuation"), TRIED)
async def test_engines_and_store_go_wrong_and_streams_go_on(
    tmp_path: Path,
    store: Path,
    way: Way,
    kind: str,
    continuation: bool,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    first = way is WAYS[0]
    seconds, streams, engines = effort(11, 600 if first else 185), effort(12, 64 if first else 24), effort(2, 3)
    warm_s = effort(1, 20)
    # An engine's step: streams last for some seconds, and the machine has time for all of them.
    pace = ("--step-ms", str(effort(30, 80)), "--blocks", "2048")
    flags = (*(QUEUED if way.queued else FLAGS), *(("--continuation",) if continuation else ()))
    async with (
        sharing(kind, store, tmp_path) as backing,
        Cluster.running(tmp_path, backing, engines=engines, way=way, extra=pace, flags=flags) as cluster,
    ):
        one = cluster.engines[-1]
        asked = await answered(int(one.url.rpartition(":")[2]), questions(1, effort(16, 120)))
        await asyncio.gather(*(client(cluster, n, asked, time.monotonic() + warm_s) for n in range(streams)))
        before = await calm(cluster)

        began_s = time.monotonic()
        faults = schedule(SEED, seconds, EVERY_S, engines, backing.faults, way.roles)
        clients = asyncio.gather(*(client(cluster, n, asked, began_s + seconds) for n in range(streams)))
        await chaos(cluster, faults, began_s)
        seen = [one for each in await clients for one in each]

        after = await calm(cluster)
        counted = await cluster.counted()

    ends = Counter(one.seen for one in seen)
    failed = [one for one in seen if one.seen != "right"]
    innocent = [one for one in failed if not its_own(cluster, one, continuation=continuation)]
    tried = [one for one in innocent if way.beside is not None and not way.inside and on_trial(cluster, one, seen)]
    innocent = [one for one in innocent if one not in tried]
    record(
        {
            "seconds": seconds,
            "streams": streams,
            "faults": dict(Counter(f"{fault.target} {fault.kind}" for fault in faults)),
            "requests": len(seen),
            **ends,
            "innocent": len(innocent),
            "during a trial": len(tried),
            "errors": dict(Counter(one.said for one in failed)),
            "total_s": quantiles([one.ended_s - one.began_s for one in seen]),
            "failed_after_s": quantiles([one.ended_s - one.began_s for one in failed]) if failed else [],
            "retries": counted['kvparams_proxy_retries_total{allowed="yes"}'],
            "continuations": counted["kvparams_proxy_continuations_total"],
            "rss_kib": [before.rss_kib, after.rss_kib],
            "descriptors": [before.descriptors, after.descriptors],
        }
    )
    never = [one for one in seen if one.seen in ("wrong", "late") or (one.seen == "cut" and not way.inside)]
    assert not never, never[:3]
    if continuation:
        assert len(innocent) <= 0.001 * len(seen), innocent[:5]
        # the control: streams did break; beside the only decode engine nobody is there to go on
        assert failed if way.beside == "decode" else counted["kvparams_proxy_continuations_total"] > 0
    else:
        assert failed
        assert not innocent, (innocent[:5], cluster.hits)
    assert len(seen) > streams * seconds / 8
    if not way.inside:  # an engine that was started anew holds nothing yet
        fronts = len(cluster.fronts)
        assert after.rss_kib - before.rss_kib < 16_384 * fronts
        assert after.descriptors <= before.descriptors + 16 * fronts
