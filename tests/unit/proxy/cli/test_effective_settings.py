"""Tests `--print-config`: every setting with its source, as a fleet file, without secrets."""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams_proxy.cli.configuration import Configuration
from kvparams_proxy.cli.effective_settings import describe_effective_settings
from kvparams_proxy.config.fleet_document import FleetDocument, parse_fleet_document
from kvparams_proxy.config.options import OPTIONS
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.server.http_server import ServerSettings

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
    assert '# policy: "round_robin"' in printed(*engines, capsys=capsys)[2]
    document, sources, text = printed(*engines, "--tokenizer", "bytes", "--mode", "conditional", capsys=capsys)
    assert ('# policy: "cache_aware"' in text, sources["policy"]) == (True, "default")
    assert document.settings.policy is None, "or another start could not choose"
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
    assert f'key_file: "{token}"' in text
    assert sources["share"] == "KVPARAMS_SHARE; user and password are left out"


def test_the_sidecar_prints_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("sidecar", "--engine", "http://e:1", "--role", "decode", "--prefill", "a=http://p:1", "--retries", "0")
    document, sources, text = printed(*argv, capsys=capsys)
    assert {entry.id: entry.role for entry in document.entries} == {"a": "prefill"}
    assert (sources["retries"], sources["role"]) == ("--retries", "--role")
    assert "workers" not in sources
    assert re.search(r"^#   --engine http://e:1 +# --engine$", text, re.MULTILINE)
    assert re.search(r"^#   --prefill-partner off +# default$", text, re.MULTILINE)
    assert re.search(r"^#   --pool kvparams +# default$", text, re.MULTILINE)
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


@pytest.mark.parametrize("has_key", [True, False])
def test_a_picker_says_that_keys_of_engines_are_sent_in_the_clear(
    has_key: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc")
    key, fleet = tmp_path / "key", tmp_path / "fleet.yaml"
    key.write_text(SECRET)
    key.chmod(0o600)
    named = f", key_file: {key}" if has_key else ""
    fleet.write_text(f"instances:\n  - {{id: a, role: aggregated, url: 'http://h:1'{named}}}\n")
    argv = ["picker", "--mode", "aggregated", "--config", str(fleet), "--print-config"]
    assert main(argv) == 0
    assert ("over gRPC without TLS" in capsys.readouterr().err) is has_key
    pair = ["--grpc-certificate", str(key), "--grpc-key", str(key)]
    assert main([*argv, *pair]) == 0
    assert "over gRPC without TLS" not in capsys.readouterr().err


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


TLS = "tls: {ca: ca.pem, certificate: cert.pem, key: key.pem, server_name: engines}"


def parsed(text: str) -> FleetDocument:
    return parse_fleet_document(text, default_spec_rules())


def test_nothing_that_a_fleet_file_says_is_lost(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "proxy: {client-timeout: 0.00001, prefill-timeout: 100000000000000000}\n"
        "roles: {prefill: {app: [a, b]}, decode: {app: [c]}}\n"
        f"defaults: {{connector: content, labels: {{zone: z}}, addresses: [10.0.0.9], key_file: key, {TLS}}}\n"
        "instances:\n"
        '  - {id: p0, url: "https://p:1", labels: {app: a}}\n'
        '  - {id: p1, url: "https://p1:1", labels: {app: a}, addresses: [], key_file: other, tls: {server_name: x}}\n'
        '  - {id: d0, url: "http://d:1", role: decode, connector: nixl}\n'
    )
    written = parse_fleet_document(
        (tmp_path / "fleet.yaml").read_text(), replace(default_spec_rules(), folder=tmp_path)
    )
    arguments = argparse.Namespace(option_sources={}, known_variables=())
    asked = Configuration(
        Settings(()),
        "127.0.0.1",
        1,
        ServerSettings(),
        written.entries,
        (),
        options=written.settings,
        file="fleet.yaml",
        file_options=frozenset(written.settings.model_fields_set),
        rules=written.rules,
    )
    again = parsed(describe_effective_settings("proxy", arguments, asked))
    assert again.entries == written.entries
    assert again.settings == written.settings
    assert again.rules == replace(written.rules, folder=again.rules.folder)


def test_flags_for_engines_become_defaults_and_paths_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "fleet.yaml").write_text('instances: [{id: p9, url: "http://p:2", role: prefill, key_file: key}]')
    argv = ("proxy", "--config", "fleet.yaml", "--prefill", "http://p:1", "--decode", "http://d:1")
    more = ("--engine-key-file", "key", "--engine-address", "10.0.0.9", "--prefill-labels", "app=a,app=b")
    files = ("--admin-token-file", "key", "--log-requests", "requests.log")
    _, _, text = printed(*argv, *more, *files, capsys=capsys)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    document = parse_fleet_document(text, replace(default_spec_rules(), folder=folder))
    assert document.rules.credential_sources.key_file == tmp_path / "key"
    assert {entry.credential_sources.key_file for entry in document.entries} == {tmp_path / "key"}
    assert document.settings.admin_token_file == tmp_path / "key"
    assert document.settings.log_requests == str(tmp_path / "requests.log")
    assert document.rules.addresses == ("10.0.0.9",)
    assert document.rules.selectors == {"prefill": {"app": frozenset({"a", "b"})}}
    assert SECRET not in text
    assert re.search(r"^  # max-connections: [0-9]+ +# default$", text, re.MULTILINE)


def test_text_from_outside_cannot_add_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a\nevil: 1\x1b"
    path.write_text("proxy: {queue: 3}")
    monkeypatch.setenv("KVPARAMS_LOG_STATS_INTERVAL", "x\nevil: 1")
    argv = ("proxy", "--config", str(path), "--prefill", "http://p:1", "--decode", "http://d:1")
    document, _, text = printed(*argv, "--static-models", "x\nevil: 1\x1b[2J", capsys=capsys)
    assert document.settings.queue == 3
    assert not re.search("^evil|\x1b", text, re.MULTILINE)
    assert '--log-stats-interval "x' in text, "or nothing was printed"
    assert '--static-models "x' in text


def test_text_and_numbers_are_read_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("proxy", "--prefill", "http://p:1", "--decode", "http://d:1", "--client-timeout", "0.00001")
    name = '\U0001f600 \xe9 "a" \\'
    document, _, text = printed(*argv, "--request-timeout", "1e17", "--host", name, capsys=capsys)
    assert (document.settings.client_timeout, document.settings.request_timeout) == (1e-05, 1e17)
    assert document.settings.host == name
    assert "\U0001f600" in text


def test_a_sidecar_can_start_with_what_it_has_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("sidecar", "--engine", "http://e:1", "--role", "decode")
    _, _, text = printed(*argv, "--prefill", "http://p:1", capsys=capsys)
    (tmp_path / "again.yaml").write_text(text)
    document, _, again = printed(*argv, "--config", str(tmp_path / "again.yaml"), capsys=capsys)
    assert [entry.id for entry in document.entries] == ["prefill-0"]
    assert again.count("http://e:1") == 1


def test_a_key_that_some_instances_have_not_is_no_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "fleet.yaml").write_text(
        'defaults: {key_file: key}\ninstances: [{id: p9, url: "http://p:2", role: prefill}]'
    )
    argv = ("proxy", "--config", str(tmp_path / "fleet.yaml"), "--decode", "http://d:1")
    document, _, text = printed(*argv, capsys=capsys)
    keys = {entry.id: entry.credential_sources.key_file for entry in document.entries}
    assert keys == {"p9": tmp_path / "key", "decode-0": None}
    assert "left out, because some instances have no key" in text


def test_a_broker_url_with_a_password_is_refused_under_the_name_of_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aio_pika")
    argv = ["sidecar", "--engine", "http://e:1", "--role", "prefill", "--connector", "store"]
    url = f"amqp://user:{SECRET}@h:1/"
    assert main([*argv, "--broker", url]) == 2
    said = capsys.readouterr().err
    assert (said.startswith("kvparams sidecar: --broker: holds a password"), SECRET in said) == (True, False)
    monkeypatch.setenv("KVPARAMS_BROKER", url)
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert (said.startswith("kvparams sidecar: KVPARAMS_BROKER: holds a password"), SECRET in said) == (True, False)


def test_a_number_that_no_fleet_file_may_have_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("proxy", "--prefill", "http://p:1", "--decode", "http://d:1", "--request-timeout", "1e300")
    document, sources, _ = printed(*argv, "--client-timeout", "1e-20", capsys=capsys)
    assert document.settings.request_timeout is None
    assert "left out" in sources["request-timeout"]
    assert "left out" in sources["client-timeout"]
