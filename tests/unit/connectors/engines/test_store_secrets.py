"""Tests that messages about a store never show a secret that was misplaced in its URL."""

import logging
import traceback
from collections.abc import Callable
from urllib.parse import quote

import pytest

from kvparams.cli import main
from kvparams.errors import KVParamsError
from kvparams_connectors.advice import Advice
from kvparams_connectors.cli import doctor_command
from kvparams_connectors.engines.engine_settings import EngineSettings
from kvparams_connectors.engines.lmcache.settings import PluginSettings
from kvparams_connectors.engines.sglang.settings import SGLangSettings
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm_tier.settings import TierSettings
from kvparams_connectors.store import open_store
from kvparams_connectors.store_url import StoreError, StoreURL, redact_url
from kvparams_connectors.stores.guard.store import open_guarded

SECRET = "hunter2"
HOST = "db.invalid"


def tiers(*urls: str) -> str:
    return "tiered:?" + "&".join(f"l{number}={quote(url, safe='')}" for number, url in enumerate(urls, 1))


NAMED = [
    f"valkey://u:{SECRET}@{HOST}",
    f"valkey://u:{SECRET}@{HOST}:6379?ttl=5",
    f"valkey://{SECRET}@{HOST}:port",
    f"valkey://{HOST}?password={SECRET}",
    f"valkey://{HOST}?user={SECRET}&user={SECRET}",
    f"valkey://{HOST}?{SECRET}",
    f"valkeys://u:{SECRET}@{HOST}?ca=/nowhere",
    f"mooncake://u:{SECRET}@{HOST}:50051",
    f"mooncake://{HOST}:50051?password={SECRET}",
    f"lmcache://u:{SECRET}@{HOST}:65432",
    f"lmcache://{HOST}:65432?password={SECRET}",
    f"lmcache-mp://u:{SECRET}@{HOST}:5555",
    f"lmcache-mp://{HOST}:5555?token={SECRET}",
    f"peer://u:{SECRET}@{HOST}:7000",
    f"peer://{HOST}:7000?secret={SECRET}",
    f"memory://u:{SECRET}@{HOST}",
    f"memory://{HOST}?user={SECRET}&size=1MiB",
    f"file://u:{SECRET}@{HOST}/x?size=1MiB",
    f"file://{HOST}/x?password={SECRET}",
    f"mamory://u:{SECRET}@{HOST}",
    tiers("memory:?size=8MiB", f"valkey://u:{SECRET}@{HOST}"),
    tiers("memory:?size=8MiB", f"valkey://{HOST}?password={SECRET}"),
    tiers("memory:?size=8MiB", "valkey://127.0.0.1:1", f"valkey://{HOST}?password={SECRET}"),
    tiers(f"valkey://{HOST}?password={SECRET}"),
    f"{tiers('memory:', f'valkey://{HOST}')}&password={SECRET}",
    f"//u:{SECRET}@{HOST}:6379",
]
UNNAMED = [
    f"valkey://u:1?{SECRET}@{HOST}?ttl=5",
    f"lmcache://u:1?{SECRET}@{HOST}:65432?prefix=a&b=c",
    tiers("memory:?size=8MiB", f"valkey://u:1?{SECRET}@{HOST}?ttl=5"),
    f"valkey://u:{SECRET}[@{HOST}",
    f"valkey://u:p/{SECRET}@{HOST}",
    f"valkey://u:p?{SECRET}@{HOST}",
    f"valkey://u:p#{SECRET}@{HOST}",
    f"valkey://u:{SECRET}/@{HOST}",
    f"valkey:u:{SECRET}@{HOST}",
    f"u:{SECRET}@{HOST}:6379",
    f"memory:u:{SECRET}@{HOST}?size=1MiB",
    f"valkey://{HOST}?l1={quote(tiers(f'valkey://h?password={SECRET}'), safe='')}",
    f"valkey:///{HOST}.sock?password={SECRET}",
]
"""Where it cannot be told what the host is, or it does not matter."""


@pytest.fixture
def spoken(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.DEBUG)

    def said() -> str:
        found = capsys.readouterr()
        return found.out + found.err + caplog.text

    return said


@pytest.mark.parametrize("opens", [open_store, open_guarded], ids=["open_store", "open_guarded"])
@pytest.mark.parametrize("url", NAMED + UNNAMED)
def test_no_error_and_no_log_has_it(url: str, opens: Callable[[str], object], spoken: Callable[[], str]) -> None:
    with pytest.raises(KVParamsError) as refused:
        opens(url)
    with_causes = "".join(traceback.format_exception(refused.value))
    assert SECRET not in with_causes + repr(refused.value) + spoken()
    if url in NAMED:
        assert HOST in str(refused.value)


@pytest.mark.parametrize("arguments", [["doctor"], ["store", "inspect"], ["store", "bench"]], ids=" ".join)
@pytest.mark.parametrize("url", NAMED + UNNAMED)
def test_no_tool_prints_it(
    url: str, arguments: list[str], spoken: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_command, "examine_machine", list[Advice])  # it takes its time, and knows no URL
    assert main([*arguments, url, *(["key"] if "inspect" in arguments else [])]) in (1, 2)
    said = spoken()
    assert SECRET not in said
    if url in NAMED and arguments == ["doctor"]:
        assert HOST in said


@pytest.mark.parametrize("url", NAMED + UNNAMED)
def test_no_repr_has_it(url: str) -> None:
    try:
        parsed = StoreURL.parse(url)
    except StoreError:
        parsed = StoreURL(url, "", "", "")
    assert SECRET not in f"{parsed!r} {parsed} {parsed.redacted}"
    assert parsed.raw == url
    assert HOST in redact_url(url) or url in UNNAMED


@pytest.mark.parametrize("settings", [VLLMSettings, TierSettings, SGLangSettings, PluginSettings])
def test_no_engines_settings_show_the_url(settings: type[EngineSettings]) -> None:
    found = settings(store=f"valkey://u:{SECRET}@h")
    assert SECRET not in f"{found!r} {found}"
    assert SECRET in found.store


def test_no_error_shows_the_url() -> None:
    given = {"store": [f"valkey://u:{SECRET}@h"], "model": 5}
    with pytest.raises(StoreError, match="store: must be the store's URL") as caught:
        VLLMSettings.of(given)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("file:///dev/shm/kv?size=1GiB", None),
        ("memory:?size=512MiB", None),
        ("valkey:///run/valkey.sock", None),
        ("valkeys://[2001:db8::1]:6379?ttl=5&prefix=a.b-c", None),
        ("lmcache-mp://127.0.0.1:5555?http=8080&max_value=4MiB", None),
        ("", None),
        ("valkey://u:hunter2@h:6379?ttl=5&user=me", "valkey://...@h:6379?ttl=5&user=..."),
        ("valkey://h?password_file=/etc/kv", "valkey://h?password_file=..."),
        ("valkey://h?prefix=a%0Ab&ttl=5 5&=x", "valkey://h?prefix=a%0Ab&ttl=...&..."),
        ("valkey://host:many", "valkey://host:..."),
        ("valkey://h\n/p\nq", "valkey://.../..."),
        (tiers("memory:?size=1GiB", "valkey://u:p@h"), "tiered:?l1=(memory:?size=1GiB)&l2=(valkey://...@h)"),
        (tiers(tiers(tiers("memory:"))), "tiered:?l1=(tiered:?l1=...)"),
    ],
)
def test_the_rest_of_a_url_is_shown(url: str, what: str | None) -> None:
    """The control: where nothing could be a secret, nothing is hidden."""
    assert redact_url(url) == (url if what is None else what)
