"""Tests `--print-config`: every setting with its source, as a fleet file, without secrets."""

import re
from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams_proxy.config.fleet_document import FleetDocument, parse_fleet_document
from kvparams_proxy.config.options import OPTIONS
from kvparams_proxy.config.settings import default_spec_rules

SECRET = "hunter2-do-not-show"


def printed(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[FleetDocument, dict[str, str], str]:
    """Returns what was printed as a fleet file, the source of each option, and the text."""
    assert main([*argv, "--print-config"]) == 0
    text = capsys.readouterr().out
    found = re.findall(r"^(?:  |#   --)(?:# )?([a-z][a-z-]*)(?::| ).*  # (.*)$", text, re.MULTILINE)
    return parse_fleet_document(text, default_spec_rules()), dict(found), text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "proxy: {port: 8300, grace: 5, queue: 7}\n"
        "modes: [{use: aggregated, when: {max_tokens: 64}, priority: 1}, {use: prefill_then_decode}]\n"
        'instances: [{id: p9, url: "http://10.0.0.1:8000", role: prefill, group: a, labels: {zone: "1"}}]\n'
    )
    return path


def test_every_setting_has_its_value_and_its_source(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPARAMS_QUEUE", "9")
    monkeypatch.setenv("KVPARAMS_DECODE", "x=http://d:1")
    document, sources, text = printed("proxy", "--config", str(file), "--grace", "7", "--expose-route", capsys=capsys)
    options = document.settings
    assert (options.port, options.grace, options.queue, options.expose_route) == (8300, 7.0, 9, True)
    assert {name: sources[name] for name in ("port", "grace", "queue", "expose-route", "retries", "connector")} == {
        "port": str(file),
        "grace": "--grace",
        "queue": "KVPARAMS_QUEUE",
        "expose-route": "--expose-route",
        "retries": "default",
        "connector": "default",
    }
    assert sources.keys() >= {option.name for option in OPTIONS}, "each setting is there, also without a value"
    assert [(entry.id, entry.url, entry.group, dict(entry.labels)) for entry in document.entries] == [
        ("x", "http://d:1", None, {}),
        ("p9", "http://10.0.0.1:8000", "a", {"zone": "1"}),
    ]
    assert [mode.use for mode in document.modes] == ["aggregated", "prefill_then_decode"]
    assert re.search(r'\{id: "x".*# KVPARAMS_DECODE$', text, re.MULTILINE)
    assert re.search(rf'\{{id: "p9".*# {re.escape(str(file))}$', text, re.MULTILINE)


def test_what_is_printed_gives_the_same_settings(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("proxy", "--config", str(file), "--decode", "http://d:1", "--tokenizer", "a=bytes,engine", "--trace", "0.5")
    first, _, text = printed(*argv, capsys=capsys)
    (tmp_path / "again.yaml").write_text(text)
    second, _, _ = printed("proxy", "--config", str(tmp_path / "again.yaml"), capsys=capsys)
    assert second == first


def test_the_effective_policy_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    engines = ("proxy", "--prefill", "http://p:1", "--decode", "http://d:1")
    assert printed(*engines, capsys=capsys)[0].settings.policy == "round_robin"
    document, sources, _ = printed(*engines, "--tokenizer", "bytes", "--mode", "conditional", capsys=capsys)
    assert (document.settings.policy, sources["policy"]) == ("cache_aware", "default")
    assert document.settings.mode is not None
    assert (document.settings.mode.use, document.modes) == ("conditional", ())


def test_no_secret_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token, keys = tmp_path / "token", tmp_path / "keys.json"
    token.write_text(f"{SECRET}\n")
    token.chmod(0o600)
    assert main(["signing-keys", "create", str(keys)]) == 0
    capsys.readouterr()
    monkeypatch.setenv("KVPARAMS_SHARE", f"valkey://user:{SECRET}@h:1?prefix=a")
    argv = ("proxy", "--prefill", "http://p:1", "--decode", "http://d:1", "--engine-key-file", str(token))
    _, sources, text = printed(*argv, "--admin-token-file", str(token), "--share-keys", str(keys), capsys=capsys)
    assert SECRET not in text
    assert 'share: "valkey://h:1?prefix=a"' in text
    assert f'admin-token-file: "{token}"' in text
    assert f"--engine-key-file {token}" in text
    assert sources["share"] == "KVPARAMS_SHARE"


def test_the_sidecar_prints_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("sidecar", "--engine", "http://e:1", "--role", "decode", "--prefill", "a=http://p:1", "--retries", "0")
    document, sources, text = printed(*argv, capsys=capsys)
    assert {entry.id: entry.role for entry in document.entries} == {"decode-0": "decode", "a": "prefill"}
    assert (sources["retries"], sources["role"]) == ("--retries", "--role")
    assert "workers" not in sources
    assert re.search(r'\{id: "decode-0".*# --engine$', text, re.MULTILINE)
    assert [mode.use for mode in document.modes] == ["decode_local_prefill_remote"]


def test_what_the_operator_should_know_is_said_as_at_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--prefill", "http://h:1", "--decode", "http://h:1", "--print-config"]) == 0
    assert "prefill-0 and decode-0 have the same URL" in capsys.readouterr().err


def test_a_wrong_configuration_is_refused_as_at_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--prefill", "x", "--print-config"]) == 2
    said = capsys.readouterr()
    assert (said.out, "--prefill number 1" in said.err) == ("", True)


def test_other_commands_print_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("grpc")
    argv = ("picker", "--prefill", "http://p:1", "--decode", "http://d:1", "--partner-header", "llm-d")
    document, sources, _ = printed(*argv, "--fallbacks", "1", capsys=capsys)
    assert {entry.id for entry in document.entries} == {"prefill-0", "decode-0"}
    assert (sources["fallbacks"], sources["partner-header"]) == ("--fallbacks", "--partner-header")
    assert "workers" not in sources


def test_a_sidecar_with_a_broker_prints_instead_of_connecting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aio_pika")
    url = tmp_path / "broker"
    url.write_text(f"amqp://user:{SECRET}@127.0.0.1:1/\n")
    url.chmod(0o600)
    argv = ("sidecar", "--engine", "http://e:1", "--role", "prefill", "--connector", "store", "--broker", str(url))
    _, sources, text = printed(*argv, capsys=capsys)
    assert SECRET not in text
    assert (sources["broker"], sources["connector"]) == ("--broker", "--connector")
