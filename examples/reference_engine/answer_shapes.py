"""The shapes of answers: completions and chat as OpenAI's API has them, token-in / token-out as vLLM has it.

A stream says the same as one answer, in the order in which it became known.
"""

from collections.abc import Sequence as Listed

from reference_engine.answers import JSON, Answer, Grown, chat_logprobs, token_text
from reference_engine.ask import Ask
from reference_engine.sampling import Choice
from reference_engine.sequence import Event
from reference_engine.tokenizer import decode

__all__ = ["Chat", "Completion", "Generated"]


class Completion(Answer):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(self, ask: Ask, request_id: str, model: str) -> None:
        super().__init__(ask, {"id": f"cmpl-{request_id}"}, model)

    def whole_choice(self, index: int, grown: Grown) -> JSON:
        """See `Answer.whole_choice`."""
        choice: JSON = {
            "index": index,
            "text": self._echoed(index) + grown.text,
            "logprobs": self._logprobs(index, grown.tokens, 0),
            "finish_reason": grown.finish,
            "stop_reason": grown.reason,
        }
        if self.ask.return_token_ids:
            choice |= {"token_ids": grown.ids, "prompt_token_ids": self.prompt_of(index)}
        return choice

    def chunk_choice(self, event: Event, grown: Grown) -> JSON | None:
        """See `Answer.chunk_choice`."""
        index, begins = event.sequence.index, len(grown.tokens) == 1
        new = [] if event.choice is None else [event.choice]
        text = (self._echoed(index) if begins else "") + event.text
        if not _worth(self.ask, event, text):
            return None
        choice: JSON = {
            "text": text,
            "logprobs": self._logprobs(index, new, len(grown.tokens) - len(new)),
            "finish_reason": event.finish,
            "stop_reason": event.reason,
        }
        if self.ask.return_token_ids:
            choice["token_ids"] = [one.token for one in new]
            if begins:
                choice["prompt_token_ids"] = self.prompt_of(index)
        return choice

    def _echoed(self, index: int) -> str:
        """The prompt's text where it is asked for; who asks for token ids has the prompt in these."""
        return decode(self.prompt_of(index)) if self.ask.echo and not self.ask.return_token_ids else ""

    def _logprobs(self, index: int, tokens: Listed[Choice], before: int) -> JSON | None:
        """Returns the logprobs of `tokens`, which stand behind `before` others; a token is a character here."""
        if not tokens or tokens[0].logprob is None:
            return None
        return {
            "text_offset": [before + at for at in range(len(tokens))],
            "token_logprobs": [choice.logprob for choice in tokens],
            "tokens": [token_text(choice.token) for choice in tokens],
            "top_logprobs": [
                {token_text(token): logprob for token, logprob in ((choice.token, choice.logprob), *choice.top)}
                for choice in tokens
            ],
        }


class Chat(Answer):
    """`/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, ask: Ask, request_id: str, model: str) -> None:
        super().__init__(ask, {"id": f"chatcmpl-{request_id}"}, model)
        self._request_id = request_id

    def whole(self, counted: JSON, kv_transfer_params: JSON | None) -> JSON:
        """See `Answer.whole`."""
        said = super().whole(counted, kv_transfer_params)
        return said | {"prompt_token_ids": self.prompt_of(0)} if self.ask.return_token_ids else said

    def opening(self) -> bytes:
        """The role of each choice."""
        more = {"prompt_token_ids": self.prompt_of(0)} if self.ask.return_token_ids else {}
        delta: JSON = {"role": "assistant", "content": ""}
        return b"".join(
            self.event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **more)
            for index in range(len(self.grown))
        )

    def whole_choice(self, index: int, grown: Grown) -> JSON:
        """See `Answer.whole_choice`."""
        message: JSON = {"role": "assistant", "content": grown.text}
        if self.ask.tool_use is not None:
            name, arguments = _call(grown.text)
            called = [self._tool_call(index, name, arguments)] if arguments else []
            message = {"role": "assistant", "content": "", "tool_calls": called}
        choice: JSON = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(grown.tokens),
            "finish_reason": self._finish(grown.finish),
            "stop_reason": grown.reason,
        }
        return choice | {"token_ids": grown.ids} if self.ask.return_token_ids else choice

    def chunk_choice(self, event: Event, grown: Grown) -> JSON | None:
        """See `Answer.chunk_choice`."""
        delta: JSON = {"content": event.text}
        if self.ask.tool_use is not None:
            delta = self._tool_delta(event, grown)
        if not _worth(self.ask, event, bool(delta.get("content") or delta.get("tool_calls"))):
            return None
        new = [] if event.choice is None else [event.choice]
        choice: JSON = {"delta": delta, "logprobs": chat_logprobs(new), "finish_reason": self._finish(event.finish)}
        if event.finish is not None:
            choice["stop_reason"] = event.reason
        return choice | {"token_ids": [one.token for one in new]} if self.ask.return_token_ids else choice

    def _finish(self, finish: str | None) -> str | None:
        """A call that the model chose ends as such; one that the client named just stops."""
        called = self.ask.tool_use is not None and self.ask.tool_use.required
        return "tool_calls" if called and finish == "stop" else finish

    def _tool_call(self, index: int, name: str, arguments: str) -> JSON:
        identity = f"call-{self._request_id}-{index}"
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _tool_delta(self, event: Event, grown: Grown) -> JSON:
        """The name once it is complete, and then the arguments as they grow."""
        _, before = _call(grown.text[: len(grown.text) - len(event.text)])
        name, arguments = _call(grown.text)
        if len(arguments) == len(before):
            return {}
        index = event.sequence.index
        if not before:
            return {"tool_calls": [{"index": 0, **self._tool_call(index, name, arguments)}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments[len(before) :]}}]}


class Generated(Answer):
    """`/inference/v1/generate`."""

    kind = chunk_kind = ""

    def __init__(self, ask: Ask, request_id: str, model: str) -> None:
        super().__init__(ask, {"request_id": f"generate-tokens-{request_id}"}, model)

    def whole_choice(self, index: int, grown: Grown) -> JSON:
        """See `Answer.whole_choice`."""
        return {
            "index": index,
            "logprobs": chat_logprobs(grown.tokens, as_ids=True),
            "finish_reason": grown.finish,
            "stop_reason": grown.reason,
            "token_ids": grown.ids,
        }

    def chunk_choice(self, event: Event, grown: Grown) -> JSON | None:
        """See `Answer.chunk_choice`."""
        new = [] if event.choice is None else [event.choice]
        return {
            "logprobs": chat_logprobs(new, as_ids=True),
            "finish_reason": event.finish,
            "stop_reason": event.reason,
            "token_ids": [one.token for one in new],
        }


def _worth(ask: Ask, event: Event, said: object) -> bool:
    """Returns True if an event is sent.

    It is not sent while its text may still become a stop string and no other member was asked for.
    """
    listed = event.choice is not None and (event.choice.logprob is not None or ask.return_token_ids)
    return bool(said) or event.finish is not None or listed


def _call(text: str) -> tuple[str, str]:
    """A tool call as the grammar has it: the name, and the arguments, which begin with a brace."""
    name, brace, arguments = text.partition("{")
    return name, brace + arguments
