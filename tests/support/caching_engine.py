"""Provides an engine with a prefix cache of limited size, which reports what it finds there as engines do."""

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from tests.support.recording_engine import Recorded, RecordingEngine

__all__ = ["BYTES_PER_TOKEN", "CachingEngine"]

BYTES_PER_TOKEN: Final = 4
_BLOCK_TOKENS: Final = 16
_TOKENS_PER_S: Final = 80_000


@dataclass(slots=True)
class CachingEngine(RecordingEngine):
    """Keeps the blocks of prompts that were used last."""

    capacity_blocks: int = 1 << 20
    seen_tokens: int = 0
    """Tokens of all prompts."""
    found_tokens: int = 0
    """Of these, tokens that were in the cache."""
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _blocks: "OrderedDict[str, None]" = field(default_factory=OrderedDict[str, None])

    def record(self, request: Recorded) -> None:
        """Looks up a prompt, and keeps it."""
        self.requests.append(request)
        prompt: str = json.loads(request.body)["prompt"]
        size = _BLOCK_TOKENS * BYTES_PER_TOKEN
        prefixes = [prompt[:end] for end in range(size, len(prompt), size)]
        found = next((number for number, each in enumerate(prefixes) if each not in self._blocks), len(prefixes))
        for each in reversed(prefixes):  # the end of a prompt is evicted before its beginning
            self._blocks.pop(each, None)
            self._blocks[each] = None
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)
        self.prompt_tokens, self.cached_tokens = len(prompt) // BYTES_PER_TOKEN, found * _BLOCK_TOKENS
        self.seen_tokens += self.prompt_tokens
        self.found_tokens += self.cached_tokens

    async def compute(self, tokens: int) -> None:
        """Computes one prompt after the other."""
        loop = asyncio.get_running_loop()
        async with self._computing:
            done = loop.create_future()
            loop.call_later(tokens / _TOKENS_PER_S, done.set_result, None)
            await done
