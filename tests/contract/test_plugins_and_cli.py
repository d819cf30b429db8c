"""Tests the lookup of objects by entry point, and the `kvparams` command that is built from them."""

import socket
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvparams import plugins
from kvparams.cli import main
from kvparams.errors import PluginError
from kvparams.instances import RoundRobin


def test_what_is_registered_is_found_by_name() -> None:
    assert plugins.load_plugin("policies", "round_robin") is RoundRobin
    assert {"nixl", "store"} <= set(plugins.plugin_names("dialects"))
    assert {"file", "memory"} <= set(plugins.plugin_names("stores"))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PluginError, match="round_robin"):
        plugins.load_plugin("policies", "no-such")


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([("x", "kvparams_proxy.no_such:X [proxy]")], r"pip install 'kvparams\[proxy\]'"),
        ([("x", "no_such_module_anywhere:X")], r"'no_such_module_anywhere'$"),
        ([("x", "kvparams.version:no_such")], r"no attribute 'no_such'$"),
        ([("x", "kvparams.version:__version__"), ("x", "kvparams.cli:main")], "more than once"),
    ],
)
def test_a_broken_registration_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, points: list[tuple[str, str]], words: str
) -> None:
    found = EntryPoints(EntryPoint(name, value, "kvparams.things") for name, value in points)

    def registered(group: str, name: str = "x") -> EntryPoints:
        return found.select(group=group, name=name)

    monkeypatch.setattr("kvparams.plugins.entry_points", registered)
    with pytest.raises(PluginError, match=words):
        plugins.load_plugin("things", "x")
    with pytest.raises(PluginError, match=words):
        plugins.load_all_plugins("things")
    assert isinstance(plugins.load_each_plugin("things")["x"], PluginError)


def test_a_name_that_is_nearly_right_is_answered_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"did you mean valkey\? known: file"):
        plugins.load_plugin("stores", "Valky")


def test_one_name_is_loaded_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module_anywhere:X", "kvparams.things")
    good = EntryPoint("good", "kvparams.instances:RoundRobin", "kvparams.things")

    def registered(group: str) -> EntryPoints:
        return EntryPoints([broken, good]).select(group=group)

    monkeypatch.setattr("kvparams.plugins.entry_points", registered)
    assert plugins.load_each_plugin("things", "good") == {"good": RoundRobin}
    assert plugins.load_each_plugin("things", "no-such") == {}
    assert isinstance(plugins.load_each_plugin("things")["broken"], PluginError)


def test_all_of_a_kind_are_what_each_is_by_its_name() -> None:
    found = plugins.load_all_plugins("dialects")
    assert list(found) == plugins.plugin_names("dialects")
    assert all(one is plugins.load_plugin("dialects", name) for name, one in found.items())


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "proxy" in capsys.readouterr().out


def test_a_wrong_setting_stops_the_start_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--prefill", "10.0.0.1:8000"]) == 2
    assert "http://host:port" in capsys.readouterr().err
    assert main(["proxy"]) == 2
    assert "--prefill URL" in capsys.readouterr().err
    assert main(["proxy", "--prefill", "http://h:1", "--connector", "no-such"]) == 2
    assert "nixl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--probe", "0"], "--probe"), (["--port", "99999"], "--port"), (["--decode-timeout", "nan"], "--decode-timeout")],
)
def test_a_wrong_number_is_refused_by_the_name_of_its_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["proxy", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["proxy", "--prefill", "http://h:1", "--decode", "http://h:2", "--port", port]) == 1
    said = capsys.readouterr()
    assert "choose --host or --port" in said.err
    assert not said.out


def test_a_command_whose_extra_is_missing_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(kind: str, only: str | None = None) -> dict[str, object]:
        return {"proxy": PluginError("proxy cannot be imported: pip install 'kvparams[proxy]'")}

    monkeypatch.setattr("kvparams.plugins.load_each_plugin", missing)
    assert main(["proxy", "--help"]) == 2
    assert "pip install 'kvparams[proxy]'" in capsys.readouterr().err
