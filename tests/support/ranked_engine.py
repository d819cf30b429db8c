"""Provides an engine with several data-parallel ranks behind one URL, each with a prefix cache of its own.

It follows vLLM 0.32.0: the header `x-data-parallel-rank` names the rank, a rank that does not exist is refused, and
without the header the engine chooses itself. A prefill leg is answered as a NixlConnector does.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.caching_engine import CachingEngine
from tests.support.recording_engine import Recorded, RecordingEngine

__all__ = ["RANK_HEADER", "RankedEngine"]

RANK_HEADER: Final = "x-data-parallel-rank"


@dataclass(slots=True)
class RankedEngine(RecordingEngine):
    """Serves like `RecordingEngine`, with `len(ranks)` caches."""

    ranks: list[CachingEngine] = field(default_factory=list[CachingEngine])
    """They serve nothing themselves: a rank is a cache, a queue and its counts."""
    start: int = 0
    """The number of the first rank in the whole deployment."""
    named_ranks: Counter[str] = field(default_factory=Counter[str])
    """Counts requests by what the header says; the empty text where there is none."""
    slowness: int = 1
    """How many times as long as in a `CachingEngine` it takes to compute a token."""
    lies_about_rank: bool = False
    """Whether prefill names the rank after its own in its answers."""
    foreign: dict[int, int] = field(default_factory=dict[int, int])
    """Requests that /metrics shows besides, by the number of the rank."""
    metrics_reads: int = 0
    probes: int = 0

    @property
    def seen_tokens(self) -> list[int]:
        """Prompt tokens of each rank."""
        return [rank.seen_tokens for rank in self.ranks]

    @property
    def found_tokens(self) -> list[int]:
        """Prompt tokens that each rank had in its cache."""
        return [rank.found_tokens for rank in self.ranks]

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        if path == "/metrics":
            self.metrics_reads += 1
            return self._metrics()
        if method != "POST":
            self.probes += path == "/v1/models"
            return await RecordingEngine._answer(self, method, path, headers, body)
        named = headers.get(RANK_HEADER, "")
        self.named_ranks[named] += 1
        self.requests.append(Recorded(path, headers, body))
        index = int(named) if named else len(self.requests) % len(self.ranks)
        if index >= len(self.ranks):
            return _response(400, {"error": {"message": f"data_parallel_rank {index} is out of range", "code": 400}})
        rank = self.ranks[index]
        params: dict[str, Any] = json.loads(body).get("kv_transfer_params") or {}
        rank.record(Recorded(path, headers, body))
        cached, tokens = rank.cached_tokens, rank.prompt_tokens
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": details}
        rank.running += 1
        self.running += 1
        try:
            await self.go_on.wait()
            await rank.compute(0 if params.get("do_remote_prefill") else self.slowness * (tokens - cached))
        finally:
            rank.running -= 1
            self.running -= 1
        document: dict[str, Any] = {"id": "c", "model": "m", "usage": usage}
        document["choices"] = [{"index": 0, "text": "x", "finish_reason": "length"}]
        if path == "/v1/responses":
            content: list[dict[str, Any]] = [{"type": "output_text", "text": "x", "annotations": []}]
            document |= {"object": "response", "status": "completed"}
            document["output"] = [{"type": "message", "role": "assistant", "content": content}]
        if params.get("do_remote_decode"):
            number = self.start + (index + self.lies_about_rank) % len(self.ranks)
            document["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"engine_dp{number}",
                "remote_block_ids": [[1]],
                "remote_host": "127.0.0.1",
                "remote_port": 5600 + number,
                "remote_request_id": f"r-{len(self.requests)}",
                "tp_size": 1,
            }
        return _response(200, document)

    def _metrics(self) -> bytes:
        lines = [
            f'vllm:num_requests_running{{engine="{at}",model_name="m"}} {rank.running + self.foreign.get(at, 0)}'
            for at, rank in enumerate(self.ranks, self.start)
        ]
        text = "\n".join([*lines, ""]).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)


def _response(status: int, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
