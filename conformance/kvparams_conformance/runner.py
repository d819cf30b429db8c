"""Runs checks against a proxy: those that disturb nobody beside one another, the others one at a time in lanes.

A lane is one proxy with its engines. Every check ends within a bound, whatever the proxy does, and nothing is left
running behind.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from kvparams_conformance.checks import Check, CheckFailed, CheckResult, NotJudged, Verdict
from kvparams_conformance.engine_site import Engine, EngineTrial
from kvparams_conformance.program import StartFailed
from kvparams_conformance.reader_site import Reader, ReaderTrial
from kvparams_conformance.site import Site, Trial, Under

__all__ = ["run_engine_checks", "run_proxy_checks", "run_reader_checks"]

CHECK_S: Final = 20.0
"""The longest time of one check."""
_SETTLE_S: Final = 8.0
"""The time in which a proxy has to answer an ordinary request again after engines have misbehaved."""
_BESIDE: Final = 8
_NOT_SETTLED: Final[tuple[Verdict, str]] = (
    "error",
    f"the proxy did not answer an ordinary request within {_SETTLE_S:.0f} s",
)
_STARTS: Final = 4
"""How often one lane's proxy is started, if it ends by itself."""


class _Lane:
    """A proxy with its engines, started anew if it ends."""

    def __init__(self, under: Under) -> None:
        self._under = under
        self._lock = asyncio.Lock()
        self._site: Site | None = None
        self._starts = 0
        self._failure: StartFailed | None = None

    async def site(self) -> Site:
        """Returns a site whose proxy runs. Raises StartFailed."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._site is not None and self._site.program.ended is None:
                return self._site
            await self._stop()
            self._starts += 1
            site = self._site = Site(self._under)
            try:
                if self._starts > _STARTS:
                    raise StartFailed("the proxy ended by itself again and again")
                await site.start()
            except (StartFailed, OSError) as error:
                self._failure = error if isinstance(error, StartFailed) else StartFailed(str(error))
                raise self._failure from None
            return site

    async def stop(self) -> None:
        async with self._lock:
            await self._stop()

    async def _stop(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None


async def run_proxy_checks(checks: Sequence[Check], under: Under, lanes: int = 3) -> list[CheckResult]:
    """Returns the verdicts, in the order of the checks."""
    together = [check for check in checks if not check.is_isolated]
    alone = [check for check in checks if check.is_isolated]
    results: dict[str, CheckResult] = {}
    if under.command is None:  # one proxy, one set of engines
        lane = _Lane(under)
        try:
            await _run_together(lane, together, results)
            await _run_in_turn(lane, alone, results)
        finally:
            await lane.stop()
    else:
        first, *others = [_Lane(under) for _ in range(1 + max(1, min(lanes, len(alone))))]
        jobs = [_run_together(first, together, results)] if together else []
        jobs += [_run_in_turn(lane, alone[at :: len(others)], results) for at, lane in enumerate(others)]
        try:
            await asyncio.gather(*jobs)
        finally:
            await asyncio.gather(*(lane.stop() for lane in (first, *others)))
    return [results[check.id] for check in checks]


async def _run_together(lane: _Lane, checks: Sequence[Check], results: dict[str, CheckResult]) -> None:
    room = asyncio.Semaphore(_BESIDE)

    async def one(check: Check) -> None:
        async with room:
            results[check.id] = await _judge(lane, check)

    await asyncio.gather(*map(one, checks))


async def _run_in_turn(lane: _Lane, checks: Sequence[Check], results: dict[str, CheckResult]) -> None:
    for check in checks:
        results[check.id] = await _judge(lane, check)


async def _judge(lane: _Lane, check: Check) -> CheckResult:
    """Runs one check. Whatever happens is a verdict."""
    begun = time.monotonic()
    try:
        site = await lane.site()
    except StartFailed as error:
        return CheckResult(check, "error", str(error), "", "", time.monotonic() - begun)
    trial = Trial(site)
    if check.is_isolated and not await _settle(site):
        verdict, message = _NOT_SETTLED
    else:
        verdict, message = await _verdict(check, trial)
    if site.program.ended is not None:
        verdict, message = "fail", f"the proxy ended with status {site.program.ended}; {message}".rstrip("; ")
    sent, seen = trial.evidence()
    return CheckResult(check, verdict, message, sent, seen, time.monotonic() - begun)


async def run_engine_checks(checks: Sequence[Check], engine: Engine) -> list[CheckResult]:
    """Returns the verdicts on an engine, in the order of the checks."""
    room = asyncio.Semaphore(_BESIDE)

    async def one(check: Check) -> CheckResult:
        async with room:
            begun, trial = time.monotonic(), EngineTrial(engine)
            verdict, message = await _verdict(check, trial)
            return CheckResult(check, verdict, message, *trial.evidence(), time.monotonic() - begun)

    return await asyncio.gather(*map(one, checks))


async def run_reader_checks(checks: Sequence[Check], command: str) -> list[CheckResult]:
    """Returns the verdicts on a reader, in the order of the checks. One program answers the questions of all."""
    reader, results = Reader(command), list[CheckResult]()
    try:
        for check in checks:
            begun, trial = time.monotonic(), ReaderTrial(reader)
            try:
                verdict, message = await _verdict(check, trial)
            except StartFailed as error:
                verdict, message = "error", str(error)
            results.append(CheckResult(check, verdict, message, *trial.evidence(), time.monotonic() - begun))
    finally:
        await reader.stop()
    return results


async def _verdict(check: Check, trial: Trial | EngineTrial | ReaderTrial) -> tuple[Verdict, str]:
    """Runs one check. Whatever happens is a verdict."""
    try:
        async with asyncio.timeout(CHECK_S):
            await check.run(trial)
    except CheckFailed as error:
        return ("choice" if check.is_choice else "fail"), str(error)
    except NotJudged as error:
        return "skip", str(error)
    except StartFailed:
        raise
    except TimeoutError:
        return "fail", f"the check did not end within {CHECK_S:.0f} s"
    except Exception as error:  # noqa: BLE001  what a proxy sends may be anything: the run goes on, the line says it
        return "fail", f"what came cannot be read: {type(error).__name__}: {error}"
    return "pass", ""


async def _settle(site: Site) -> bool:
    """Waits until an ordinary request is answered: engines that misbehaved may have been set aside for a while."""
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        trial = Trial(site)
        if (await trial.ask(trial.talk(), timeout_s=2.0)).status == 200:
            return True
        await asyncio.sleep(0.05)
    return False
