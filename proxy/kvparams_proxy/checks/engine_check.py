"""Asks one engine what it serves, and its bootstrap server who the engine is: the first half of `--check`."""

import asyncio
import json
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, cast

from kvparams.dialects.interface import BootstrapInfo
from kvparams.instances import Instance
from kvparams.versions import NoCommonVersion, negotiate_with_engine
from kvparams_proxy.fleet.bootstrap_servers import BootstrapServer
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeout,
)

__all__ = ["PROMPT_TOKENS", "CheckFinding", "EngineInfo", "ask_bootstrap", "ask_engine", "fetch"]

FindingGrade = Literal["ok", "warning", "error"]

PROMPT_TOKENS: Final = 520
"""Some blocks and pages of usual sizes, and a part of one."""
_TIMEOUT_S: Final = 60.0
"""For one question. An engine that is compiling something takes its time."""
_ANSWER_BYTES: Final = 16 << 20


class CheckFinding(NamedTuple):
    """A result of `--check` about one engine or pair."""

    grade: FindingGrade
    who: str
    message: str
    summary: str = ""
    """The message without addresses and without the words of engines, for the log. Empty: the message has none."""


class EngineInfo(NamedTuple):
    """Model and token limit that an engine reports about itself."""

    model: str | None
    max_tokens: int
    models: tuple[str, ...] = ()
    """All models that it serves."""


async def ask_engine(instance: Instance, pool: Upstream) -> tuple[CheckFinding, EngineInfo | None]:
    """Checks whether an engine is there and what it serves; the second is None where it cannot be used."""
    declared = f"{instance.role}, {instance.dialect}"
    try:
        head, raw = await fetch(pool, pool.get(b"/v1/models"))
    except UpstreamError as error:
        return CheckFinding(
            "error", instance.id, f"({declared}) does not answer at {instance.url}: {error.reason}"
        ), None
    if head.status in (401, 403):
        said = (
            f"({declared}) refuses the proxy's API key ({head.status}); set `key_file` of the instance or "
            "--engine-key-file"
        )
        return CheckFinding("error", instance.id, said), None
    said = _object(raw) if head.status == 200 else {}
    try:
        negotiate_with_engine(said)
    except NoCommonVersion as none:
        return CheckFinding("error", instance.id, f"({declared}) {none}"), None
    models = _models(said)
    if not models:
        said = f"({declared}) answers, but does not name its models (GET /v1/models: {head.status})"
        return CheckFinding("warning", instance.id, said), EngineInfo(None, 2 * PROMPT_TOKENS)
    name, longest = next(iter(models.items()))
    return CheckFinding("ok", instance.id, f"({declared}) answers and serves {', '.join(models)}"), EngineInfo(
        name, longest, tuple(models)
    )


async def ask_bootstrap(instance: Instance, server: BootstrapServer) -> tuple[CheckFinding, BootstrapInfo | None]:
    """Asks the bootstrap server of an engine who the engine is; None where it does not say."""
    answer: asyncio.Future[tuple[BootstrapInfo | None, str]] = asyncio.get_running_loop().create_future()
    exchange = server.query(lambda place, why: answer.set_result((place, why)))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            place, why = await answer
    except TimeoutError:
        exchange.discard()
        place, why = None, "its bootstrap server does not answer"
    finally:
        server.close()
    if place is None:
        return CheckFinding("error", instance.id, f"{why}; set --bootstrap, or `bootstrap` of the instance"), None
    return CheckFinding("ok", instance.id, "its bootstrap server knows the engine"), place


async def fetch(pool: Upstream, request: UpstreamRequest, *, once: bool = False) -> tuple[ResponseHead, bytes]:
    """Returns the whole answer.

    Raises:
        UpstreamError: there was none, or not in time.
    """
    answer: asyncio.Future[tuple[ResponseHead, bytes, UpstreamError | None]] = (
        asyncio.get_running_loop().create_future()
    )

    def ended(head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        if not answer.done():  # or nobody waits for it any more
            answer.set_result((head, raw, error))

    exchange = pool.exchange(request, ResponseCollector(_ANSWER_BYTES, ended), once=once)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, raw, error = await answer
    except TimeoutError:
        exchange.discard()
        raise UpstreamTimeout(f"no answer in {_TIMEOUT_S:g} s") from None
    except asyncio.CancelledError:
        exchange.discard()
        raise
    if error is not None:
        raise error
    return head, raw


def _object(raw: bytes) -> dict[str, object]:
    """Returns the object that `raw` is; an empty one where it is none."""
    try:
        document: object = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}


def _models(said: Mapping[str, object]) -> dict[str, int]:
    """Returns the names of models, and the longest prompt and answer that each takes."""
    data = said.get("data")
    found: dict[str, int] = {}
    for entry in cast("list[object]", data) if isinstance(data, list) else ():
        members = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
        name, longest = members.get("id"), members.get("max_model_len")
        if isinstance(name, str):
            found[name] = longest if isinstance(longest, int) and longest > 0 else 2 * PROMPT_TOKENS
    return found
