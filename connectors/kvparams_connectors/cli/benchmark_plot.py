"""Draws what `kvparams store bench` measured.

Matplotlib is imported only here, and only when somebody asks for a picture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvparams_connectors.cli.store_benchmark import BenchmarkResult, format_size
from kvparams_connectors.store_url import StoreError

__all__ = ["plot_benchmark", "require_matplotlib"]


def require_matplotlib() -> None:
    """Raise StoreError, before anything is measured, if no picture can be made here."""
    try:
        import matplotlib.figure as _  # noqa: F401
    except ImportError as error:
        raise StoreError("--plot needs matplotlib: pip install matplotlib") from error


def plot_benchmark(path: Path, name: str, measured: Sequence[BenchmarkResult]) -> None:
    """GB/s over the size of a page: put, get, a bare socket, memory. The name's ending says the format.

    Raises:
        StoreError: the file cannot be written, or its ending is no known format.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 5), layout="constrained")  # its own types leave much open
    axes: Any = figure.add_subplot()
    for threads in sorted({one.plan.threads for one in measured}):
        mine = [one for one in measured if one.plan.threads == threads]
        sizes = [one.plan.page_bytes for one in mine]
        callers = "1 caller" if threads == 1 else f"{threads} callers"
        axes.plot(sizes, [one.put for one in mine], marker="o", label=f"put, {callers}")
        axes.plot(sizes, [one.get for one in mine], marker="s", label=f"get, {callers}")
    first = [one for one in measured if one.plan.threads == measured[0].plan.threads]
    sizes = [one.plan.page_bytes for one in first]
    axes.plot(sizes, [one.socket_put for one in first], linestyle="--", color="gray", label="bare socket, put")
    axes.plot(sizes, [one.socket_get for one in first], linestyle=":", color="gray", label="bare socket, get")
    axes.plot(sizes, [one.memory for one in first], linestyle="-", color="lightgray", label="memory")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("page")
    axes.set_ylabel("GB/s")
    axes.set_title(name)
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"the plot {path} cannot be written: {error}") from error
