"""Draws `benchmarks/history/series.csv`, one panel for each matter, into `benchmarks/history/series.svg`."""
# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave the types of its keyword arguments open.

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HISTORY = Path(__file__).parent / "history"


def write_history_plot(source: Path, target: Path) -> None:
    """Draw every measure's values in the order in which they were measured, and its limit as a dotted line."""
    panels = defaultdict[str, defaultdict[str, list[dict[str, str]]]](lambda: defaultdict(list))
    with source.open(newline="") as file:
        for row in csv.DictReader(file):
            panels[row["matter"]][row["measure"]].append(row)
    figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
    for number, (matter, measures) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), number)
        for measure, rows in measures.items():
            [line] = axes.plot(range(len(rows)), [float(row["value"]) for row in rows], marker="o", label=measure)
            if rows[-1]["limit"]:
                axes.axhline(float(rows[-1]["limit"]), color=line.get_color(), linestyle=":", linewidth=0.8)
        longest = max(measures.values(), key=len)
        axes.set_xticks(range(len(longest)), [row["date"] for row in longest], fontsize=7)
        axes.set_title(matter)
        axes.legend(fontsize=6)
    FigureCanvasSVG(figure).print_svg(str(target), metadata={"Date": None})


if __name__ == "__main__":
    write_history_plot(HISTORY / "series.csv", HISTORY / "series.svg")
