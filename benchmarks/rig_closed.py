"""The closed-loop comparison on the rig: CPU per request of this proxy over each peer's, and whether it did the work.

Ratios are of neighbours in one round, and a row whose counters do not add up is a problem, not a figure.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from benchmarks.load_process import LoadError
from benchmarks.ratios import Interval, median_interval
from benchmarks.rig import ENGINE_PORTS, OURS, Counted, Rig, name_of
from tests.support.processes import require_free

__all__ = ["ClosedResult", "Row", "closed_table", "compare_closed", "problems", "run_closed"]

_STOP_S = 30.0


class Row(TypedDict):
    """A `Row` holds the used values of a row of the rig."""

    router: str
    sc: str
    rd: int
    conc: int
    n: int
    wall: float
    rps: float
    cpu_us: float
    rss: float
    errors: int
    bad: int
    err: str
    split: list[int]
    prefills: list[int]
    dec_kv: list[int]


@dataclass(frozen=True, slots=True)
class ClosedResult:
    """This proxy beside one peer in one scenario."""

    scenario: str
    peer: str
    ours_us: Interval
    peer_us: Interval
    ratio: Interval
    """Ours over the peer's, CPU per request."""
    ours_rss_mb: float
    peer_rss_mb: float


def run_closed(
    rig: Rig, *, peers: Sequence[str], scenarios: Sequence[str], rounds: int, scale: float, limit_s: float
) -> list[Row]:
    """Run the rig's interleaved comparison and read its rows. Raises StartError or LoadError if it fails."""
    require_free([*ENGINE_PORTS, *(rig.router(name).port for name in (OURS, *peers))])
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "rows.jsonl"
        only = ",".join([OURS, *peers])
        options = ["--inter", str(rounds), "--only", only, "--scen", ",".join(scenarios), "--out", str(out)]
        command = rig.bench(*options, "--nscale", str(scale), "--tmax", str(limit_s))
        with subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, **rig.environment}) as bench:
            try:
                status = bench.wait()
            except BaseException:
                bench.terminate()  # it ends its own processes when told to
                bench.wait(_STOP_S)
                raise
        if status:
            raise LoadError(f"the rig's bench.py ended with status {status}; its output is above")
        return [cast("Row", json.loads(line)) for line in out.read_text().splitlines()]


def problems(rows: Sequence[Row], limit_s: float, *, plain: bool = False) -> list[str]:
    """Every row, of whichever router, whose answers were wrong or whose legs the engines did not count.

    A run that reached `limit_s` was cut off: its last requests are counted but not answered, and what was left of them
    may still be counted in the next run. Otherwise the counts must be exact.
    """
    found: list[str] = []
    before = after = 0
    for row in rows:
        before, after = after, row["conc"] if row["wall"] >= limit_s else 0
        if row["router"] == "direct":
            continue
        counted = Counted(
            prefill_requests=sum(row["split"][:2]),
            decode_requests=sum(row["split"][2:]),
            prefills=sum(row["prefills"]),
            decodes_with_kv=sum(row["dec_kv"]),
        )
        wrong = f"{row['errors']} errors, {row['bad']} bad: {row['err']}" if row["errors"] or row["bad"] else None
        problem = wrong or counted.problem(row["n"], before + after, plain=plain)
        if problem:
            found.append(f"round {row['rd']} {row['sc']} {name_of(row['router'])}: {problem}")
    return found


def compare_closed(rows: Sequence[Row], peers: Sequence[str]) -> list[ClosedResult]:
    """Per scenario and peer, the ratio of CPU per request. Raises LoadError if a router has no rows."""
    results: list[ClosedResult] = []
    for scenario in dict.fromkeys(row["sc"] for row in rows):
        by_router = {name: _by_round(rows, scenario, name) for name in (OURS, *peers)}
        ours = by_router[OURS]
        for peer in peers:
            theirs = by_router[peer]
            rounds = sorted(ours.keys() & theirs.keys())
            if not rounds:
                raise LoadError(f"{scenario}: no round has both {name_of(OURS)} and {name_of(peer)}")
            results.append(
                ClosedResult(
                    scenario=scenario,
                    peer=peer,
                    ours_us=median_interval([ours[each]["cpu_us"] for each in rounds]),
                    peer_us=median_interval([theirs[each]["cpu_us"] for each in rounds]),
                    ratio=median_interval([ours[each]["cpu_us"] / theirs[each]["cpu_us"] for each in rounds]),
                    ours_rss_mb=max(ours[each]["rss"] for each in rounds),
                    peer_rss_mb=max(theirs[each]["rss"] for each in rounds),
                )
            )
    return results


def _by_round(rows: Sequence[Row], scenario: str, router: str) -> dict[int, Row]:
    return {row["rd"]: row for row in rows if (row["sc"], row["router"]) == (scenario, router)}


def closed_table(results: Sequence[ClosedResult]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| scenario | peer | ours CPU us/request | peer CPU us/request | ours / peer [95 %] | RSS MB ours / peer |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.scenario} | {name_of(each.peer)} | {each.ours_us.median:.0f} | {each.peer_us.median:.0f} | "
        f"{each.ratio} | {each.ours_rss_mb:.0f} / {each.peer_rss_mb:.0f} |"
        for each in results
    ]
    return "\n".join(lines)
