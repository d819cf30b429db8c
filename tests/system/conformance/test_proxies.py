"""Tests that proxies keep their profiles: ours in every one, and the two reference proxies in `store-proxy`."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams.plugins import plugin_names
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import Processes, free_ports
from tests.system.conformance.mutants.faults import run_profile
from tests.system.conformance.runs import RUNS
from tests.system.conformance.several import command_of
from tests.system.queue.rabbitmq import RabbitMQ

OTHER_MODES = (
    "concurrent_legs",
    "conditional,remote_tokens=1",
    "decode_local_prefill_remote",
    "prefill_local_decode_remote",
    "prefill_then_decode,decode_first=true",
)
"""Modes in which the proxy keeps the profile `store-proxy`, beside those of `RUNS`."""


def failures(profile: str, command: str, folder: Path) -> list[str]:
    """Returns what a proxy does not pass, with what was seen."""
    results = run_profile(profile, command, folder)
    assert len(results) > 8
    assert sum(result.verdict == "pass" for result in results) >= len(results) - 1
    return [f"{result.check.id}: {result.message}" for result in results if result.verdict not in ("pass", "skip")]


@pytest.mark.parametrize("name", RUNS)
def test_our_proxy_keeps_every_profile(name: str, ours: str, tmp_path: Path) -> None:
    profile, options = RUNS[name]
    assert failures(profile, f"{ours} --log-requests - {options}", tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHER_MODES)
def test_our_proxy_keeps_the_profile_in_other_modes(mode: str, ours: str, tmp_path: Path) -> None:
    assert failures("store-proxy", f"{ours} --log-requests - --mode {mode} {RUNS['store'].options}", tmp_path) == []


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store", "store_drop", "nixl", "bootstrap", "content", "aggregated", "signed"])
def test_two_of_our_proxies_that_share_keep_every_profile(
    name: str, ours: str, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Replicas: the kit's requests go to one and the other in turn. Each lane has a pair of its own."""
    profile, options = RUNS[name]
    share = f"--share {valkey.url}?prefix=kit{{site}}- --share-keys {{keys}}"
    proxy = f"{ours} --log-requests - {share} {options}"
    assert failures(profile, command_of(tmp_path, proxy, proxy), tmp_path) == []


@pytest.mark.slow
def test_sidecars_with_a_queue_between_them_keep_the_profile(tmp_path: Path) -> None:
    """The mode `queue_mediated`: clients ask two prefill sidecars in turn, and two decode sidecars take the work."""
    sidecar = f"{Path(sys.executable).with_name('kvparams')} sidecar --connector store --pool kit{{site}}"
    with RabbitMQ(tmp_path / "rabbitmq") as broker:
        url = tmp_path / "broker"
        url.touch(0o600)
        url.write_text(broker.url)
        sidecar += f" --log-requests - --broker {url}"
        prefill = [f"{sidecar} --role prefill --engine {{prefill{number}}} --port {{port}}" for number in range(2)]
        decode = [f"{sidecar} --role decode --engine {{decode{number}}} --port {{aside}}" for number in range(2)]
        found = failures("store-proxy", command_of(tmp_path, *prefill, *decode), tmp_path)
    # Each sidecar has one prefill engine, and tries that one again: 17.22 is about a proxy with another one.
    assert [line for line in found if not line.startswith("17.22/prefill-fails:")] == []


def test_every_mode_is_held_to_a_profile() -> None:
    default = {"prefill_then_decode"}
    named = {word.partition(",")[0] for run in RUNS.values() for word in run.options.split()} | {
        mode.partition(",")[0] for mode in OTHER_MODES
    }
    assert {*plugin_names("managers")} - named - default == {"queue_mediated"}  # the test above


def test_a_proxy_that_runs_already_is_tested_at_its_url(
    ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kit starts the engines at the ports that the proxy was given, and says that it cannot read the log."""
    port, *engines = free_ports(5)
    urls = dict(zip(("prefill0", "prefill1", "decode0", "decode1"), engines, strict=True))
    command = f"{ours} --probe 0.5 {RUNS['store'].options}".replace("{port}", str(port))
    for name, engine_port in urls.items():
        command = command.replace(f"{{{name}}}", f"http://127.0.0.1:{engine_port}")
    words = ["conformance", "proxy", "--url", f"http://127.0.0.1:{port}", "--engine-ports", ",".join(map(str, engines))]
    with Processes(tmp_path) as processes:
        processes.start("proxy", shlex.split(command), ready=[f"http://127.0.0.1:{port}/metrics"])
        status = main([*words, "--only", "2.1", "--only", "3.7", "--only", "12.5", "--verbose"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "3 pass, 1 skip" in said
    assert "only where it has started the proxy" in said


def test_the_reference_proxy_in_javascript_keeps_the_profile(node_proxy: str, tmp_path: Path) -> None:
    assert failures("store-proxy", node_proxy, tmp_path) == []


@pytest.mark.slow
def test_the_reference_proxy_in_go_keeps_the_profile(go_proxy: str, tmp_path: Path) -> None:
    assert failures("store-proxy", go_proxy, tmp_path) == []
