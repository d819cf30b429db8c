"""The proxy benchmark as a picture. The floor stands beside the proxy in every group of bars."""
# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave the types of its keyword arguments open.

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.proxy_report import SummaryRow

__all__ = ["write_plot"]


def write_plot(rows: Sequence[SummaryRow], path: Path) -> None:
    """CPU per request and added latency, floor beside proxy, as a PNG."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = (
        ("CPU per request (us)", [("", [row.cpu_us for row in rows])]),
        ("added latency (ms)", [(" p50", [r.added_p50_ms for r in rows]), (" p99", [r.added_p99_ms for r in rows])]),
    )
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    subjects = list(dict.fromkeys(row.subject for row in rows))
    for number, (title, series) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        bars = [(subject, suffix, values) for subject in subjects for suffix, values in series]
        width = 0.8 / len(bars)
        for index, (subject, suffix, values) in enumerate(bars):
            heights = [value for value, row in zip(values, rows, strict=True) if row.subject == subject]
            places = [place + (index + 0.5) * width - 0.4 for place in range(len(scenarios))]
            drawn = axes.bar(places, heights, width, label=subject + suffix)
            axes.bar_label(drawn, fmt="%.4g", fontsize=7)
        axes.set_xticks(range(len(scenarios)), scenarios)
        axes.set_title(title)
        axes.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))
