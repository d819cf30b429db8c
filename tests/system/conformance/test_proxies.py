"""Tests that proxies keep their profiles: ours in every one, and the two reference proxies in `store-proxy`."""

from pathlib import Path

import pytest

from tests.system.conformance.mutants.faults import run_profile
from tests.system.conformance.runs import RUNS


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
@pytest.mark.parametrize(
    "mode",
    [
        "conditional",
        "concurrent_legs",
        "conditional,remote_tokens=1",
        "decode_local_prefill_remote",
        "prefill_local_decode_remote",
        "prefill_then_decode,decode_first=true",
    ],
)
def test_our_proxy_keeps_the_profile_in_other_modes(mode: str, ours: str, tmp_path: Path) -> None:
    assert failures("store-proxy", f"{ours} --log-requests - --mode {mode} {RUNS['store'].options}", tmp_path) == []


def test_the_reference_proxy_in_javascript_keeps_the_profile(node_proxy: str, tmp_path: Path) -> None:
    assert failures("store-proxy", node_proxy, tmp_path) == []


@pytest.mark.slow
def test_the_reference_proxy_in_go_keeps_the_profile(go_proxy: str, tmp_path: Path) -> None:
    assert failures("store-proxy", go_proxy, tmp_path) == []
