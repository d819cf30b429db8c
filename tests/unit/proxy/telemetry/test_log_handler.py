"""Tests the forms of the proxy's own log: text for people, JSON for programs."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from kvparams_proxy.telemetry.log_handler import JSONLogFormatter, TextLogFormatter
from kvparams_proxy.telemetry.logging_setup import is_json

PROGRAM = """
import logging, sys
from kvparams_proxy.telemetry.logging_setup import set_up_logging
set_up_logging()
set_up_logging(*sys.argv[1:])
for name in ("kvparams_proxy.x", "kvparams_connectors.x", "other"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("%s of %s", level, name)
logging.shutdown()
"""


def record(message: str, *arguments: object, facts: Mapping[str, object] | None = None, **more: Any) -> Any:
    made = logging.LogRecord("kvparams_proxy.x", logging.WARNING, "x.py", 1, message, arguments, more.get("exc_info"))
    if facts is not None:
        made.facts = facts
    return made


def test_a_line_of_json_has_the_message_and_the_facts() -> None:
    facts = {"event": "engine_state", "engine": "d0", "message": "not this one"}
    text = JSONLogFormatter("worker 2").format(record("%s is gone\n", "d0", facts=facts))
    assert "\n" not in text
    document = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document.pop("time"))
    assert document == {
        "level": "WARNING",
        "process": "worker 2",
        "logger": "kvparams_proxy.x",
        "message": "d0 is gone\n",
        "event": "engine_state",
        "engine": "d0",
    }


def test_a_line_of_text_is_one_line_whatever_stands_in_it() -> None:
    text = TextLogFormatter("worker 2").format(record("%s is gone", "d0\n2026-01-01 WARNING forged\x1b[2J"))
    assert "\n" not in text
    assert "\x1b" not in text
    assert text.endswith(" WARNING worker 2 kvparams_proxy.x: d0\\x0a2026-01-01 WARNING forged\\x1b[2J is gone")


@pytest.mark.parametrize("formatter", [TextLogFormatter(), JSONLogFormatter()])
def test_a_traceback_is_there(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        text = formatter.format(record("it failed", exc_info=sys.exc_info()))
    assert "Traceback" in text
    assert "ValueError: why" in text


def run(*arguments: str) -> list[str]:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    return ended.stderr.splitlines()


@pytest.mark.parametrize(("level", "ours", "others"), [("debug", 4, 2), ("info", 3, 2), ("error", 1, 1)])
def test_the_level_is_that_of_our_own_lines(level: str, ours: int, others: int) -> None:
    lines = [json.loads(line)["message"] for line in run(level)]
    assert sum("of kvparams" in line for line in lines) == 2 * ours
    assert sum("of other" in line for line in lines) == others


def test_the_form_can_be_chosen() -> None:
    (text,) = [line for line in run("warning", "text", "w") if "warning of kvparams_proxy.x" in line]
    assert " WARNING w kvparams_proxy.x: " in text
    (line,) = [line for line in run("warning", "json", "w") if "warning of kvparams_proxy.x" in line]
    assert json.loads(line)["process"] == "w"


def test_a_terminal_gets_text() -> None:
    """The control is everything else: see the test of levels."""
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM, "error"], stderr=theirs, check=True)
        text = os.read(ours, 4096).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert " ERROR kvparams_proxy.x: error of kvparams_proxy.x" in text
    assert not text.startswith("{")
    assert is_json("json")
    assert not is_json("text")
