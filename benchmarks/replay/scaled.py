"""A trace scaled down to reference engines, and what one policy's fleet of them is.

A block of 512 tokens is one of 16, so that the longest prompt of the trace fits into the engines' 4,096 tokens, and the
pace at which they compute is that of blocks: they sleep for what a larger model would take.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Final, Literal, NamedTuple

import httpx

from benchmarks.replay.trace import BLOCK, Request
from benchmarks.replay.world import Cost, World
from benchmarks.replay.world import Store as Shared
from demo.client import scrape
from demo.processes import Processes, Server, free_port, proxy_command

__all__ = ["TOKENS", "Counts", "Fleet", "Scale", "Store", "body", "scaled"]

TOKENS: Final = 16
"""That stand for a block of the trace: a block of the engines' caches."""
_PAGE: Final = 64
"""Tokens of a stored page."""
_TOKEN_BYTES: Final = 2048
"""Of a store: the reference engines' model has 1536 bytes of KV, and a page takes whole units."""
_UNIT: Final = 64 << 10
_LEASE_S: Final = 3
"""For so long a peer keeps what a decode engine is to fetch; what is fetched is fetched at once."""
_ANSWER: Final = 4
"""Tokens of an answer at most: what is measured is the first."""
_LONGEST: Final = 4096
"""Tokens of prompt and answer that an engine takes."""
_LINK: Final = 1e7
"""Tokens of the trace that one engine fetches in a second, for the model: some 0.5 GB/s of the engines' own."""
_SOURCES: Final = ("local_cache", "external_kv", "computed")

Store = Literal["peer", "file"]


class Counts(NamedTuple):
    """Tokens of prompts, by where their KV came from, as engines count."""

    local: float = 0.0
    """The engine's own cache."""
    fetched: float = 0.0
    """The store: with peers, what the engine itself had saved there."""
    computed: float = 0.0

    def since(self, before: "Counts") -> "Counts":
        """Returns the counts since `before`."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def asked(self) -> float:
        """The sum of all kinds."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Scale:
    """A `Scale` says how large and how fast the engines are."""

    prefill: int
    decode: int
    blocks: int
    """Of a prefill engine's cache, and as many of what it keeps for others, or in the common store for each."""
    tokens_per_s: int
    """That a prefill engine computes."""
    store: Store

    @property
    def world(self) -> World:
        """Returns the same fleet for the model."""
        cost = Cost(fixed_s=0.0, tokens_per_s=self.tokens_per_s * BLOCK / TOKENS)
        common = self.store == "file"
        store = Shared(self.blocks * self.prefill, _LINK, self.prefill * _LINK) if common else None
        return World(self.blocks, workers=self.prefill, cost=cost, store=store)


def scaled(trace: Sequence[Request]) -> list[Request]:
    """Requests of whole blocks, which is all that is sent.

    Raises:
        ValueError: one is longer than an engine takes.
    """
    longest = max(len(one.blocks) for one in trace)
    if longest * TOKENS + _ANSWER > _LONGEST:
        raise ValueError(f"a prompt has {longest} blocks; engines take at most {(_LONGEST - _ANSWER) // TOKENS}")
    return [one._replace(tokens=len(one.blocks) * BLOCK) for one in trace]


@cache
def _ids(block: int) -> str:
    return ",".join(map(str, Random(block).choices(range(32, 127), k=TOKENS)))


def body(request: Request) -> bytes:
    """Returns the body of a streaming request, whose answer is scaled down as its prompt is."""
    answer = max(1, min(_ANSWER, request.output * TOKENS // BLOCK))
    said = {"model": "reference", "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True}
    return b'%b,"prompt":[%b]}' % (json.dumps(said)[:-1].encode(), ",".join(map(_ids, request.blocks)).encode())


class Fleet:
    """The engines of one policy, and the proxy in front of them."""

    def __init__(self, policy: str, scale: Scale, processes: Processes, folder: Path) -> None:
        """Start it; `folder` is its own."""
        self.policy = policy
        self._processes = processes
        nbytes = scale.blocks * TOKENS * _TOKEN_BYTES // _UNIT * _UNIT
        url = f"peer://127.0.0.1?size={nbytes}&lease={_LEASE_S}"
        if scale.store == "file":
            url = f"file://{folder}/kv?size={scale.prefill * nbytes}"
        pages = ("--page-tokens", str(_PAGE), "--block-size", str(TOKENS))
        pace = ("--blocks", str(scale.blocks), "--tokens-per-s", str(scale.tokens_per_s), "--max-sequences", "1")
        self.prefill = [processes.engine(f"p{at}", "prefill", url, *pages, *pace) for at in range(scale.prefill)]
        self.decode = [processes.engine(f"d{at}", "decode", url, *pages) for at in range(scale.decode)]
        self.port = free_port()
        command = proxy_command((), (), "store")
        instances = [
            {"id": each.name, "url": each.url, "role": role, **({} if scale.store == "file" else {"store": False})}
            for role, engines in (("prefill", self.prefill), ("decode", self.decode))
            for each in engines
        ]
        (folder / "fleet.yaml").write_text(json.dumps({"instances": instances}))
        command += ["--config", str(folder / "fleet.yaml"), "--port", str(self.port), "--policy", policy]
        command += ["--probe", "1", "--log-requests", "off"]
        self.proxy: Server = processes.start(f"proxy-{policy}", *command, port=self.port)

    def wait_ready(self) -> None:
        """Raises ProcessError if one of them does not start."""
        self._processes.wait_ready(*self.prefill, *self.decode, self.proxy, within_s=120.0)

    async def counted(self, client: httpx.AsyncClient) -> tuple[Counts, Counts]:
        """Returns the counts so far of all prefill engines, and of all decode engines."""
        return await _counted(client, self.prefill), await _counted(client, self.decode)


async def _counted(client: httpx.AsyncClient, engines: Sequence[Server]) -> Counts:
    seen = [await scrape(client, each.url) for each in engines]
    return Counts(
        *(sum(one[f'reference_engine:prompt_tokens_total{{source="{name}"}}'] for one in seen) for name in _SOURCES)
    )
