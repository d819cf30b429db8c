"""Multi-turn conversations through the proxy, each request compared with one engine that does all the work.

Requests go one after the other, so that what the engines count belongs to the request in the table.
"""

from dataclasses import dataclass, field
from typing import Final

import httpx

from demo.client import JSON, ask_stream, scrape, settled
from demo.counts import REFERENCE, Counts
from demo.display import Display
from demo.processes import Server
from demo.texts import CONVERSATIONS, Conversation

__all__ = ["Fleet", "hold_conversations"]

_LIMITS: Final[JSON] = {"seed": 12957, "max_tokens": 64, "min_tokens": 48}


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
    counts = fleet.counts
    display.header(counts.unit)
    dialogues = [_Dialogue(conversation) for conversation in CONVERSATIONS]
    different = handed_over = 0
    for turn in range(turns):
        for conversation, dialogue in zip(CONVERSATIONS, dialogues, strict=True):
            dialogue.user(conversation.turns[turn])
            body = dialogue.body(fleet.more)
            prefill, decode = (
                await _Seen.of(client, fleet.prefill, counts),
                await _Seen.of(client, fleet.decode, counts),
            )
            ours = await ask_stream(client, fleet.proxy.url, dialogue.path, body)
            to_prefill = await _Seen.of(client, fleet.prefill, counts) - prefill
            to_decode = await _Seen.of(client, fleet.decode, counts) - decode
            theirs = await ask_stream(client, fleet.single.url, dialogue.path, body)
            equal = ours.outcome == theirs.outcome
            different += not equal
            handed_over += to_decode.loaded > 0 and to_decode.computed <= counts.most_computed
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
                to_prefill.loaded,
                to_decode.loaded,
                to_decode.computed,
                "yes" if equal else "NO",
            )
            dialogue.assistant(ours.text)
    print(flush=True)
    total = turns * len(CONVERSATIONS)
    display.check(not different, f"{total - different} of {total} answers have the tokens of one engine")
    for decode_engine in fleet.decode if counts.later else ():
        found = await settled(client, decode_engine.url, fleet.more, lambda found: not counts.undelivered(found))
        if missing := counts.undelivered(found):
            display.check(False, f"the store delivered all that {decode_engine.name} counted on but {missing} tokens")
    display.check(
        handed_over == total,
        f"{handed_over} of {total} prompts were handed to decode, which computed at most {counts.most_computed} of "
        "their tokens itself",
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A `_Seen` holds the engines' counts since they started."""

    loaded: float
    """KV from outside, in the fleet's unit."""
    computed: int
    """Prompt tokens."""

    @classmethod
    async def of(cls, client: httpx.AsyncClient, servers: tuple[Server, ...], counts: Counts) -> "_Seen":
        found = [await scrape(client, server.url) for server in servers]
        return cls(sum(map(counts.loaded, found)), sum(map(counts.computed, found)))

    def __sub__(self, before: "_Seen") -> "_Seen":
        return _Seen(self.loaded - before.loaded, self.computed - before.computed)
