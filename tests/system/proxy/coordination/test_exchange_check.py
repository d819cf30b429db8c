"""Tests `kvparams proxy --check` of a site: each thing that is wrong is said, with what to do."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams_proxy.checks.engine_check import CheckFinding
from kvparams_proxy.cli.exchange_check import check_exchange
from kvparams_proxy.config.share_url import parse_share_url
from kvparams_proxy.config.sharing import share_server
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import Processes
from tests.support.proxy.shared_processes import SharedProcesses


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """Starts a server."""
    with ValkeyServer(tmp_path / "valkey") as server:
        yield server


async def _findings(url: str, keys: Path, policy: str = "round_robin", models: str = "") -> list[CheckFinding]:
    sharing = share_server(parse_share_url(url), keys)
    return [finding async for finding in check_exchange(sharing, policy, models)]


async def test_what_is_wrong_with_a_site_is_said(valkey: ValkeyServer, tmp_path: Path) -> None:
    url = valkey.url + "?prefix=a"
    with Processes(tmp_path) as processes:
        site = SharedProcesses(processes, tmp_path, url, 2)
        (found,) = await _findings(url, site.keys)
        assert (found.grade, "2 proxies" in found.message) == ("ok", True)
        unlike, _ = await _findings(url, site.keys, "cache_aware")
        assert unlike.grade == "error"
        assert "--policy" in unlike.message
        unlike, _ = await _findings(url, site.keys, models="mark")
        assert unlike.grade == "error"
        assert "`models`" in unlike.message
        other = tmp_path / "other.json"
        command = [str(Path(sys.executable).with_name("kvparams")), "signing-keys", "create", str(other)]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        strangers, none = await _findings(url, other)
        assert "another site uses this prefix" in strangers.message
        assert "0 proxies" in none.message
    valkey.kill()
    (found,) = await _findings(url, site.keys)
    assert found.grade == "error"
    assert "cannot be reached" in found.message


def _refusal(*options: str) -> str:
    command = [str(Path(sys.executable).with_name("kvparams")), "proxy", "--prefill", "http://127.0.0.1:1"]
    command += ["--decode", "http://127.0.0.1:2", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    return ended.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--share", "redis://127.0.0.1:6379"), "redis:// is written valkey:// here"),
        (("--share", "valkey://"), "host"),
        (("--share", "valkey://127.0.0.1:6379?prefx=a"), "prefix"),
        (("--share", "valkey://127.0.0.1:6379/kv"), "number of a database"),
        (("--share", "valkey://127.0.0.1:6379?prefix=a%20b"), "visible"),
        (("--share", "valkey://127.0.0.1:99999"), "valkey://host:6379"),
        (("--share", "valkey://127.0.0.1:6379"), "kvparams signing-keys create"),
        (("--share", "valkey://127.0.0.1:6379", "--share-keys", "/nowhere"), "--share-keys"),
        (("--share-keys", "/nowhere"), "--share URL"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_write(options: tuple[str, ...], told: str) -> None:
    assert told in _refusal(*options)


def test_a_password_is_never_shown() -> None:
    url = parse_share_url("valkeys://user:secret@[::1]:6380/2?prefix=site-a")
    assert str(url) == "valkeys://[::1]:6380/2?prefix=site-a"
    for text, told in (
        ("valkey://user:secret@host/kv", "database"),
        ("valkey://user:1?secret@host:6379?prefix=a", "percent-encoded"),
        ("valkey://user:secret@host?prefx=a", "did you mean prefix"),
    ):
        with pytest.raises(ValueError, match=told) as refused:
            parse_share_url(text)
        assert "secret" not in str(refused.value)
