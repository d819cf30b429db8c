"""Checks what an engine does with valid documents."""

import asyncio
import json
from typing import Any, Final, cast

from kvparams import InvalidParams, KVTransferParams, parse
from kvparams_conformance.checks import CheckFailed, Checks, NotJudged, expect
from kvparams_conformance.conversation import Reply
from kvparams_conformance.engine_site import EngineTrial
from kvparams_conformance.raw_json import dig

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PROFILES: Final = ("engine",)
_ABSENT_KEYS: Final = ["agreed.by.nobody.1", "agreed.by.nobody.2"]


def _add(requirement: str, name: str, sends: str, expects: str) -> Any:
    return CHECKS.add(requirement, name, sends=sends, expects=expects, profiles=_PROFILES)


def _result(reply: Reply) -> KVTransferParams:
    expect(reply.status == 200, f"the status is {reply.status}")
    carrier = reply.json.get("kv_transfer_params")
    found = cast("dict[str, Any]", carrier).get("kvparams") if isinstance(carrier, dict) else None
    if not isinstance(found, dict):
        raise CheckFailed("the answer has no document")
    try:
        return parse(cast("dict[str, Any]", found))
    except InvalidParams as error:
        raise CheckFailed(f"the document of the answer breaks the protocol: {error}") from None


@_add("18.1", "models", "GET /v1/models", "the answer lists models, and `kvparams_versions` with a version of 1")
async def check_models(trial: EngineTrial) -> None:
    """Asks for models and versions."""
    reply = await trial.send("/v1/models", None, method="GET")
    expect(reply.status == 200 and reply.json.get("data"), f"the status is {reply.status}, or no model is listed")
    told = reply.json.get("kvparams_versions")
    expect(
        isinstance(told, list) and any(str(one).startswith("1.") for one in cast("list[Any]", told)),
        f"`kvparams_versions` is {told!r}",
    )


@_add(
    "18.5",
    "ordinary",
    "requests without a document, and with `kv_transfer_params` null",
    "they are answered, without a document",
)
async def check_ordinary(trial: EngineTrial) -> None:
    """Sends ordinary requests."""
    carriers: list[Any] = [..., None, {}]
    for carrier in carriers:
        reply = await trial.ask(carrier)
        expect(reply.status == 200, f"the status is {reply.status}")
        expect("kvparams" not in reply.body.decode("utf-8", "replace"), "the answer has a document")


@_add("2.3", "null-text", "`kv_transfer_params` that is the text `null`", "the request is answered as an ordinary one")
async def check_null_text(trial: EngineTrial) -> None:
    """Sends null as text."""
    reply = await trial.ask("null")
    expect(reply.status == 200, f"the status is {reply.status}")


@_add(
    "18.3",
    "prefill-result",
    "a prefill leg",
    "a valid `prefill_result` with the leg's `request_id`, `transfer` and `mode`",
)
async def check_prefill_result(trial: EngineTrial) -> None:
    """Sends a prefill leg."""
    trial.needs("prefill")
    document = trial.document()
    result = _result(await trial.ask_for_prefill(document))
    told = (result.phase, result.mode, result.request_id, result.transfer.id, result.transfer.attempt)
    wanted = ("prefill_result", "store", document["request_id"], document["transfer"]["id"], 1)
    expect(told == wanted, f"the document of the answer is of {told}")


@_add("2.5", "text", "`kv_transfer_params` as JSON text", "it is read like the object")
async def check_text(trial: EngineTrial) -> None:
    """Sends the object as text."""
    trial.needs("prefill")
    document = trial.document()
    reply = await trial.ask(json.dumps({"kvparams": document}), max_tokens=1)
    expect(_result(reply).transfer.id == document["transfer"]["id"], "the answer is of another transfer")


@_add("6.1", "later", "a leg of the version 1.9 with unknown members", "it is accepted")
async def check_later(trial: EngineTrial) -> None:
    """Sends a document of a later minor version."""
    trial.needs("prefill")
    _result(
        await trial.ask_for_prefill(
            trial.document(version="1.9", tier={"a": [1, None]}, extensions={"com.example.x": {"y": 1}})
        )
    )


@_add("5.3", "unknown", "a leg of 1.0 with unknown members, nulls and an extension", "it is accepted")
async def check_unknown(trial: EngineTrial) -> None:
    """Sends a document that another writer has added to."""
    trial.needs("prefill")
    document = trial.document(later=18446744073709551615, lease=None, extensions={"com.example.tiers": {"a": 1.5}})
    _result(await trial.ask_for_prefill(document))


@_add("2.4", "trio-beside", "a document, and members of section 9 beside it that contradict it", "the document counts")
async def check_trio_beside(trial: EngineTrial) -> None:
    """Sends the trio beside a document."""
    trial.needs("prefill")
    document = trial.document()
    carrier = {"kvparams": document, "kvcache_load_keys": ["other"], "prefix_prompt_ids": [1]}
    expect(_result(await trial.ask(carrier, max_tokens=1)).phase == "prefill_result", "the trio was read")


@_add(
    "3.10",
    "recompute",
    "a decode leg with keys that nobody has stored, and `on_load_failure` `recompute`",
    "it is answered like an ordinary request",
)
async def check_recompute(trial: EngineTrial) -> None:
    """Promises KV that is not there."""
    trial.needs("decode")
    prompt = trial.prompt(40)
    document = trial.document("decode", load_keys=_ABSENT_KEYS, on_load_failure="recompute", lease={"ttl_ms": 30000})
    reply = await trial.ask({"kvparams": document}, prompt=prompt)
    plain = await trial.ask(prompt=prompt)
    expect(reply.status == 200, f"the status is {reply.status}")
    expect(_text(reply) == _text(plain), f"the answers are {_text(reply)!r} and {_text(plain)!r}")


@_add("3.10", "fail", "the same with `fail`", "the request fails")
async def check_fail(trial: EngineTrial) -> None:
    """Promises KV that is not there, to an engine that shall not compute it."""
    trial.needs("decode")
    document = trial.document("decode", load_keys=_ABSENT_KEYS, on_load_failure="fail", lease={"ttl_ms": 30000})
    reply = await trial.ask({"kvparams": document}, prompt=trial.prompt(80))
    expect(reply.status >= 400, f"the status is {reply.status}: the promised KV was computed anew")


@_add(
    "8.6",
    "prefix",
    "a decode leg whose `prefix` is of other token ids than the prompt",
    "the answer is that of an ordinary request, or an error",
)
async def check_prefix(trial: EngineTrial) -> None:
    """Names another prompt."""
    trial.needs("decode")
    prompt = trial.prompt()
    document = trial.document("decode", prefix={"count": 3, "ids": [1, 2, 3]}, on_load_failure="recompute")
    reply, plain = await trial.ask({"kvparams": document}, prompt=prompt), await trial.ask(prompt=prompt)
    expect(
        reply.status >= 400 or _text(reply) == _text(plain), f"the answers are {_text(reply)!r} and {_text(plain)!r}"
    )


@_add(
    "12.3",
    "salts",
    "one prompt three times: twice under one salt, then under another",
    "the third counts no cached tokens",
)
async def check_salts(trial: EngineTrial) -> None:
    """Looks whether KV is shared between salts."""
    trial.needs("prefill")
    prompt = trial.prompt(60)
    cached: list[int] = []
    for salt in ("salt-a", "salt-a", "salt-b"):
        reply = await trial.ask_for_prefill(
            trial.document(isolation={"cache_salt": salt}), prompt=prompt, cache_salt=salt
        )
        _result(reply)
        cached.append(dig(reply.json, "usage", "prompt_tokens_details", "cached_tokens") or 0)
    if not cached[1]:
        raise NotJudged("the engine counts no cached tokens")
    expect(cached[2] <= cached[0], f"{cached[2]} tokens came from the KV of another salt")


@_add(
    "12.3",
    "foreign-salt",
    "a document whose salt is not that of the request",
    "an error, or an answer without KV of either salt",
)
async def check_foreign_salt(trial: EngineTrial) -> None:
    """Contradicts the request's salt."""
    trial.needs("prefill")
    document = trial.document(isolation={"cache_salt": "salt-a"})
    reply = await trial.ask_for_prefill(document, cache_salt="salt-b")
    expect(reply.status in (200, 400), f"the status is {reply.status}")
    if reply.status == 200:
        expect(
            not dig(reply.json, "kv_transfer_params", "kvparams", "load_keys"),
            "KV was stored although the salts differ",
        )


@_add(
    "4.4",
    "unknown-transfer",
    "`release` and `cancel` of a transfer that nobody has begun",
    "200 and an object, at once",
)
async def check_unknown_transfer(trial: EngineTrial) -> None:
    """Releases nothing."""
    for phase in ("release", "cancel"):
        reply = await trial.send("/v1/kvparams", _control(trial.document(phase, producer=..., consumer=...)))
        if reply.status == 404:
            raise NotJudged("the engine does not have the path /v1/kvparams")
        expect(reply.status == 200 and reply.seconds < 2, f"the status is {reply.status} after {reply.seconds:.1f} s")


@_add("18.4", "release", "a `release` of a transfer that has ended, twice", "200 and an object in JSON")
async def check_release(trial: EngineTrial) -> None:
    """Releases what a prefill leg has stored."""
    trial.needs("prefill")
    document = trial.document()
    await trial.ask_for_prefill(document)
    for _ in range(2):
        reply = await trial.send("/v1/kvparams", _control({**document, "phase": "release"}))
        if reply.status == 404:
            raise NotJudged("the engine does not have the path /v1/kvparams")
        expect(reply.status == 200, f"the status is {reply.status}")
        expect(reply.body.strip()[:1] == b"{", "the answer is no object")


@_add(
    "3.14",
    "address",
    "legs whose `producer.address`, or whose `producer.id`, is an address where the kit listens",
    "nobody connects to it",
)
async def check_address(trial: EngineTrial) -> None:
    """Listens at an address that the engine's configuration does not allow."""
    await _expect_no_connection(trial, with_address=True)


@_add("3.11", "id", "legs whose `producer.id` is an address where the kit listens", "nobody connects to it")
async def check_id(trial: EngineTrial) -> None:
    """Names an instance like an address."""
    await _expect_no_connection(trial, with_address=False)


async def _expect_no_connection(trial: EngineTrial, *, with_address: bool) -> None:
    came: list[object] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        other = {"id": address, "address": address} if with_address else {"id": address}
        phase = "prefill" if trial.engine.role == "prefill" else "decode"
        document = trial.document(phase, load_keys=_ABSENT_KEYS, on_load_failure="recompute")
        document["consumer" if phase == "prefill" else "producer"] = other
        await trial.ask({"kvparams": document}, max_tokens=1)
        await asyncio.sleep(0.2)
    finally:
        server.close()
    expect(not came, f"the engine connected to {address}")


def _control(document: dict[str, Any]) -> bytes:
    return json.dumps({"kv_transfer_params": {"kvparams": document}}).encode()


def _text(reply: Reply) -> object:
    return dig(reply.json, "choices", 0, "text")
