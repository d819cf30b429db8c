"""Builds the common parts of all answers, whole or as server-sent events.

This module decides nothing; counts come from the sequences and their events.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Final

from reference_engine.ask import Ask, RequestError
from reference_engine.sampling import Choice
from reference_engine.sequence import Event, Sequence
from reference_engine.tokenizer import EOS, decode

__all__ = ["DONE", "JSON", "Answer", "Grown", "chat_logprobs", "error_body", "sse", "token_text", "usage"]

JSON = dict[str, object]

DONE: Final = b"data: [DONE]\n\n"


def sse(document: JSON) -> bytes:
    """Returns an event of a stream."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def error_body(error: RequestError) -> JSON:
    """An error as OpenAI's API writes it."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}


def usage(sequences: Listed[Sequence], choices: int) -> JSON:
    """Tokens of the whole request. A prompt counts once, however many choices were asked for."""
    prompt_tokens = sum(len(sequence.prompt) for sequence in sequences[::choices])
    completion_tokens = sum(sequence.generated for sequence in sequences)
    cached_tokens = sum(sequence.cached_tokens for sequence in sequences[::choices])
    return {**_counts(prompt_tokens, completion_tokens), "prompt_tokens_details": {"cached_tokens": cached_tokens}}


def token_text(token: int) -> str:
    """Returns the text of a token in a list of tokens."""
    return "</s>" if token == EOS else decode([token])


def chat_logprobs(tokens: Listed[Choice], *, as_ids: bool = False) -> JSON | None:
    """Log probabilities as chat has them; None where none were asked for. `as_ids` writes tokens as `token_id:7`."""
    if not tokens or tokens[0].logprob is None:
        return None

    def one(token: int, logprob: float | None) -> JSON:
        text = f"token_id:{token}" if as_ids else token_text(token)
        return {"token": text, "logprob": logprob, "bytes": None if as_ids else list(text.encode())}

    return {
        "content": [
            {**one(choice.token, choice.logprob), "top_logprobs": [one(*likely) for likely in choice.top]}
            for choice in tokens
        ]
    }


@dataclass(slots=True)
class Grown:
    """A `Grown` is the part of a choice that has been generated."""

    text: str = ""
    tokens: list[Choice] = field(default_factory=list[Choice])
    finish: str | None = None
    reason: str | int | None = None

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return [choice.token for choice in self.tokens]


class Answer(ABC):
    """The answer to one request. Either `whole` is asked for, or `opening`, `chunk` and `closing` are."""

    kind: str
    """What `object` says of a whole answer; empty where there is no such member."""
    chunk_kind: str
    """The same for an event."""

    def __init__(self, ask: Ask, identity: JSON, model: str) -> None:
        """`identity` is the member that carries the request's id."""
        self.ask = ask
        self.head: JSON = {**identity, "created": int(time.time()), "model": model}
        self.grown = [Grown() for _ in range(len(ask.prompts) * ask.choices)]

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of a choice."""
        return self.ask.prompts[index // self.ask.choices]

    def whole(self, counted: JSON, kv_transfer_params: JSON | None) -> JSON:
        """The answer in one piece, from all events taken in."""
        return {
            **self._marked(self.kind),
            "choices": [self.whole_choice(index, grown) for index, grown in enumerate(self.grown)],
            "usage": counted,
            "kv_transfer_params": kv_transfer_params,
        }

    def take(self, event: Event) -> Grown:
        """Take an event in; the choice as it is now."""
        grown = self.grown[event.sequence.index]
        grown.text += event.text
        if event.choice is not None:
            grown.tokens.append(event.choice)
        grown.finish, grown.reason = event.finish, event.reason
        return grown

    def opening(self) -> bytes:
        """Returns the first events of a stream."""
        return b""

    def chunk(self, event: Event) -> bytes:
        """Returns an event of a stream; empty when it has nothing to say yet."""
        grown, index = self.take(event), event.sequence.index
        choice = self.chunk_choice(event, grown)
        if choice is None:
            return b""
        more: JSON = {}
        if self.ask.continuous_usage:
            more["usage"] = _counts(len(self.prompt_of(index)), len(grown.tokens))
        return self.event([{"index": index, **choice}], **more)

    def closing(self, counted: JSON | None) -> bytes:
        """Returns the last events of a stream: the usage, if it was asked for, and the end marker."""
        return (b"" if counted is None else self.event([], usage=counted)) + DONE

    def event(self, choices: list[JSON], **more: object) -> bytes:
        """Returns an event with the members that all events have."""
        return sse({**self._marked(self.chunk_kind), "choices": choices, **more})

    @abstractmethod
    def whole_choice(self, index: int, grown: Grown) -> JSON:
        """A choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, event: Event, grown: Grown) -> JSON | None:
        """A choice in an event without its index; None: there is nothing to say. The event was taken into `grown`."""

    def _marked(self, kind: str) -> JSON:
        return {**self.head, "object": kind} if kind else dict(self.head)


def _counts(prompt_tokens: int, completion_tokens: int) -> JSON:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
