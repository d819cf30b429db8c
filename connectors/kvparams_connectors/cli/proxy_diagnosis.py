"""Reports what `kvparams doctor` says of a running proxy: whether what it expects of prefix caches comes true.

It is read from the proxy's own `/metrics`. Only the proxy knows what it expected; nothing is sent to it that an engine
would have to answer.
"""

import re
from collections.abc import Iterator
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvparams_connectors.advice import Advice

__all__ = ["examine_proxy", "is_proxy"]

_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 64 << 20
"""Of a fleet of thousands."""
_PREFIX: Final = "kvparams_proxy_"
_SAMPLE: Final = re.compile(rf"^{_PREFIX}(info|exchange_\w+|prefix_cache_\w+)(?:\{{[^}}]*\}})? (\S+)", re.MULTILINE)
_WHY: Final = (
    "turn on prefix caching in every prefill engine, give the proxy the model's --tokenizer, and keep other "
    "clients off these engines. With `kv_events` of an instance the proxy learns what the engine evicts; "
    "`kvparams explain-route` shows the prediction for each engine"
)


def is_proxy(url: str) -> bool:
    """Returns whether it is a proxy's; no store is reached so."""
    return url.startswith(("http://", "https://"))


def examine_proxy(url: str) -> Iterator[Advice]:
    """Reachable, a proxy of ours, right in what it expects."""
    try:
        found = _metrics(url)
    except HTTPError as error:
        yield Advice(
            "error", f"GET /metrics returned {error.code}", "give the URL of the proxy itself, http://host:port"
        )
        return
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else type(error).__name__
        yield Advice(
            "error",
            f"the proxy does not answer ({reason})",
            "start the proxy, and check that this machine can reach it",
        )
        return
    if "info" not in found:
        yield Advice("error", "/metrics is not that of a kvparams proxy", "give the URL of the proxy, not of an engine")
        return
    yield Advice("ok", "the kvparams proxy answers")
    yield _predictions(found)
    yield from _siblings(found)


def _metrics(url: str) -> dict[str, float]:
    """Returns the examined metrics, by the ends of their names.

    Raises:
        OSError, ValueError, HTTPException: there are none.
    """
    with urlopen(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S) as answer:
        text: str = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    return {name: float(value) for name, value in _SAMPLE.findall(text)}


def _siblings(found: dict[str, float]) -> Iterator[Advice]:
    connected, siblings = found.get("exchange_connected"), found.get("exchange_siblings")
    if connected is None or siblings is None:
        return
    if not connected:
        yield Advice("warning", "it cannot reach the other proxies of its site", "see that the server of --share runs")
    else:
        yield Advice("ok", f"it shares its fleet with {siblings:.0f} other proxies")
    if found.get("exchange_refused_total"):
        said = "messages between proxies were not believed"
        yield Advice("warning", said, "give all proxies of a site the same --share-keys, and each site its own prefix")


def _predictions(found: dict[str, float]) -> Advice:
    alarm, accuracy = found.get("prefix_cache_alarm"), found.get("prefix_cache_accuracy")
    if alarm is None:
        return Advice("ok", "the proxy's policy does not use engines' caches")
    if alarm:
        share = "next to none" if accuracy is None else f"{100 * accuracy:.0f} %"
        return Advice("warning", f"only {share} of the tokens that were predicted to be cached were cached", _WHY)
    if accuracy is not None:
        return Advice("ok", f"{100 * accuracy:.0f} % of the tokens that were predicted to be cached were cached")
    if found.get("prefix_cache_predicted_hits_total") and not found.get("prefix_cache_hits_total"):
        said = "the proxy predicts cached tokens, but no engine reports its cached tokens"
        return Advice("warning", said, "make the engines report cached_tokens (vLLM: --enable-prompt-tokens-details)")
    return Advice("ok", "the proxy has not predicted any cached tokens yet")
