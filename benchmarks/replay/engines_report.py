"""Parts of a replay on reference engines as a table and as a picture.

Comparisons are made within a part, where all policies got the same requests; ratios are beside the first policy.
"""
# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave the types of its keyword arguments open.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.latency import percentile
from benchmarks.ratios import Interval, median_interval

__all__ = ["Line", "Part", "Said", "lines", "table", "write_plot"]


@dataclass(frozen=True, slots=True)
class Part:
    """A `Part` is a part of the trace under one policy."""

    policy: str
    number: int
    ttft_s: list[float]
    asked: float
    """Tokens of prompts."""
    local: float
    """Of these, in the own cache of the prefill engine that got the prompt."""
    fetched: float
    """... fetched by it from the store."""
    again: float
    """... computed by decode, because KV was not there."""

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return fmean(self.ttft_s)

    @property
    def p99_s(self) -> float:
        """The time to first token that one in a hundred exceeds."""
        return percentile(sorted(self.ttft_s), 0.99)


@dataclass(frozen=True, slots=True)
class Said:
    """A `Said` is the model's prediction for one policy."""

    policy: str
    mean_s: float
    p99_s: float
    reused: float


@dataclass(frozen=True, slots=True)
class Line:
    """A `Line` sums up all parts of one policy, beside those of the first policy."""

    policy: str
    whole: Part
    """All parts as one."""
    mean: float
    """Of all requests, beside the first policy's."""
    p99: float
    mean_of_parts: Interval
    """The median of the parts' ratios."""
    p99_of_parts: Interval


def lines(parts: Sequence[Part], policies: Sequence[str]) -> list[Line]:
    """A line for each policy, beside the first.

    Raises:
        ValueError: not every policy has every part.
    """
    of = {name: sorted((p for p in parts if p.policy == name), key=lambda each: each.number) for name in policies}
    base = of[policies[0]]
    found: list[Line] = []
    for policy, own in of.items():
        if [(each.number, each.asked) for each in own] != [(each.number, each.asked) for each in base]:
            raise ValueError(f"{policy} did not get the same parts as {policies[0]}")
        pairs = list(zip(own, base, strict=True))
        whole, first = _joined(own), _joined(base)
        found.append(
            Line(
                policy,
                whole,
                whole.mean_s / first.mean_s,
                whole.p99_s / first.p99_s,
                median_interval([a.mean_s / b.mean_s for a, b in pairs]),
                median_interval([a.p99_s / b.p99_s for a, b in pairs]),
            )
        )
    return found


def _joined(parts: Sequence[Part]) -> Part:
    return Part(
        parts[0].policy,
        -1,
        [one for each in parts for one in each.ttft_s],
        sum(each.asked for each in parts),
        sum(each.local for each in parts),
        sum(each.fetched for each in parts),
        sum(each.again for each in parts),
    )


def table(parts: Sequence[Part], said: Sequence[Said]) -> str:
    """Returns a Markdown table. The model's ratios stand beside what was measured."""
    rows = lines(parts, [each.policy for each in said])
    base = said[0]
    model = {each.policy: each for each in said}
    first = base.policy
    text = [
        f"| | cached | fetched | first token, mean ms | / {first} | by parts | p99 ms | / {first} | by parts "
        "| computed by decode | model: reused | mean | p99 |",
        "|---" * 13 + "|",
    ]
    for row in rows:
        whole, told = row.whole, model[row.policy]
        text.append(
            f"| {row.policy} | {whole.local / whole.asked:.1%} | {whole.fetched / whole.asked:.1%} "
            f"| {1000 * whole.mean_s:.0f} | {row.mean:.3f} | {row.mean_of_parts} "
            f"| {1000 * whole.p99_s:.0f} | {row.p99:.3f} | {row.p99_of_parts} | {whole.again / whole.asked:.1%} "
            f"| {told.reused:.1%} | {told.mean_s / base.mean_s:.3f} | {told.p99_s / base.p99_s:.3f} |"
        )
    return "\n".join(text)


def write_plot(parts: Sequence[Part], policies: Sequence[str], path: Path) -> None:
    """Plots the cached shares, the ratios of means part by part, and the spread of first tokens, as a PNG."""
    rows = lines(parts, policies)
    figure = Figure(figsize=(13, 4), layout="constrained")
    names = [row.policy for row in rows]
    axes = figure.add_subplot(1, 3, 1)
    local = [100 * row.whole.local / row.whole.asked for row in rows]
    fetched = [100 * row.whole.fetched / row.whole.asked for row in rows]
    axes.bar(names, local, label="cached")
    axes.bar_label(axes.bar(names, fetched, bottom=local, label="fetched"), fmt="%.1f", fontsize=8)
    axes.set_title("prompt tokens that were not computed (%)", fontsize=9)
    axes.legend(fontsize=8)
    axes = figure.add_subplot(1, 3, 2)
    for row in rows:
        own, base = ({p.number: p for p in parts if p.policy == name} for name in (row.policy, names[0]))
        axes.plot(list(own), [own[at].mean_s / base[at].mean_s for at in own], marker="o", label=row.policy)
    axes.set_title(f"mean time to first token / {names[0]}, part by part", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes = figure.add_subplot(1, 3, 3)
    for row in rows:
        ordered = sorted(row.whole.ttft_s)
        axes.plot(ordered, [(at + 1) / len(ordered) for at in range(len(ordered))], label=row.policy)
    axes.set_xscale("log")
    axes.set_title("share of requests whose first token came within s", fontsize=9)
    axes.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))
