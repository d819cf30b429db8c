"""Tests the unit in `deploy/systemd`: systemd accepts it, and its command line and variables exist."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvparams.cli.environment import option_variables
from kvparams_proxy.cli.proxy_command import ProxyCommand
from kvparams_proxy.config.options import ProxyOptions
from kvparams_proxy.service_notifier import _MARGIN_S  # pyright: ignore[reportPrivateUsage]

FOLDER: Final = Path(__file__).parents[3] / "deploy" / "systemd"
UNIT: Final = FOLDER / "kvparams-proxy.service"
VARIABLES: Final = FOLDER / "kvparams-proxy.env"


def setting(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    ProxyCommand().add_arguments(made)
    return made


def verify(text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs systemd's own check, with a program that exists here."""
    unit = folder / UNIT.name
    unit.write_text(text.replace("/opt/kvparams/bin/kvparams", sys.executable))
    command = ["systemd-analyze", "verify", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = verify(UNIT.read_text(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_notices_a_name_that_does_not_exist(tmp_path: Path) -> None:
    assert "WatchdogSecs" in verify(UNIT.read_text().replace("WatchdogSec=", "WatchdogSecs="), tmp_path).stderr


def test_the_command_line_exists() -> None:
    program, command, *argv = shlex.split(setting("ExecStart"))
    assert (Path(program).name, command) == ("kvparams", "proxy")
    found = parser().parse_args(argv)
    assert found.config == "/etc/kvparams/fleet.yaml"
    assert found.admin_token_file == "%d/admin-token"
    assert "admin-token:" in setting("LoadCredential")


def test_every_variable_sets_an_option() -> None:
    given = dict(re.findall(r"^([A-Z_]+)=(.*)$", VARIABLES.read_text(), re.MULTILINE))
    known = option_variables(parser()._actions)  # pyright: ignore[reportPrivateUsage]
    assert given
    for name, text in given.items():
        parser().parse_args([known[name].option_strings[-1], text])
    assert f"/{VARIABLES.name}" in setting("EnvironmentFile")


def test_a_shutdown_has_the_time_that_it_takes() -> None:
    options = ProxyOptions()
    assert int(setting("TimeoutStopSec")) == options.drain_delay + options.grace + _MARGIN_S
    assert (setting("Type"), setting("NotifyAccess"), setting("KillMode")) == ("notify", "main", "mixed")


def test_systemd_accepts_the_socket_and_gives_it_to_the_unit(tmp_path: Path) -> None:
    socket = UNIT.with_suffix(".socket")
    for path in (UNIT, socket):
        text = path.read_text().replace("/opt/kvparams/bin/kvparams", sys.executable)
        (tmp_path / path.name).write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / socket.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "FileDescriptorName=http" in socket.read_text()
    bad = tmp_path / socket.name
    bad.write_text(bad.read_text().replace("ListenStream=", "ListenStreams="))
    assert "ListenStreams" in subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
