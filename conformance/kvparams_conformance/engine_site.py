"""Asks an engine under test, and makes the documents that checks send to it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

from kvparams.signing.canonical_json import canonical_document, canonical_json, native_members, sha256_digest
from kvparams.signing.keyring import SigningKeyring
from kvparams_conformance.checks import NotJudged
from kvparams_conformance.client import exchange
from kvparams_conformance.conversation import Reply, shorten
from kvparams_conformance.raw_json import dig, dump

__all__ = ["Engine", "EngineTrial", "first_model", "sign"]

_ASK_S: Final = 60.0
_PLACEHOLDER: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine under test."""

    url: str
    model: str
    role: Literal["prefill", "decode", "both"] = "both"
    instance: str | None = None
    """The engine's own name in the deployment, if it knows one."""
    keys: Path | None = None
    audience: str = "pool"

    @property
    def keyring(self) -> SigningKeyring:
        """Returns the keys that the engine believes. Raises NotJudged if the kit has none."""
        if self.keys is None:
            raise NotJudged("the checks of signatures need --keys, the key file of the engine")
        return SigningKeyring.parse(self.keys.read_text())


@dataclass(slots=True)
class EngineTrial:
    """An `EngineTrial` is one check of an engine at work."""

    engine: Engine
    sent: list[str] = field(default_factory=list[str])
    seen: list[str] = field(default_factory=list[str])

    def needs(self, role: str) -> None:
        """Skips the check if the engine does not have this role."""
        if self.engine.role not in (role, "both"):
            raise NotJudged(f"the engine does not {role}")

    async def send(
        self,
        path: str,
        body: bytes | None,
        *,
        method: str = "POST",
        headers: Sequence[tuple[str, str]] = (),
        timeout_s: float = _ASK_S,
    ) -> Reply:
        """Sends a request, and records it and its answer."""
        parts = urlsplit(self.engine.url)
        self.sent.append(f"{method} {path} {'' if body is None else shorten(body)}")
        reply = await exchange(
            parts.hostname or "127.0.0.1", parts.port or 80, method, path, body, headers, timeout_s=timeout_s
        )
        self.seen.append(f"{reply.status} {shorten(reply.body)}{'' if reply.ended == 'whole' else f' ({reply.ended})'}")
        return reply

    async def ask(self, carrier: object = ..., *, prompt: object = None, **members: Any) -> Reply:
        """Sends a completion. `carrier` becomes its `kv_transfer_params`."""
        body: dict[str, Any] = {"model": self.engine.model, "max_tokens": 4, "temperature": 0, **members}
        body["prompt"] = self.prompt() if prompt is None else prompt
        if carrier is not ...:
            body["kv_transfer_params"] = carrier
        found = dig(carrier, "kvparams", "request_id")
        headers = (
            [("x-request-id", found)] if isinstance(found, str) and 0 < len(found) < 200 and found.isascii() else []
        )
        return await self.send("/v1/completions", dump(body), headers=headers)

    async def ask_for_prefill(self, document: Mapping[str, object], **members: Any) -> Reply:
        """Sends a prefill leg."""
        return await self.ask(
            {"kvparams": document}, **{"max_tokens": 1, "stream": False, "ignore_eos": True, **members}
        )

    def prompt(self, words: int = 8) -> str:
        """Returns a prompt that nobody has sent before."""
        return f"{token_hex(6)} " + "the quick brown fox jumps " * words

    def document(self, phase: str | None = None, **changes: Any) -> dict[str, Any]:
        """Returns a valid document of 1.0 for a leg, with some members changed; an Ellipsis leaves one out."""
        if phase is None:
            phase = "decode" if self.engine.role == "decode" else "prefill"
        made: dict[str, Any] = {
            "version": "1.0",
            "request_id": f"r-{token_hex(8)}",
            "transfer": {"id": f"{token_hex(12)}-1", "attempt": 1},
            "phase": phase,
            "mode": "store",
        }
        if self.engine.instance is not None:
            made["consumer" if phase == "decode" else "producer"] = {"id": self.engine.instance}
        return {name: value for name, value in {**made, **changes}.items() if value is not ...}

    def evidence(self) -> tuple[str, str]:
        """Returns what was sent and what was seen."""
        return " | ".join(self.sent), " | ".join(self.seen)


async def first_model(url: str) -> str | None:
    """Returns the first model that an engine serves; None if it does not answer with one."""
    parts = urlsplit(url)
    reply = await exchange(parts.hostname or "127.0.0.1", parts.port or 80, "GET", "/v1/models", timeout_s=5.0)
    models = reply.json.get("data")
    first = cast("list[Any]", models)[0] if isinstance(models, list) and models else None
    name = cast("dict[str, Any]", first).get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def sign(
    engine: Engine,
    document: Mapping[str, object],
    native: Mapping[str, object] | None = None,
    *,
    seconds: float = 0,
    lifetime_s: int = 300,
    kid: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Returns a `kv_transfer_params` with a signed document, as a proxy makes it.

    Args:
        engine: has the keys and the audience.
        document: without a signature.
        native: the keys beside it.
        seconds: how much later than now `iat` is.
        lifetime_s: from `iat` to `exp`.
        kid: the name of the key; otherwise the one that signs now.
        changes: members of the signature that are others.
    """
    keyring, now = engine.keyring, int(time.time() + seconds)
    key = keyring.signing_key_at(time.time()) if kid is None else keyring.find(kid)
    if key is None:
        raise NotJudged("the key file has no such key")
    beside = dict(native or {})
    fractions: list[float] = []
    signature: dict[str, Any] = {
        "alg": "hmac-sha256",
        "kid": key.kid,
        "aud": engine.audience,
        "iat": now,
        "exp": now + lifetime_s,
        "nonce": token_hex(16),
        "native": sha256_digest(canonical_json(native_members(beside), fractions=fractions)),
        "value": _PLACEHOLDER,
        **changes,
    }
    signed = {**document, "signature": signature}
    if "value" not in changes:
        signature["value"] = key.tag(canonical_document(signed))
    return {**beside, "kvparams": json.loads(json.dumps(signed))}
