"""Tests our lines in an engine's log: each appears once, at the level and in the form that its operator configured."""

import subprocess
import sys
from textwrap import dedent

import pytest

_ENGINE = """
import logging, sys
from kvparams_connectors.engines.log_forwarding import forward_logs

engine = logging.getLogger("engine")
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("ENGINE %(levelname)s %(message)s"))
engine.addHandler(handler)
engine.setLevel({level})
engine.propagate = False
"""
_TWICE = """
forward_logs(engine)
forward_logs(engine)
"""
_LINES = """
for name in ("kvparams.signing", "kvparams_connectors.stores.file"):
    logging.getLogger(name).info("told")
    logging.getLogger(name).warning("warned")
logging.getLogger("someone.else").warning("theirs")
"""


def _printed(*parts: str, level: str = "logging.INFO") -> list[str]:
    """What a process of its own prints; pytest configures the logging of this one."""
    code = "".join(dedent(part) for part in (_ENGINE.format(level=level), *parts, _LINES))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize("later", ["", "logging.basicConfig(stream=sys.stdout, format='ROOT %(message)s')\n"])
def test_our_lines_appear_once_in_the_engines_log(later: str) -> None:
    lines = [line for line in _printed(_TWICE, later) if "theirs" not in line]
    assert lines == ["ENGINE INFO told", "ENGINE WARNING warned"] * 2


def test_the_engines_level_holds() -> None:
    assert _printed(_TWICE, level="logging.WARNING") == ["ENGINE WARNING warned"] * 2


def test_without_it_they_would_not_appear() -> None:
    """The control."""
    assert _printed() == []


@pytest.mark.parametrize("name", ["", "kvparams_connectors"])
def test_what_an_operator_has_configured_is_left_alone(name: str) -> None:
    configured = f"""
        own = logging.StreamHandler(sys.stdout)
        own.setFormatter(logging.Formatter("OWN %(message)s"))
        logging.getLogger({name!r}).addHandler(own)
        """
    lines = _printed(configured, _TWICE)
    assert lines.count("OWN warned") == (1 if name else 2)
    assert sum("warned" in line for line in lines) == 2


def test_an_engine_without_a_log_changes_nothing() -> None:
    assert _printed("engine.handlers.clear()\n", _TWICE) == []
