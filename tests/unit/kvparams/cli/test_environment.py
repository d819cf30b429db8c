"""Tests the environment variables of options: their names, their values, and what is said about wrong ones."""

import argparse
from pathlib import Path

import pytest

from kvparams.cli import main, make_parser
from kvparams.cli.command_parser import CommandParser
from kvparams.cli.environment import describe_unknown_variables, option_variables, variable_name


@pytest.fixture
def parser() -> CommandParser:
    parser = CommandParser(prog="tool")
    parser.add_argument("--port", type=int, default=1)
    parser.add_argument("--log-requests", default="-")
    parser.add_argument("--prefill", action="append", default=[])
    parser.add_argument("--expose-route", action="store_const", const=True)
    parser.add_argument("--role", choices=["prefill", "decode"], required=True)
    return parser


def test_a_variable_sets_its_option(parser: CommandParser, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PORT": "7", "LOG_REQUESTS": "off", "PREFILL": " a=http://h:1\n http://h:2 ", "EXPOSE_ROUTE": "true"}
    for name, value in (given | {"ROLE": "decode"}).items():
        monkeypatch.setenv(f"KVPARAMS_{name}", value)
    found = parser.parse_args([])
    assert (found.port, found.log_requests, found.expose_route, found.role) == (7, "off", True, "decode")
    assert found.prefill == ["a=http://h:1", "http://h:2"]
    assert found.option_sources == {
        "port": "KVPARAMS_PORT",
        "log_requests": "KVPARAMS_LOG_REQUESTS",
        "prefill": "KVPARAMS_PREFILL",
        "expose_route": "KVPARAMS_EXPOSE_ROUTE",
        "role": "KVPARAMS_ROLE",
    }


def test_a_flag_goes_before_its_variable_and_the_conflict_is_said(
    parser: CommandParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPARAMS_PORT", "7")
    monkeypatch.setenv("KVPARAMS_PREFILL", "a b")
    monkeypatch.setenv("KVPARAMS_EXPOSE_ROUTE", "true")
    found = parser.parse_args(["--role", "decode", "--port", "8", "--prefill", "c", "--expose-route"])
    assert (found.port, found.prefill) == (8, ["c"]), "a list of a flag replaces that of the variable"
    assert found.option_sources["port"] == "--port"
    assert capsys.readouterr().err.splitlines() == [
        "tool: KVPARAMS_PORT has no effect, because --port is given",
        "tool: KVPARAMS_PREFILL has no effect, because --prefill is given",
    ], "a variable with the value of the flag is no conflict"


def test_a_variable_that_is_overridden_need_not_be_right(
    parser: CommandParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("EXPOSE_ROUTE", "yes"), ("PORT", "tcp://10.0.0.1:80"), ("ROLE", ""), ("LOG_REQUESTS", " ")):
        monkeypatch.setenv(f"KVPARAMS_{name}", value)
    found = parser.parse_args(["--role", "decode", "--port", "8", "--expose-route", "--log-requests", "off"])
    assert (found.port, found.expose_route) == (8, True)
    assert capsys.readouterr().err == "tool: KVPARAMS_EXPOSE_ROUTE has no effect, because --expose-route is given\n"


def test_a_switch_may_be_off_and_an_empty_variable_is_not_set(
    parser: CommandParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPARAMS_EXPOSE_ROUTE", "False")
    monkeypatch.setenv("KVPARAMS_PORT", "")
    found = parser.parse_args(["--role=prefill"])
    assert (found.expose_route, found.port) == (False, 1)
    assert found.option_sources == {"expose_route": "KVPARAMS_EXPOSE_ROUTE", "role": "--role"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVPARAMS_EXPOSE_ROUTE", "yes", "tool: KVPARAMS_EXPOSE_ROUTE: must be true or false; see tool --help\n"),
        ("KVPARAMS_PORT", "x", "tool: KVPARAMS_PORT: invalid int value: 'x'; see tool --help\n"),
        ("KVPARAMS_ROLE", "prefil", "tool: KVPARAMS_ROLE: must be one of prefill, decode; did you mean prefill? "),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(
    parser: CommandParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_variable_that_sets_nothing_is_said() -> None:
    own, others = ["KVPARAMS_PORT", "KVPARAMS_QUEUE"], ["KVPARAMS_PROMPT"]
    found = {
        "KVPARAMS_PROT": "1",
        "KVPARAMS_CHECK": "1",
        "KVPARAMS_PROMPT": "of another command",
        "KVPARAMS_NATIVE": "off",
        "KVPARAMS_PROXY_PORT": "8100",
        "OTHER": "",
        "KVPARAMS_WHATEVER": "",
        "KVPARAMS_QUEUE": "5",
    }
    assert list(describe_unknown_variables(own, others, found)) == [
        "KVPARAMS_CHECK has no effect: --check is an action; give it on the command line",
        "KVPARAMS_PROT sets no option and has no effect; did you mean KVPARAMS_PORT?",
        "KVPARAMS_PROXY_PORT sets no option and has no effect; did you mean KVPARAMS_PROMPT?",
        "KVPARAMS_WHATEVER sets no option and has no effect",
    ]


def test_the_variables_of_a_kubernetes_service_are_no_settings(
    parser: CommandParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets them in every pod, for a service with the name kvparams."""
    service = {
        "KVPARAMS_SERVICE_HOST": "10.0.0.1",
        "KVPARAMS_SERVICE_PORT": "80",
        "KVPARAMS_SERVICE_PORT_HTTP": "80",
        "KVPARAMS_PORT": "tcp://10.0.0.1:80",
        "KVPARAMS_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVPARAMS_PORT_80_TCP_PROTO": "tcp",
        "KVPARAMS_PORT_80_TCP_PORT": "80",
        "KVPARAMS_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVPARAMS_PROXY_SERVICE_HOST": "10.0.0.1",
        "KVPARAMS_PROXY_PORT": "tcp://10.0.0.1:80",
    }
    for name, value in service.items():
        monkeypatch.setenv(name, value)
    assert parser.parse_args(["--role", "decode"]).port == 1
    assert list(describe_unknown_variables(["KVPARAMS_PORT"], (), service)) == [
        "KVPARAMS_PORT is ignored: its value is an address that Kubernetes sets for a service"
    ]


def test_every_option_of_commands_that_serve_has_a_variable_of_its_own_name() -> None:
    parser, _ = make_parser(None)
    found = option_variables(parser._actions)  # pyright: ignore[reportPrivateUsage]
    assert {"KVPARAMS_PREFILL", "KVPARAMS_QUEUE_WAIT", "KVPARAMS_ENGINE", "KVPARAMS_GRPC_PORT"} <= found.keys()
    assert not {"KVPARAMS_HELP", "KVPARAMS_VERSION", "KVPARAMS_CHECK"} & found.keys()
    assert not {"KVPARAMS_SIZES", "KVPARAMS_TENANT", "KVPARAMS_PROMPT"} & found.keys(), "those of other commands"
    for name, action in found.items():
        assert name in {variable_name(option) for option in action.option_strings}
        assert action.nargs in (None, 0), f"{name}: a value is one text, or several separated by spaces"
        assert action.nargs != 0 or action.const is True or isinstance(action, argparse._StoreTrueAction)  # pyright: ignore[reportPrivateUsage]


def test_the_command_reads_them_and_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PORT", "x"), ("PREFILL", "http://a:1 b"), ("PROT", "8100"), ("ENGINE", "of a sidecar")):
        monkeypatch.setenv(f"KVPARAMS_{name}", value)
    assert main(["proxy", "--decode", "c"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "kvparams: KVPARAMS_PROT sets no option and has no effect; did you mean KVPARAMS_PORT?",
        "kvparams proxy: KVPARAMS_PORT: must be a port from 0 to 65535",
        "kvparams proxy: KVPARAMS_PREFILL number 2: [NAME=]URL must be http://host:port or https://host:port",
        "kvparams proxy: --decode number 1: [NAME=]URL must be http://host:port or https://host:port",
    ]


def test_commands_that_do_not_serve_read_no_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ENGINE", "DIALECT", "TENANT", "PROMPT", "ROLE"):
        monkeypatch.setenv(f"KVPARAMS_{name}", "x")
    (tmp_path / "document").write_text("{}")
    (tmp_path / "token").write_text("t")
    main(["validate", str(tmp_path / "document")])
    assert "must be one of" not in capsys.readouterr().err
    assert main(["explain-route", "http://127.0.0.1:1", "--admin-token-file", str(tmp_path / "token")]) == 2
    said = capsys.readouterr().err
    assert "give --request FILE or --prompt TEXT" in said
    assert "KVPARAMS_PROMPT sets no option and has no effect" in said
    assert "KVPARAMS_ENGINE" not in said, "it is one of the sidecar"
    with pytest.raises(SystemExit):
        main(["keys", "create", str(tmp_path / "keys")])
    assert "--tenant" in capsys.readouterr().err
