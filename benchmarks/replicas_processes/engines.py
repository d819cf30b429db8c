"""Stub prefill engines with the simulation's speed and prefix cache, which record what each request found.

The only things scaled down are time and tokens: everything runs `faster` times as fast, and a block of 512 tokens in
the trace is one of `TOKENS` here, the block size that proxies share. A block costs the time of 512 tokens all the same.
"""

import json
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.replay.cache import BlockCache
from benchmarks.replay.trace import BLOCK, Request
from benchmarks.replay.world import Cost
from kvparams_proxy.fleet.prefix_cache_model import SHARED_BLOCK_TOKENS
from tests.support.stub_answers import Ask

__all__ = ["TOKENS", "ModelEngine", "PrefillLog", "PrefillRecord", "request_body"]

TOKENS: Final = SHARED_BLOCK_TOKENS
"""Tokens that stand for a block of the trace."""


@dataclass(frozen=True, slots=True)
class PrefillRecord:
    """A `PrefillRecord` is what the engine saw of one request."""

    engine: int
    blocks: int
    cached_blocks: int
    compute_s: float
    """In the trace's seconds."""


class PrefillLog(dict[int, PrefillRecord]):
    """The records of all engines, by the number of the request."""


class ModelEngine:
    """A `tests.support.stub_connection.Work`: computes one prompt after the other and has a finite prefix cache."""

    def __init__(self, number: int, blocks: int, cost: Cost, faster: float, log: PrefillLog) -> None:
        """Creates an engine with an empty cache of so many blocks."""
        self._number = number
        self._cache = BlockCache(blocks)
        self._cost = cost
        self._faster = faster
        self._log = log
        self._busy_until_s = 0.0

    def begun(self, ask: Ask, body: bytes, now_s: float) -> tuple[Ask, float]:
        """Queues the prompt, and returns the seconds until it is computed."""
        document = json.loads(body)
        blocks: list[int] = document["prompt"][::TOKENS]
        cached = self._cache.match(blocks)
        self._cache.use(blocks)
        context = len(blocks) * BLOCK
        compute_s = self._cost.seconds(max(1, context - cached * BLOCK), context)
        self._busy_until_s = max(now_s, self._busy_until_s) + compute_s / self._faster
        self._log[int(document["user"])] = PrefillRecord(self._number, len(blocks), cached, compute_s)
        tokens = len(blocks) * TOKENS
        known = replace(ask, prompt_tokens=tokens, cached_tokens=min(cached * TOKENS, tokens - 1))
        return known, self._busy_until_s - now_s


def request_body(number: int, request: Request, answer_tokens: int) -> bytes:
    """Returns the body of a streamed completion; the engine finds `number` in it."""
    ids = b"".join(b"%d," % block * TOKENS for block in request.blocks)
    return b'{"model":"stub","stream":true,"max_tokens":%d,"user":"%d","prompt":[%b]}' % (
        answer_tokens,
        number,
        ids[:-1],
    )
