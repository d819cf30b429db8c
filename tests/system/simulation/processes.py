"""Runs the simulation in processes of its own, so that its replacements touch no other test and all cores work."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["CORES", "simulate"]

CORES = os.cpu_count() or 1
_ROOT = Path(__file__).parents[3]


def simulate(*commands: Sequence[object]) -> list[Any]:
    """What each command of `python -m tests.system.simulation` says, all at the same time.

    Raises:
        AssertionError: one has failed; with what it said.
    """
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.system.simulation", *map(str, command)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate() for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in said]
