"""Multi-turn conversations through the proxy, each request compared with one engine that does all the work.

The one rule: requests go one after the other, so that what the engines count belongs to the request in the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx

from demo.client import JSON, ask_stream, scrape
from demo.display import Display
from demo.processes import Server
from demo.texts import CONVERSATIONS, Conversation

__all__ = ["REFERENCE", "VLLM", "Counts", "Fleet", "hold_conversations"]

_LIMITS: Final[JSON] = {"seed": 12957, "max_tokens": 64, "min_tokens": 48}


@dataclass(frozen=True, slots=True)
class Counts:
    """Where engines count the KV that they had from outside."""

    metric: str
    label: str
    """Stands among the metric's."""
    per_unit: int
    unit: str

    def of(self, counters: Mapping[str, float]) -> float:
        """That sum, in units, of what `scrape` gives."""
        found = (n for name, n in counters.items() if name.startswith(self.metric) and self.label in name)
        return sum(found) / self.per_unit


REFERENCE: Final = Counts("reference_engine:kv_bytes_loaded_total", "", 1024, "KiB")
VLLM: Final = Counts("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"', 1, "tok")
"""Source: vLLM 0.32.0 v1/metrics/loggers.py."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers of the demo."""

    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]
    single: Server
    """Does all the work alone, without a store."""
    proxy: Server
    counts: Counts = REFERENCE
    more: JSON = field(default_factory=dict[str, object])
    """Members of every request."""


class _Dialogue:
    """A conversation as it grows."""

    def __init__(self, conversation: Conversation) -> None:
        self._chat = conversation.endpoint == "chat"
        self._temperature = conversation.temperature
        self._messages: list[JSON] = [{"role": "system", "content": conversation.opening}]
        self._text = conversation.opening

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    def body(self, more: JSON) -> JSON:
        said: JSON = {"messages": self._messages} if self._chat else {"prompt": self._text}
        return {**_LIMITS, "temperature": self._temperature, **said, **more}

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._text += text

    def assistant(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})
        self._text += text + "\n"


async def hold_conversations(client: httpx.AsyncClient, fleet: Fleet, display: Display, turns: int) -> None:
    """Hold all conversations, `turns` turns each, and print a row per request."""
    display.header(fleet.counts.unit)
    dialogues = [_Dialogue(conversation) for conversation in CONVERSATIONS]
    different = 0
    for turn in range(turns):
        for conversation, dialogue in zip(CONVERSATIONS, dialogues, strict=True):
            dialogue.user(conversation.turns[turn])
            body = dialogue.body(fleet.more)
            before = await _loaded(client, fleet, fleet.prefill), await _loaded(client, fleet, fleet.decode)
            ours = await ask_stream(client, fleet.proxy.url, dialogue.path, body)
            after = await _loaded(client, fleet, fleet.prefill), await _loaded(client, fleet, fleet.decode)
            theirs = await ask_stream(client, fleet.single.url, dialogue.path, body)
            equal = ours.outcome == theirs.outcome
            different += not equal
            prompt, cached = ours.count("prompt_tokens"), ours.count("cached_tokens")
            display.row(
                conversation.name,
                turn + 1,
                ours.headers.get("x-kvparams-prefill", "?"),
                ours.headers.get("x-kvparams-decode", "?"),
                prompt,
                cached,
                prompt - cached,
                ours.count("completion_tokens"),
                1000 * ours.ttft_s,
                after[0] - before[0],
                after[1] - before[1],
                "yes" if equal else "NO",
            )
            dialogue.assistant(ours.text)
    print(flush=True)
    total = turns * len(CONVERSATIONS)
    display.check(not different, f"{total - different} of {total} answers have the tokens of one engine")
    used = await _loaded(client, fleet, fleet.decode)
    display.check(used > 0, "KV computed by prefill engines was used by decode engines")


async def _loaded(client: httpx.AsyncClient, fleet: Fleet, servers: tuple[Server, ...]) -> float:
    """How much KV these engines have had from outside since they started, in the fleet's unit."""
    return sum([fleet.counts.of(await scrape(client, server.url)) for server in servers])
