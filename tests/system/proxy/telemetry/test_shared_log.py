"""Tests that lines of several processes in one file or pipe are whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITERS = 4
BATCHES = 60
LINES = 100
WRITER = f"""
import json, sys
from pathlib import Path
from kvparams_proxy.telemetry.line_writer import LineWriter

place, lock, name = sys.argv[1:]
writer = LineWriter(place, Path(lock) if lock else None)
sys.stdin.read(1)  # all of them begin at once
for batch in range({BATCHES}):
    lines = [json.dumps({{"writer": name, "line": batch * {LINES} + n, "text": "x" * 60}}) for n in range({LINES})]
    writer.put("".join(line + "\\n" for line in lines).encode(), {LINES})
writer.close(30)
"""


def written(place: str, lock: Path | None) -> bytes:
    """Returns what four processes have written to one place; "-" is a pipe, which is read slowly."""
    command = (sys.executable, "-c", WRITER, place, "" if lock is None else str(lock))
    source, sink = os.pipe()
    writers: list[subprocess.Popen[bytes]] = []
    for number in range(WRITERS):
        writers.append(subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=sink))
    os.close(sink)
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"x")
        writer.stdin.close()
    found = b""
    while part := os.read(source, 3_000):
        found += part
    os.close(source)
    assert [writer.wait(30) for writer in writers] == [0] * WRITERS
    return found if place == "-" else Path(place).read_bytes()


def torn(data: bytes) -> int:
    """Returns how many lines are not as written; checks that the others are all there, each writer's in order."""
    seen: dict[str, list[int]] = {}
    broken = 0
    for line in data.splitlines():
        try:
            document = json.loads(line)
            seen.setdefault(document["writer"], []).append(document["line"])
        except (ValueError, TypeError, KeyError):  # what is left of a line can happen to be JSON
            broken += 1
    if not broken:
        assert sorted(seen) == [str(number) for number in range(WRITERS)]
        assert all(lines == list(range(BATCHES * LINES)) for lines in seen.values())
    return broken


@pytest.mark.parametrize("to_file", [True, False], ids=["file", "pipe"])
def test_lines_of_four_processes_are_whole(tmp_path: Path, to_file: bool) -> None:
    place = str(tmp_path / "log") if to_file else "-"
    assert torn(written(place, tmp_path / "lock")) == 0


def test_lines_in_a_pipe_are_torn_without_the_lock() -> None:
    """The control."""
    assert torn(written("-", None)) > 0
