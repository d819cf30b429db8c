"""The negative control: a byte of stored KV is flipped between prefill and decode.

With verification the page is refused, the rest of the prefix recomputed and the tokens are right. Without, the same
byte changes the tokens. The legs are driven by hand, as a proxy would: the damage must happen between them.

A prompt that was not handed over at all shows that the counters notice.
"""

import asyncio
import time
from typing import Final
from uuid import uuid4

import httpx

from demo.client import JSON, AnswerError, Reply, ask, scrape, settled
from demo.counts import REFERENCE, Counts
from demo.damage import flip_stored_byte, forged_peer, is_stored
from demo.display import Display
from demo.processes import Server
from demo.texts import ADDRESS
from kvparams import codec
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Phase, Transfer
from kvparams_connectors.store_url import StoreURL

__all__ = ["damage_unchecked", "damage_verified", "not_handed_over"]

_PATH: Final = "/v1/completions"
_LIMITS: Final[JSON] = {"max_tokens": 48, "min_tokens": 48, "temperature": 0}
_AGAIN: Final = f"Once more. {ADDRESS}"
"""With pages of its own: what was damaged of the other prompt is damaged for good."""
_NOBODYS: Final = " ".join(reversed(ADDRESS.split()))
_DAMAGED_PAGE: Final = 1
"""Not the first, so that something is left to load."""
_WITHIN_S: Final = 30.0
"""What becomes true behind an answer, becomes true."""
_PAUSE_S: Final = 0.05


async def not_handed_over(
    client: httpx.AsyncClient, decode: Server, display: Display, *, counts: Counts, more: JSON
) -> None:
    """Show that the counters tell a prompt that was handed over from one that was not.

    Args:
        client: asks.
        decode: is asked without a prefill engine, for a prompt that none has computed.
        display: shows what comes out.
        counts: of the engine.
        more: members of every request.
    """
    before = await scrape(client, decode.url)
    reply = await ask(client, decode.url, _PATH, {**_LIMITS, **more, "prompt": _NOBODYS})
    after = await scrape(client, decode.url)
    computed = counts.computed(after) - counts.computed(before)
    display.check(
        counts.loaded(after) == counts.loaded(before) and computed == reply.count("prompt_tokens"),
        f"{decode.name} computed all {computed} tokens of a prompt that no prefill engine had",
    )


async def damage_verified(
    client: httpx.AsyncClient,
    prefill: Server,
    decode: Server,
    single: Server,
    store_url: str,
    display: Display,
    *,
    counts: Counts = REFERENCE,
    more: JSON | None = None,
) -> None:
    """Show that a damaged page is refused, its part of the prefix recomputed, and the tokens are right.

    Args:
        client: asks.
        prefill: computes the prompt.
        decode: finds the damaged page.
        single: has no store.
        store_url: of the other two.
        display: shows what comes out.
        counts: of the engines.
        more: members of every request.
    """
    body: JSON = {**_LIMITS, **(more or {}), "prompt": ADDRESS}
    before = await scrape(client, decode.url)
    reply = await _damaged(client, prefill, decode, store_url, body, counts)
    after = await scrape(client, decode.url)
    computed = counts.computed(after) - counts.computed(before)
    past = counts.refused(before)
    if counts.later:
        after = await settled(
            client, decode.url, body, lambda found: sum(counts.refused(found).values()) > sum(past.values())
        )
    computed += counts.undelivered(after) - counts.undelivered(before)
    refused = {name: count - past.get(name, 0) for name, count in counts.refused(after).items()}
    reasons = ", ".join(name.partition('reason="')[2].partition('"')[0] for name, count in refused.items() if count)
    display.check(sum(refused.values()) == 1, f"{decode.name} refused one page ({reasons})")
    display.check(
        counts.most_computed < computed < reply.count("prompt_tokens"),
        f"{decode.name} recomputed {computed} of {reply.count('prompt_tokens')} prompt tokens, not only the last one",
    )
    display.check(reply.outcome == await _expected(client, single, body), "the tokens are those of one engine")


async def damage_unchecked(
    client: httpx.AsyncClient,
    prefill: Server,
    decode: Server,
    single: Server,
    store_url: str,
    display: Display,
    *,
    counts: Counts = REFERENCE,
    more: JSON | None = None,
) -> None:
    """Shows that the same damage changes the tokens if pages are not checked, so the transferred KV does matter.

    Arguments as for `damage_verified`.
    """
    body: JSON = {**_LIMITS, **(more or {}), "prompt": _AGAIN}
    reply = await _damaged(client, prefill, decode, store_url, body, counts)
    display.check(
        reply.outcome != await _expected(client, single, body), "without verification the same byte changed the tokens"
    )


async def _damaged(
    client: httpx.AsyncClient, prefill: Server, decode: Server, store_url: str, body: JSON, counts: Counts
) -> Reply:
    """Prefill, flip a byte, decode."""
    told: JSON = {**body, "max_tokens": 1, "min_tokens": 0, "kv_transfer_params": _document("prefill")}
    first = await ask(client, prefill.url, _PATH, told)
    result = codec.read_request(first.kv_transfer_params)
    assert result is not None
    assert result.load_keys is not None
    if len(result.load_keys) <= _DAMAGED_PAGE:
        raise AnswerError(f"{prefill.name} stored {len(result.load_keys)} pages, too few to damage the second")
    key = result.load_keys[_DAMAGED_PAGE]
    if StoreURL.parse(store_url).scheme == "peer":
        with forged_peer(store_url, result, key, layers=counts.layers) as forged:
            return await ask(client, decode.url, _PATH, {**body, "kv_transfer_params": _document("decode", forged)})
    await _stored(store_url, result.load_keys[-1])
    flip_stored_byte(store_url, key, layers=counts.layers)
    return await ask(client, decode.url, _PATH, {**body, "kv_transfer_params": _document("decode", result)})


async def _stored(store_url: str, key: str) -> None:
    """Wait for a page, within bounds: engines may save behind their answers."""
    until_s = time.monotonic() + _WITHIN_S
    while True:
        if is_stored(store_url, key) or time.monotonic() > until_s:
            return
        await asyncio.sleep(_PAUSE_S)


async def _expected(client: httpx.AsyncClient, single: Server, body: JSON) -> tuple[object, ...]:
    return (await ask(client, single.url, _PATH, body)).outcome


def _document(phase: Phase, result: KVTransferParams | None = None) -> JSON:
    """The document for a leg; decode is told what prefill answered."""
    params = KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id=uuid4().hex if result is None else result.request_id,
        transfer=Transfer(id=uuid4().hex, attempt=1) if result is None else result.transfer,
        phase=phase,
        mode="store",
    )
    if result is not None:
        params = params.model_copy(update={"producer": result.producer, "load_keys": result.load_keys})
    return codec.write(params)
