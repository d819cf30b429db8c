"""Rows of a replay as tables and as a picture."""
# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave the types of its keyword arguments open.

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.replay.parts import OURS, Row
from benchmarks.replay.peers import PEERS

__all__ = ["table", "write_plot"]


def table(rows: Sequence[Row]) -> str:
    """Mean and 99th percentile in seconds, a line for each point, as Markdown; beside ours the best peer's share."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    lines = ["| | " + " | ".join(policies) + " |", "|---" * (len(policies) + 1) + "|"]
    for point in dict.fromkeys(row.point for row in rows):
        here = {row.policy: row for row in rows if row.point == point}
        peers = [row for name, row in here.items() if name in PEERS]
        cells: list[str] = []
        for name in policies:
            row = here[name]
            cell = f"{row.mean_s:.3g} ({row.p99_s:.3g})"
            if peers and name in (OURS, "no events"):
                mean, p99 = min(p.mean_s for p in peers), min(p.p99_s for p in peers)
                cell += f" = {row.mean_s / mean:.3f} ({row.p99_s / p99:.3f})"
            cells.append(cell)
        lines.append(f"| {point} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Mean and 99th percentile of each policy at each point, as a PNG; cut off at five times the best."""
    points = list(dict.fromkeys(row.point for row in rows))
    figure = Figure(figsize=(4.2 * len(points), 6), layout="constrained")
    for column, point in enumerate(points):
        here = sorted((row for row in rows if row.point == point), key=lambda row: -row.mean_s)
        for line, (title, values) in enumerate(
            (("mean", [row.mean_s for row in here]), ("99th percentile", [row.p99_s for row in here]))
        ):
            axes = figure.add_subplot(2, len(points), line * len(points) + column + 1)
            colours = ["tab:orange" if row.policy == OURS else "tab:blue" for row in here]
            bars = axes.barh([row.policy for row in here], values, color=colours)
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
            axes.set_xlim(0, 5 * min(values))
            axes.set_title(f"{point}: {title} (s)", fontsize=8)
            axes.tick_params(labelsize=7)
    FigureCanvasAgg(figure).print_png(str(path))
