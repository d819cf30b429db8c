"""Computes the figures of a run from its requests and the engines' records. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from benchmarks.latency import percentile
from benchmarks.replicas_processes.engines import PrefillLog
from benchmarks.replicas_processes.load_generator import DealtRequest

__all__ = ["Figure", "Run", "engine_load_cov", "hit_ratio", "relative_hits", "table", "ttft_s"]


@dataclass(frozen=True, slots=True)
class Run:
    """A `Run` is what was sent in one run, and what the engines recorded."""

    requests: Sequence[DealtRequest]
    log: PrefillLog
    engines: int
    lag_p99_s: float
    """How late the generator was."""

    def until(self, at_s: float) -> "Run":
        """Returns the run as if it had only had the requests before that time."""
        requests = [each for each in self.requests if each.at_s < at_s]
        numbers = {each.number for each in requests}
        log = PrefillLog({number: record for number, record in self.log.items() if number in numbers})
        return Run(requests, log, self.engines, self.lag_p99_s)

    def select(self, chosen: Callable[[DealtRequest], bool]) -> list[int]:
        """Returns the numbers of some requests."""
        return [each.number for each in self.requests if chosen(each)]

    @property
    def failed(self) -> list[DealtRequest]:
        """The requests without a right answer."""
        return [each for each in self.requests if each.sent.error is not None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A `Figure` is one result. `bar` is what it has to meet, if anything."""

    scenario: str
    name: str
    value: float
    bar: str | None = None
    """`<= 1.05` or `>= 0.98`."""

    @property
    def meets(self) -> bool | None:
        """Returns whether the figure meets its bar; None without one."""
        if self.bar is None:
            return None
        relation, _, limit = self.bar.partition(" ")
        return self.value <= float(limit) if relation == "<=" else self.value >= float(limit)


def hit_ratio(log: PrefillLog) -> float:
    """Returns the share of all blocks that engines had in their caches."""
    return sum(each.cached_blocks for each in log.values()) / sum(each.blocks for each in log.values())


def relative_hits(numbers: Iterable[int], log: PrefillLog, reference: PrefillLog) -> float:
    """Returns the cached blocks of some requests, divided by those of the same requests in the reference run."""
    both = [number for number in numbers if number in log and number in reference]
    expected = sum(reference[number].cached_blocks for number in both)
    return sum(log[number].cached_blocks for number in both) / expected if expected else float("nan")


def ttft_s(run: Run) -> tuple[float, float]:
    """Returns the mean and the 99th percentile of the time to first token."""
    times = sorted(each.sent.ttft_s for each in run.requests if each.sent.ttft_s is not None)
    return fmean(times), percentile(times, 0.99)


def engine_load_cov(run: Run) -> tuple[float, float]:
    """Returns the coefficient of variation, over the engines, of the seconds they computed and of their requests."""
    busy_s = [0.0] * run.engines
    requests = [0] * run.engines
    for record in run.log.values():
        busy_s[record.engine] += record.compute_s
        requests[record.engine] += 1
    return pstdev(busy_s) / fmean(busy_s), pstdev(requests) / fmean(requests)


def table(figures: Sequence[Figure]) -> str:
    """Returns a Markdown table."""
    lines = ["| run | figure | value | bar | |", "|---|---|---|---|---|"]
    verdicts = {None: "", True: "met", False: "**missed**"}
    for each in figures:
        bar = (each.bar or "").replace("<=", "at most").replace(">=", "at least")
        lines.append(f"| {each.scenario} | {each.name} | {each.value:.3f} | {bar} | {verdicts[each.meets]} |")
    return "\n".join(lines)
