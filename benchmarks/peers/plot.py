"""Draws CPU per request of all routers as an SVG: a panel for each scenario, a dot with its interval for each router.

The picture brings its own colors for light and dark surroundings, and needs no library.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from benchmarks.peers.report import Comparison
from benchmarks.scenarios import SCENARIOS

__all__ = ["plot"]

_COLUMNS: Final = 2
_PANEL_WIDTH: Final = 470
_NAMES_WIDTH: Final = 126
_VALUES_WIDTH: Final = 96
_ROW_HEIGHT: Final = 22
_TITLE_HEIGHT: Final = 30
_AXIS_HEIGHT: Final = 34
_MARGIN: Final = 14
_STYLE: Final = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
text.title,text.bold{font-weight:600}text.soft{fill:#59636e;font-size:11px}
.back{fill:#ffffff}.grid{stroke:#d1d9e0}.span{stroke-width:3;stroke-linecap:round;stroke-opacity:.55}
.ours{fill:#0969da;stroke:#0969da}.peer{fill:#bc4c00;stroke:#bc4c00}.floor{fill:#818b98;stroke:#818b98}
@media (prefers-color-scheme:dark){
text{fill:#f0f6fc}text.soft{fill:#9198a1}.back{fill:#0d1117}.grid{stroke:#3d444d}
.ours{fill:#4493f8;stroke:#4493f8}.peer{fill:#f0883e;stroke:#f0883e}.floor{fill:#9198a1;stroke:#9198a1}}
"""


def plot(compared: Sequence[Comparison], title: str) -> str:
    """Returns the SVG of CPU per request in microseconds.

    Args:
        compared: of one part; the order of routers is that of its first scenario.
        title: a line above all panels.
    """
    scenarios = list(dict.fromkeys(each.scenario for each in compared))
    names = list(dict.fromkeys(each.router for each in compared))
    panel_height = _TITLE_HEIGHT + _ROW_HEIGHT * len(names) + _AXIS_HEIGHT
    width = _COLUMNS * _PANEL_WIDTH + 2 * _MARGIN
    height = 40 + math.ceil(len(scenarios) / _COLUMNS) * panel_height + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
        f'<text class="title" x="{_MARGIN}" y="24">{escape(title)}</text>',
    ]
    for number, scenario in enumerate(scenarios):
        row, column = divmod(number, _COLUMNS)
        left, top = _MARGIN + column * _PANEL_WIDTH, 40 + row * panel_height
        found = {each.router: each for each in compared if each.scenario == scenario}
        parts.append(f'<g transform="translate({left},{top})">{_panel(scenario, [found[name] for name in names])}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(scenario: str, compared: Sequence[Comparison]) -> str:
    start, end = _NAMES_WIDTH, _PANEL_WIDTH - _VALUES_WIDTH - _MARGIN
    step = _step(max(each.value.high for each in compared))
    most = step * math.ceil(max(each.value.high for each in compared) / step)
    scale = (end - start) / most
    bottom = _TITLE_HEIGHT + _ROW_HEIGHT * len(compared)
    parts = [f'<text class="title" x="0" y="18">{escape(SCENARIOS[scenario].title)}</text>']
    for tick in range(round(most / step) + 1):
        x = start + tick * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TITLE_HEIGHT - 4}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick * step:g}</text>')
    for number, each in enumerate(compared):
        y = _TITLE_HEIGHT + _ROW_HEIGHT * (number + 0.5)
        low, middle, high = (start + value * scale for value in (each.value.low, each.value.median, each.value.high))
        kind = "ours" if each.is_ours else "floor" if each.router.startswith("floor") else "peer"
        bold = ' class="bold"' if each.is_ours else ""
        told = f"{each.value.median:.0f} µs" + ("" if each.is_ours else f" ({each.ours.median:.2f})")
        parts.append(f'<text{bold} x="{start - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(each.router)}</text>')
        parts.append(f'<line class="{kind} span" x1="{low:.1f}" y1="{y:.1f}" x2="{high:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<circle class="{kind}" cx="{middle:.1f}" cy="{y:.1f}" r="4"/>')
        parts.append(f'<text class="soft" x="{end + 8}" y="{y + 4:.1f}">{told}</text>')
    return "".join(parts)


def _step(most: float) -> float:
    """Returns a round distance of ticks that makes three to six of them."""
    power = 10.0 ** math.floor(math.log10(max(most, 1e-9) / 3))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 5)
