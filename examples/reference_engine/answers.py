"""Answers as OpenAI's API and vLLM shape them, whole and as server-sent events.

The one rule: nothing here decides anything; what is counted comes from the sequences.
"""

import json
import time
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Final, Literal

from reference_engine.requests import RequestError
from reference_engine.sampling import Choice
from reference_engine.sequence import Event, Sequence
from reference_engine.tokenizer import EOS, decode

__all__ = ["DONE", "Answer", "error_body", "sse", "usage"]

JSON = dict[str, object]

DONE: Final = b"data: [DONE]\n\n"


def sse(document: JSON) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def error_body(error: RequestError) -> JSON:
    """An error as OpenAI's API writes it."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}


def usage(sequences: Listed[Sequence], choices: int) -> JSON:
    """Tokens of the whole request. A prompt counts once, however many choices were asked for."""
    prompt_tokens = sum(len(sequence.prompt) for sequence in sequences[::choices])
    completion_tokens = sum(sequence.generated for sequence in sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in sequences[::choices])},
    }


@dataclass(slots=True)
class _Grown:
    """One choice as far as it has grown."""

    text: str = ""
    tokens: list[Choice] = field(default_factory=list[Choice])
    finish: str | None = None
    reason: str | None = None


class Answer:
    """The answer to one request."""

    def __init__(self, kind: Literal["completion", "chat"], request_id: str, model: str, sequences: int) -> None:
        self._chat = kind == "chat"
        self._head: JSON = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [_Grown() for _ in range(sequences)]

    def whole(self, counted: JSON, kv_transfer_params: JSON | None) -> JSON:
        """The answer in one piece, from all events taken in."""
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._whole_choice(index, grown) for index, grown in enumerate(self._choices)],
            "usage": counted,
            "kv_transfer_params": kv_transfer_params,
        }

    def take(self, event: Event) -> None:
        """Take an event in for `whole`."""
        grown = self._choices[event.sequence.index]
        grown.text += event.text
        if event.choice is not None:
            grown.tokens.append(event.choice)
        grown.finish, grown.reason = event.finish, event.reason

    def opening(self) -> bytes:
        """What a stream begins with: in a chat, the role of each choice."""
        if not self._chat:
            return b""
        delta: JSON = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(len(self._choices))
        )

    def chunk(self, event: Event) -> bytes:
        """One event of a stream; empty when it has nothing to say yet."""
        grown = self._choices[event.sequence.index]
        tokens = [] if event.choice is None or event.choice.logprob is None else [event.choice]
        if not event.text and event.finish is None and not tokens:
            return b""
        choice: JSON = {"index": event.sequence.index}
        if self._chat:
            choice |= {"delta": {"content": event.text}}
        else:
            choice |= {"text": event.text}
        choice |= {"logprobs": self._logprobs(tokens, len(grown.text)), "finish_reason": event.finish}
        if event.finish is not None or not self._chat:
            choice |= {"stop_reason": event.reason}
        grown.text += event.text
        return self._chunk([choice])

    def closing(self, counted: JSON | None) -> bytes:
        """What a stream ends with: the usage, if it was asked for, and the end marker."""
        return (b"" if counted is None else self._chunk([], usage=counted)) + DONE

    def _chunk(self, choices: list[JSON], **more: object) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return sse({**self._head, "object": kind, "choices": choices, **more})

    def _whole_choice(self, index: int, grown: _Grown) -> JSON:
        tokens = [choice for choice in grown.tokens if choice.logprob is not None]
        message: JSON = {"role": "assistant", "content": grown.text}
        content: JSON = {"message": message} if self._chat else {"text": grown.text}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(tokens, 0),
            "finish_reason": grown.finish,
            "stop_reason": grown.reason,
        }

    def _logprobs(self, tokens: list[Choice], offset: int) -> JSON | None:
        if not tokens:
            return None
        if self._chat:
            return {
                "content": [
                    {
                        **_logprob(choice.token, choice.logprob),
                        "top_logprobs": [_logprob(token, logprob) for token, logprob in choice.top],
                    }
                    for choice in tokens
                ]
            }
        return {
            "text_offset": [offset + at for at in range(len(tokens))],  # a token is a character here
            "token_logprobs": [choice.logprob for choice in tokens],
            "tokens": [_text(choice.token) for choice in tokens],
            "top_logprobs": [
                {_text(choice.token): choice.logprob, **{_text(token): logprob for token, logprob in choice.top}}
                for choice in tokens
            ],
        }


def _text(token: int) -> str:
    return "</s>" if token == EOS else decode([token])


def _logprob(token: int, logprob: float | None) -> JSON:
    return {"token": _text(token), "logprob": logprob, "bytes": list(_text(token).encode())}
