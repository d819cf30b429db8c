"""The runs: some replicas side by side, and one run in which replicas come and go and the Valkey server is away."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.latency import percentile
from benchmarks.replay.trace import Request
from benchmarks.replay.world import World
from benchmarks.replicas_processes.figures import Run
from benchmarks.replicas_processes.load_generator import LoadGenerator
from benchmarks.replicas_processes.site import Site, open_site

__all__ = ["FaultTimes", "Settings", "disturb", "faults_s", "side_by_side"]

_FIRST: Final = 3
"""Replicas at the start of the run with faults, and as many that join later."""
_WARM_UP_S: Final = 15.0
_START_S: Final = 15.0
"""At most, for the replicas that join."""
_WINDOW_S: Final = 10.0
_BEFORE_KILL_S: Final = 1.0
_AFTER_KILL_S: Final = 6.0
_SAMPLE_S: Final = 0.2
_RETURN_S: Final = 2 * _WINDOW_S
"""Of the run after the server is back."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all runs."""

    trace: Sequence[Request]
    world: World
    speed: float
    """How many times as fast as the trace the simulated fleet is asked."""
    faster: float
    """How many times as fast as the simulated fleet everything runs."""
    answer_tokens: int
    folder: Path
    """For logs."""

    def folder_for(self, run: str) -> Path:
        """Returns a new folder for the logs of a run."""
        folder = self.folder / run
        folder.mkdir()
        return folder

    def first(self, seconds: float) -> Sequence[Request]:
        """Returns the requests of the first seconds of a run."""
        end = self.trace[0].at + seconds * self.speed * self.faster
        return [each for each in self.trace if each.at < end]


@dataclass(slots=True)
class FaultTimes:
    """`FaultTimes` says what happened when, in seconds after the start of the run, and what was seen."""

    joined: dict[int, float] = field(default_factory=dict[int, float])
    """When each replica that joined was healthy."""
    killed_at: float = 0.0
    lost: set[int] = field(default_factory=set[int])
    """The requests that the killed replica had not answered."""
    siblings_right_after_s: float = float("inf")
    """From the kill until every replica counts the right number of siblings, for good."""
    legs_wrong_before_lease: float = 0.0
    legs_wrong_after_3_s: float = 0.0
    """Mean, over samples and replicas, of the legs counted beyond those that the engines have."""
    down_at: float = 0.0
    up_at: float = 0.0


def faults_s(outage_s: float) -> float:
    """Returns the seconds that the run with faults takes."""
    return _WARM_UP_S + _START_S + 2 * _WINDOW_S + _BEFORE_KILL_S + _AFTER_KILL_S + outage_s + _RETURN_S


async def side_by_side(settings: Settings, replicas: int, seconds: float, *, is_sharing: bool) -> Run:
    """Replays the first seconds through so many replicas. Raises StartError."""
    folder = settings.folder_for(f"{replicas}-{'sharing' if is_sharing else 'alone'}")
    async with open_site(settings.world, settings.faster, folder) as (site, log):
        generator = _generator(settings, seconds)
        for number in range(replicas):
            generator.add(number, await site.start_replica(number, is_sharing=is_sharing))
        if is_sharing:
            await site.meet()
        await generator.run()
        return Run(generator.requests, log, settings.world.workers, _lag_s(generator))


async def disturb(settings: Settings, outage_s: float) -> tuple[Run, FaultTimes]:
    """Replays the trace while replicas join, one is killed, and the Valkey server is stopped. Raises StartError."""
    async with open_site(settings.world, settings.faster, settings.folder_for("faults")) as (site, log):
        generator = _generator(settings, faults_s(outage_s))
        for number in range(_FIRST):
            generator.add(number, await site.start_replica(number, is_sharing=True))
        await site.meet()
        times = FaultTimes()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generator.run())
            tasks.create_task(_faults(site, generator, times, outage_s))
        return Run(generator.requests, log, settings.world.workers, _lag_s(generator)), times


async def _faults(site: Site, generator: LoadGenerator, times: FaultTimes, outage_s: float) -> None:
    await asyncio.sleep(_WARM_UP_S)
    for number in range(_FIRST, 2 * _FIRST):
        port = await site.start_replica(number, is_sharing=True)
        generator.add(number, port)
        times.joined[number] = generator.now_s
    await asyncio.sleep(2 * _WINDOW_S + _BEFORE_KILL_S)
    await _kill(site, generator, times)
    times.down_at = generator.now_s
    await asyncio.to_thread(site.valkey.kill)
    await asyncio.sleep(outage_s)
    await asyncio.to_thread(site.valkey.start)
    times.up_at = generator.now_s


async def _kill(site: Site, generator: LoadGenerator, times: FaultTimes) -> None:
    """Kills the first replica, and samples what the others count."""
    site.kill(0)
    times.killed_at = generator.now_s
    times.lost = {each.number for each in generator.remove(0)}
    early: list[float] = []
    late: list[float] = []
    while (after_s := generator.now_s - times.killed_at) < _AFTER_KILL_S:
        for number in site.ports:
            before = site.legs
            counted, siblings = await site.load_seen(number)
            wrong = counted - (before + site.legs) / 2
            if after_s < 1.0:
                early.append(wrong)
            elif after_s >= 3.0:
                late.append(wrong)
            if siblings != len(site.ports) - 1:
                times.siblings_right_after_s = float("inf")
            elif times.siblings_right_after_s == float("inf"):
                times.siblings_right_after_s = generator.now_s - times.killed_at
        await asyncio.sleep(_SAMPLE_S)
    times.legs_wrong_before_lease, times.legs_wrong_after_3_s = fmean(early), fmean(late)


def _generator(settings: Settings, seconds: float) -> LoadGenerator:
    return LoadGenerator(settings.first(seconds), settings.speed * settings.faster, settings.answer_tokens)


def _lag_s(generator: LoadGenerator) -> float:
    return percentile(sorted(generator.tally.lag_s), 0.99)
