"""The negative control: a byte of stored KV is flipped between prefill and decode.

With verification the page is refused, the rest of the prefix recomputed and the tokens are right. Without, the same
byte changes the tokens. The legs are driven by hand, as a proxy would: the damage must happen between them.
"""

from typing import Final
from uuid import uuid4

import httpx

from demo.client import JSON, AnswerError, Reply, ask, scrape
from demo.damage import flip_stored_byte, forged_peer
from demo.display import Display
from demo.processes import Server
from demo.texts import ADDRESS
from kvparams import codec
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Phase, Transfer
from kvparams_connectors.settings import StoreURL

__all__ = ["damage_unchecked", "damage_verified"]

_PATH: Final = "/v1/completions"
_BODY: Final[JSON] = {"prompt": ADDRESS, "max_tokens": 48, "min_tokens": 48, "temperature": 0}
_DAMAGED_PAGE: Final = 2
_REFUSED: Final = "reference_engine:pages_refused_total"
_COMPUTED: Final = 'reference_engine:prompt_tokens_total{source="computed"}'


async def damage_verified(
    client: httpx.AsyncClient, prefill: Server, decode: Server, single: Server, store_url: str, display: Display
) -> None:
    """Show that a damaged page is refused, its part of the prefix recomputed, and the tokens are right."""
    before = await scrape(client, decode.url)
    reply = await _damaged(client, prefill, decode, store_url)
    after = await scrape(client, decode.url)
    refused = {name: int(count - before.get(name, 0)) for name, count in after.items() if name.startswith(_REFUSED)}
    computed = int(after[_COMPUTED] - before[_COMPUTED])
    reasons = ", ".join(name.partition('"')[2].rstrip('"}') for name, count in refused.items() if count)
    display.check(sum(refused.values()) == 1, f"{decode.name} refused one page ({reasons})")
    display.check(
        1 < computed < reply.count("prompt_tokens"),
        f"{decode.name} recomputed {computed} of {reply.count('prompt_tokens')} prompt tokens, not only the last one",
    )
    display.check(reply.outcome == await _expected(client, single), "the tokens are those of one engine")


async def damage_unchecked(
    client: httpx.AsyncClient, prefill: Server, decode: Server, single: Server, store_url: str, display: Display
) -> None:
    """Show that the same damage changes the tokens where nobody checks: the KV that travels does matter."""
    reply = await _damaged(client, prefill, decode, store_url)
    display.check(
        reply.outcome != await _expected(client, single), "without verification the same byte changed the tokens"
    )


async def _damaged(client: httpx.AsyncClient, prefill: Server, decode: Server, store_url: str) -> Reply:
    """Prefill, flip a byte, decode."""
    first = await ask(
        client,
        prefill.url,
        _PATH,
        {**_BODY, "max_tokens": 1, "min_tokens": 0, "kv_transfer_params": _document("prefill")},
    )
    result = codec.read_request(first.kv_transfer_params)
    assert result is not None
    assert result.load_keys is not None
    if len(result.load_keys) <= _DAMAGED_PAGE:
        raise AnswerError(f"{prefill.name} stored {len(result.load_keys)} pages, too few to damage one in the middle")
    key = result.load_keys[_DAMAGED_PAGE]
    if StoreURL.parse(store_url).scheme == "peer":
        with forged_peer(store_url, result, key) as forged:
            return await ask(client, decode.url, _PATH, {**_BODY, "kv_transfer_params": _document("decode", forged)})
    flip_stored_byte(store_url, key)
    return await ask(client, decode.url, _PATH, {**_BODY, "kv_transfer_params": _document("decode", result)})


async def _expected(client: httpx.AsyncClient, single: Server) -> tuple[object, ...]:
    return (await ask(client, single.url, _PATH, _BODY)).outcome


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
