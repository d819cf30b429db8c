"""Tests what `kvparams top` shows of a snapshot."""

import io
import json
from typing import Any

from rich.console import Console

from kvparams_proxy.cli import top_command
from kvparams_proxy.ui.terminal_view import ViewState, render
from tests.unit.proxy.ui.test_snapshot import build, engine, part, request


def shown(panel: str, **changes: Any) -> list[str]:
    """Returns the lines of a panel."""
    snapshot = json.loads(json.dumps(build(part(**changes))))
    console = Console(file=io.StringIO(), width=170)
    console.print(render(snapshot, ViewState("http://proxy", panel=panel), None))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_each_request_is_shown_once() -> None:
    both = request("r-slow", started=1.0, total_ms=900.0)
    lines = shown("requests", slow=[both], recent=[request("r-last", started=2.0), both])
    assert [line.split()[0] for line in lines if line.strip().startswith("r-")] == ["r-slow", "r-last"]


def test_an_unhealthy_engine_is_named_with_the_reason_and_for_how_long() -> None:
    bad = engine("d1", state="not_ready", reason="no connection to the engine (refused)", since=1e9 - 30)
    lines = shown("engines", engines=[engine("d0"), bad])
    assert "1 of 2 engines unhealthy" in lines[0]
    (row,) = (line for line in lines if line.strip().startswith("d1"))
    assert "30 s: no connection to the engine (refused)" in row
    (row,) = (line for line in lines if line.strip().startswith("d0"))
    assert "closed" in row
    assert "unhealthy" not in shown("engines", engines=[engine("d0")])[0]


def test_the_help_explains_every_column_and_key() -> None:
    text = top_command._EXAMPLE  # pyright: ignore[reportPrivateUsage]
    (heads,) = (line.split() for line in shown("engines") if line.strip().startswith("ENGINE"))
    obvious = {"ENGINE", "ROLE", "GROUP", "STATE", "BREAKER,", "REASON"}
    assert [head for head in heads if head not in obvious and f"\n  {head} " not in text] == []
    for key in ("q ", "Ctrl-C", "tab", "s and S", "r ", "p "):
        assert key in text
