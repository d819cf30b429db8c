"""Translation of engines' error responses into errors for clients.

Invariant: a client never gets the addresses or the internals of engines.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import JSONLimits, load_object
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.response_document import embedded_error

__all__ = ["PublicError", "engine_error_response", "is_model_missing", "public_error", "reported_engine_error"]

_LIMITS: Final = JSONLimits(max_bytes=64 << 10, max_containers=1_000, max_strings=4_000)
"""Limits for an engine's error that is read; of a longer one the client learns the status."""
_KIND: Final = re.compile(r"[A-Za-z][A-Za-z0-9_ ]{0,63}")
_PARAM: Final = re.compile(r"[A-Za-z0-9_.\[\]-]{1,200}")
_CODE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST: Final = 4096
"""Characters of an engine's message that a client may get."""


def engine_error_response(
    role: str, status: int, raw: bytes, addresses: EngineAddresses, sent: bytes, *, own_key: bool = True
) -> ProxyError:
    """Translates an engine's response other than 200 into an error for the client.

    A 4xx is about the client's request: its message, param and code are passed on, unless it is about KV params or
    credentials, which are not the client's. Anything else is the engine's own trouble, of which the client learns only
    the status.
    """
    return reported_engine_error(role, status, _error_object(raw), addresses, sent, own_key=own_key)


def is_model_missing(status: int, raw: bytes, model: str) -> bool:
    """Returns whether an engine's response is the one with which engines say that they do not know this model.

    Sources: vLLM 0.32.0 `entrypoints/serve/engine/serving.py`; SGLang 0.5.23 `srt/lora/lora_registry.py`, which names
    an adapter without its base model. A 404 for an endpoint that an engine lacks says something else.
    """
    if status not in (400, 404):
        return False
    error = _error_object(raw)
    message, kind = error.get("message"), error.get("type")
    if not isinstance(message, str):
        return False
    if status == 404:
        said = f"The model `{model}` does not exist."
        return kind == "NotFoundError" and (message == said or message.startswith(f"{said} Valid aliases: "))
    adapter = model.split(":", 1)[-1]
    return message.startswith(f"The following requested LoRA adapters are not loaded: {adapter}\nLoaded adapters: ")


def _error_object(raw: bytes) -> Mapping[str, object]:
    """Returns the error in a response, empty where it cannot be read."""
    document: Mapping[str, object] = {}
    with suppress(JSONTextError):
        document, _ = load_object(raw, _LIMITS)
    return embedded_error(document) or document


def reported_engine_error(
    role: str,
    status: int,
    error: Mapping[str, object],
    addresses: EngineAddresses,
    sent: bytes,
    *,
    own_key: bool = True,
) -> ProxyError:
    """Translates an engine's error object into an error for the client.

    `sent` is the client's body, whose content is no secret. `own_key`: the engine was shown a key of ours, or none, and
    not the client's.
    """
    message, param = error.get("message"), error.get("param")
    failed = ProxyError(502, "upstream_error", f"the {role} engine answered {status}", code=f"{role}_failed")
    failed.detail = message if isinstance(message, str) else None
    if own_key and status in (401, 403):
        failed.message, failed.code = f"the {role} engine refuses the proxy's API key", f"{role}_unauthorized"
        return failed
    if not 400 <= status < 500:
        return failed
    if isinstance(param, str) and f"{param}.".startswith("kv_transfer_params."):
        failed.message = f"the {role} engine refuses the KV parameters; check that --connector matches the engine"
        return failed
    plain = public_error(error, addresses, sent)
    refused = ProxyError(
        status,
        plain.kind or "invalid_request_error",
        plain.message or f"the {role} engine refused the request ({status})",
        param=plain.param,
        code=plain.code,
    )
    refused.detail = None if plain.message else failed.detail
    return refused


class PublicError(NamedTuple):
    """The parts of an engine's error that a client may see. A part that it may not see is None."""

    message: str | None
    kind: str | None
    param: str | None
    code: str | int | None


def public_error(error: Mapping[str, object], addresses: EngineAddresses, sent: bytes) -> PublicError:
    """Extracts from an engine's error object the parts that a client may see. `sent` is the client's body."""
    message, kind, param, code = (error.get(name) for name in ("message", "type", "param", "code"))
    if isinstance(message, str):
        message = message[:_LONGEST]
    return PublicError(
        message if isinstance(message, str) and message and not addresses.occur_in(message, sent) else None,
        kind if isinstance(kind, str) and _is_public(_KIND, kind, addresses, sent) else None,
        param if isinstance(param, str) and _is_public(_PARAM, param, addresses, sent) else None,
        code if type(code) is int or (isinstance(code, str) and _is_public(_CODE, code, addresses, sent)) else None,
    )


def _is_public(pattern: re.Pattern[str], text: str, addresses: EngineAddresses, sent: bytes) -> bool:
    return pattern.fullmatch(text) is not None and not addresses.occur_in(text, sent)
