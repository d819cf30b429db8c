"""Tests `kvparams proxy`: its options, its refusals, and the command itself."""

import argparse
import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest
import trustme

from kvparams.cli import main
from kvparams.instances import Role
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams_proxy.cli.configuration import Configuration, build_configuration
from kvparams_proxy.cli.proxy_command import COMMAND
from kvparams_proxy.cli.worker_limits import share_limits
from kvparams_proxy.config.options import OPTIONS
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.server.http_server import ServerSettings
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[4] / "examples" / "fleet.yaml"
ENGINES = ("--prefill", "http://p:1", "--decode", "http://d:1")


def asked(*argv: str) -> Configuration:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    COMMAND.add_arguments(parser)
    return build_configuration(parser.parse_args(argv))


def problems(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        asked(*argv)
    return "\n".join(caught.value.problems)


def fleet(one: Configuration) -> dict[str, tuple[str, str]]:
    return {entry.id: (entry.role, entry.url) for entry in one.entries}


def test_the_shortest_command_line_has_the_defaults_of_the_settings() -> None:
    one = asked(*ENGINES)
    assert (one.host, one.port, one.notes) == ("127.0.0.1", 8100, ())
    assert one.server == ServerSettings(connections=one.server.connections)
    assert fleet(one) == {"prefill-0": ("prefill", "http://p:1"), "decode-0": ("decode", "http://d:1")}
    assert [instance.dialect for instance in one.settings.instances] == ["nixl", "nixl"]
    plain = Settings(one.settings.instances, spec_rules=one.settings.spec_rules, startup_check=True)
    given = {name: getattr(one.settings, name) for name in Settings.__slots__}
    given["limits"] = {role: limits for role, limits in given["limits"].items() if limits != RoleLimits()}
    assert given == {name: getattr(plain, name) for name in Settings.__slots__}


@pytest.mark.parametrize("given", ["0", "65", "x", "-1", "1.5", "", "AUTO"])
def test_a_wrong_number_of_workers_is_refused_in_words(given: str) -> None:
    assert problems(*ENGINES, f"--workers={given}") == "--workers: must be auto or a whole number from 1 to 64"


def test_workers_are_as_many_as_asked_for() -> None:
    assert asked(*ENGINES).workers == 1
    assert asked(*ENGINES, "--workers", "64").workers == 64
    assert asked(*ENGINES, "--workers", "auto").workers == min(64, len(os.sched_getaffinity(0)))


def test_workers_share_what_the_proxy_may_hold(tmp_path: Path) -> None:
    one = asked(
        *ENGINES, "--max-connections", "10", "--max-connections-per-address", "8", "--max-body-memory", "99999999"
    )
    mine = share_limits(one, 4)
    assert (mine.server.connections.total, mine.server.connections.per_address) == (3, 8)
    assert mine.settings.body_memory_bytes == 25_000_000
    assert share_limits(one, 64).settings.body_memory_bytes == one.settings.body.max_bytes, "one body always fits"
    free = asked(*ENGINES)
    assert share_limits(free, 4).server == free.server, "what one process may open is no limit of all together"


def test_a_prefill_engine_that_is_the_decode_engine_too_is_noted(tmp_path: Path) -> None:
    (note,) = asked("--prefill", "http://h:1", "--decode", "http://h:1/", "--decode", "http://h:2").notes
    assert note.startswith("WARNING: prefill-0 and decode-0 have the same URL http://h:1; ")
    assert asked("--aggregated", "http://h:1", "--decode", "http://h:2", "--prefill", "http://h:3").notes == ()
    for other in ("HTTP://H:80", "http://h:80", "http://h"):
        (note,) = asked("--prefill", "http://h", "--decode", other).notes
        assert "have the same URL" in note, other
    assert asked("--prefill", "http://h", "--decode", "https://h").notes == ()


def test_an_engine_that_is_given_twice_is_noted() -> None:
    (note,) = asked("--prefill", "http://h:1", "--prefill", "http://H:1", "--decode", "http://h:2").notes
    assert note == "WARNING: prefill-0 and prefill-1 are the same prefill engine http://H:1; remove one"


@pytest.mark.parametrize(
    "text", ["root:$y$SECRET:1:0:::\n", "SECRET: 1\n", "SECRET: 1\nSECRET: 2\n", "s" * 33 + ": 1\n"]
)
def test_a_file_that_is_no_fleet_file_is_not_repeated(text: str, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text(text)
    said = problems("--config", str(tmp_path / "shadow"))
    assert ("SECRET" in said, "sss" in said) == (False, False)
    assert "a key" in said
    (tmp_path / "shadow").write_text("instance: []")
    assert "instance is not known here" in problems("--config", str(tmp_path / "shadow")).replace(
        "instance:", "instance"
    )


def test_engines_may_have_names() -> None:
    one = asked("--prefill", "left=http://p:1/", "--prefill", "http://p:2", "--decode", "right=https://[::1]:8000")
    assert fleet(one) == {
        "left": ("prefill", "http://p:1"),
        "prefill-1": ("prefill", "http://p:2"),
        "right": ("decode", "https://[::1]:8000"),
    }
    assert one.settings.spec_rules.credentials.tls is not None, "made once, not at the first request"


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("proxy: {port: x}\ninstances: [{id: a}]\n")
    (tmp_path / "keys").write_text("not a key\n")
    (tmp_path / "empty").write_text("\n")
    said = problems(
        *("--prefill", "http://user:hunter2@h:1", "--decode", "a b=http://h:1", "--decode", "h:1"),
        *(
            "--tls-key",
            "k",
            "--prefill-labels",
            "x",
            "--decode-labels",
            "a b=c",
            "--host",
            "",
            "--prefill-requests",
            "0",
        ),
        *("--connector", "x", "--policy", "x", "--port", "70000", "--probe", "0", "--queue", "-1", "--retries", "1.5"),
        *("--max-body-bytes", "many"),
    )
    for place in (
        *("--prefill number 1: [NAME=]URL must be http", "--decode number 1", "--decode number 2"),
        *(
            "--connector: must be one of content, legacy, mooncake, nixl",
            "--policy: must be one of cache_aware",
            "--port: must be a port",
        ),
        *(
            "--probe: must be a number of seconds, more than 0",
            "--queue: must be a whole number, at least 0",
            "--retries: must be",
        ),
        *("--max-body-bytes: must be", "--host: must be text", "--prefill-labels: must be LABEL=VALUE"),
        *("--decode-labels: must be LABEL=VALUE", "--tls-certificate, --tls-key: https needs both"),
        "--prefill-requests: must be a whole number, at least 1",
    ):
        assert place in said, place
    assert "hunter2" not in said
    said = problems(
        *("--config", str(tmp_path / "fleet.yaml"), "--client-keys", str(tmp_path / "keys")),
        *("--admin-token-file", str(tmp_path / "empty"), "--engine-key-file", str(tmp_path / "none")),
        *("--engine-ca", str(tmp_path / "empty")),
    )
    for place in (
        *("proxy.port: must be a port", "instances[0].url: is missing", "--client-keys: ", "admin API's token: "),
        "--engine-key-file, --engine-ca: ",
    ):
        assert place in said, place


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "no engine is given; add --prefill URL and --decode URL"),
        (("--prefill", "a=http://h:1", "--decode", "a=http://h:2"), "two instances are called 'a'"),
        ((*ENGINES, "--config", "/nowhere/fleet.yaml"), "/nowhere/fleet.yaml cannot be read: No such file"),
        ((*ENGINES, "--admin-token-file", "/nowhere/token"), "/nowhere/token cannot be read"),
        ((*ENGINES, "--tls-certificate", "/nowhere", "--tls-key", "/nowhere"), "/nowhere: No such file"),
        ((*ENGINES, "--port", "http"), "--port: must be a port from 0 to 65535"),
    ],
)
def test_what_cannot_be_started_is_refused_in_words(argv: tuple[str, ...], said: str) -> None:
    assert said in problems(*argv)


def test_the_command_prints_each_problem_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--prefill", "x", "--decode", "y"]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2
    assert all(line.startswith("kvparams proxy: --") for line in printed)


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    (tmp_path / "token").write_text("admin-token")
    path.write_text(
        "proxy: {port: 1, queue-wait: 7, expose-route: true, queue-per-tenant: 5, admin-token-file: token}\n"
    )
    one = asked("--config", str(path), "--port", "2", "--decode-requests", "3")
    assert one.port == 2
    assert one.settings.queue == QueueLimits(per_tenant=5, wait_s=7.0)
    assert one.settings.limits[Role.DECODE] == RoleLimits(3)
    assert one.settings.limits[Role.PREFILL] == RoleLimits()
    assert one.settings.expose_route
    assert one.settings.prefill_timeout_s == 300.0
    assert one.settings.admin_token is not None, "its path begins where the file is"
    assert one.settings.admin_token.matches(b"admin-token")
    assert "admin-token" not in repr(one)


def test_the_example_file_starts() -> None:
    one = asked("--config", str(EXAMPLE))
    assert set(fleet(one)) == {"p0", "p1", "d0", "d1"}
    assert one.settings.queue.wait_s == 30.0
    assert one.settings.limits == {
        Role.PREFILL: RoleLimits(64),
        Role.DECODE: RoleLimits(256),
        Role.AGGREGATED: RoleLimits(),
    }


def test_roles_are_found_by_the_labels_in_flags(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "instances:\n- {id: a, url: 'http://h:1', labels: {app: x, zone: '2'}}\n"
        "- {id: b, url: 'http://h:2', labels: {app: y}}\n"
    )
    one = asked("--config", str(path), "--prefill-labels", "app=x,zone=1,zone=2", "--decode-labels", "app=y")
    assert fleet(one) == {"a": ("prefill", "http://h:1"), "b": ("decode", "http://h:2")}


def test_the_engines_key_is_for_those_that_name_none(tmp_path: Path) -> None:
    (tmp_path / "all").write_text("sk-all")
    (tmp_path / "own").write_text("sk-own")
    path = tmp_path / "fleet.yaml"
    text = (
        "instances:\n- {id: a, url: 'http://h:1', role: prefill, key_file: own}\n- {id: b, url: 'http://h:2', role: %s}"
    )
    path.write_text(text % "decode")
    one = asked("--config", str(path), "--engine-key-file", str(tmp_path / "all"), *ENGINES)
    keys = {entry.id: entry.credentials.key for entry in one.entries}
    found = {id: None if key is None else key.reveal() for id, key in keys.items()}
    assert found == {"prefill-0": None, "decode-0": None, "a": "sk-own", "b": "sk-all"}
    assert one.settings.spec_rules.credentials.key is not None, "those of flags are given it where they join"
    assert "sk-" not in repr(one)


def test_certificates_are_checked_at_the_start(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = ("--tls-certificate", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    assert asked(*ENGINES, *files, "--tls-client-ca", str(tmp_path / "ca.pem")).server.tls is not None
    assert asked(*ENGINES, "--engine-ca", str(tmp_path / "ca.pem")).settings.spec_rules.credentials.tls is not None
    other = trustme.CA().issue_cert("localhost").private_key_pem
    other.write_to_path(tmp_path / "key.pem")
    assert "does not belong to the certificate" in problems(*ENGINES, *files)


STATIC = (
    *("--service-discovery", "static"),
    *("--static-backends", "http://localhost:8100,http://localhost:8200"),
    *("--static-models", "meta-llama/Llama-3.1-8B-Instruct,meta-llama/Llama-3.1-8B-Instruct"),
    *("--static-model-labels", "llama-prefill,llama-decode"),
    *("--prefill-model-labels", "llama-prefill"),
    *("--decode-model-labels", "llama-decode"),
)
"""As in production-stack's tutorials."""


def test_a_command_line_of_production_stack_works_unchanged() -> None:
    one = asked(
        *("--port", "8005", *STATIC, "--static-model-types", "chat,chat", "--log-stats", "--log-stats-interval", "10"),
        *("--engine-stats-interval", "10", "--request-stats-window", "10"),
        *("--routing-logic", "disaggregated_prefill"),
    )
    assert (one.host, one.port) == ("0.0.0.0", 8005)
    assert fleet(one) == {
        "static-0": ("prefill", "http://localhost:8100"),
        "static-1": ("decode", "http://localhost:8200"),
    }
    assert [dict(instance.labels) for instance in one.settings.instances] == [
        {"model": "llama-prefill"},
        {"model": "llama-decode"},
    ]
    assert any("--log-stats is ignored" in note for note in one.notes)
    assert any("KV connector must be the one in --connector" in note for note in one.notes)
    orchestrated = asked(*STATIC, "--routing-logic", "disaggregated_prefill_orchestrated", "--host", "127.0.0.1")
    assert (orchestrated.host, orchestrated.port, orchestrated.notes) == ("127.0.0.1", 8001, ())


def test_production_stacks_labels_are_selectors_like_ours(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("instances:\n- {id: a, url: 'http://h:1', labels: {model: p2}}\n")
    one = asked("--config", str(path), "--prefill-model-labels", "p1,p2", "--decode-model-labels", "d")
    assert fleet(one) == {"a": ("prefill", "http://h:1")}
    assert (one.host, one.port) == ("127.0.0.1", 8100), "our command line, our address"


def test_a_backend_that_is_neither_is_left_out_and_said() -> None:
    argv = [word.replace("llama-prefill,llama-decode", "llama-prefill,embedding") for word in STATIC]
    one = asked(*argv)
    assert set(fleet(one)) == {"static-0"}
    assert any("'embedding' is neither prefill nor decode" in note for note in one.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--service-discovery", "consul"), "--service-discovery: must be static or k8s"),
        (("--k8s-port", "80"), "--k8s-port: is used with --service-discovery k8s"),
        (("--service-discovery", "k8s"), "--k8s-label-selector, --k8s-port: needs selector="),
        (("--routing-logic", "session"), "--routing-logic: must be disaggregated_prefill or"),
        (("--static-model-labels", "one"), "--static-model-labels: has 1 values for 2"),
        (("--static-models", "a,b,c"), "--static-models: has 3 values for 2"),
        (("--static-backends", "http://h:1,,http://h:2"), "--static-backends: has an empty value"),
        (("--static-backends", "http://h:1/llama,http://h:2"), "--static-backends.url: must be http"),
        (("--decode-model-labels", "llama-prefill"), "match several roles: prefill and decode"),
    ],
)
def test_what_production_stack_can_and_we_cannot_is_refused(changes: tuple[str, ...], said: str) -> None:
    assert said in problems(*STATIC, *changes)


def test_backends_without_labels_have_no_roles() -> None:
    assert "--static-model-labels: is missing" in problems("--static-backends", "http://h:1")


def test_help_teaches_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["proxy", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS:
        assert f"--{option.name}" in text
        assert option.help.split()[0] in text
    for word in ("fleet.yaml", "/admin", "/health", "--static-backends", "curl"):
        assert word in text
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode()


@pytest.mark.slow
async def test_the_command_serves_and_follows_its_file(stub: StubEngines, tmp_path: Path) -> None:
    urls = {role: [engine.url for engine in stub.engines if engine.role == role] for role in Role}
    (tmp_path / "token").write_text("admin-token\n")
    path = tmp_path / "fleet.yaml"
    text = "proxy: {port: 0, admin-token-file: token, expose-route: true}\ninstances:\n" + "".join(
        f"- {{id: {role}, url: '{found[0]}', role: {role}}}\n" for role, found in urls.items() if found
    )
    path.write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvparams", "proxy", "--config", str(path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        line = await first_line(process)
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        headers = {"authorization": "Bearer admin-token"}
        async with httpx.AsyncClient(base_url=found[0], timeout=10) as client:
            body = {"model": "stub", "prompt": "x", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).headers["x-kvparams-decode"] == "decode"
            new = path.with_suffix(".new")
            new.write_text(text.replace("{id: decode", "{id: other"))
            new.replace(path)

            async def is_ready() -> bool:
                other = await client.get("/admin/instances/other", headers=headers)
                return [other.status_code, (await client.get("/health")).status_code] == [200, 200]

            await until(is_ready, pause_s=0.02)
            assert (await client.post("/v1/completions", json=body)).headers["x-kvparams-decode"] == "other"
        process.terminate()
        async with asyncio.timeout(15):
            assert await process.wait() == -signal.SIGTERM, "it ended because it was told to, after closing down"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("mode", "said"), [(0o644, True), (0o600, False)])
def test_a_token_that_others_can_read_is_named(tmp_path: Path, mode: int, said: bool) -> None:
    token = tmp_path / "token"
    token.write_text("a-token")
    token.chmod(mode)
    notes = asked(*ENGINES, "--admin-token-file", str(token)).notes
    assert notes == ((f"other users can read {token}; run: chmod 600 {token}",) if said else ())
