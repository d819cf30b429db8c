"""Draws requests of all kinds from a seed, so that the answers of two servers can be compared.

Every request has exactly one right answer. So it has a seed wherever it draws, and how much of its prompt is cached is
the same everywhere: prompts share a prefix only within a lane, whose requests run one after the other, no prompt comes
twice, and no prompt continues generated text.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

__all__ = ["CHAT", "COMPLETIONS", "GENERATE", "JSON", "Case", "lanes"]

JSON = dict[str, object]
Expected = Literal["answer", "engine", "early"]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"

_EOS = 257
_BLOCK_TOKENS = 16
_MAX_MODEL_LEN = 4096
_FAMILY = 25
"""Requests whose prompts begin alike. Few enough that no engine has forgotten the first when the last one comes."""
_UNKNOWN: JSON = {
    "x_unknown": {"deep": [[{"a": None}], 1.5e300, -0.0, 2**53 + 1, 'Grüße 🙂 \\ " \u2028'], "": True},
    "user": "someone",
    "metadata": {"kv_transfer_params": "only a name here", "prompt_tokens": 7},
    "store": False,
    "priority": 0,
    "vllm_xargs": {"anything": 1},
    "kv_transfer_params": {"do_remote_prefill": True},  # the client has no say in it, and one engine ignores it
    "request_id": "the-client-s-own",
}
_SCHEMA: JSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "kind": {"enum": ["a", "b", None, 3]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["name"],
}
_TOOLS = [
    {"type": "function", "function": {"name": "look-up", "description": "Finds.", "parameters": _SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    path: str
    body: JSON
    expected: Expected = "answer"
    """An answer; a refusal that only an engine can make, for a proxy to pass on; one that a proxy makes itself, in its
    own words."""


def lanes(seed: int, count: int, paths: tuple[str, ...], width: int = 8) -> list[list[Case]]:
    """`count` requests to these endpoints in `width` lanes, each to be sent in its order."""
    return [_lane(seed, number, -(-count // width), paths) for number in range(width)]


def _lane(seed: int, number: int, count: int, paths: tuple[str, ...]) -> list[Case]:
    draw = random.Random(f"{seed}/{number}")
    family = _Family(draw, "")
    cases: list[Case] = []
    for at in range(count):
        if at % _FAMILY == 0:
            family = _Family(draw, f"{seed}-{number}-{at}")
        path = draw.choice(paths)
        case = Case(path, family.body(path))
        if (
            draw.random() < 0.1
        ):  # of a prompt that is refused late, the prefill engine has the KV, and one engine has not
            apart = _on_top(case, "engine", cache_salt=f"fault-{draw.random()}")
            case = draw.choice(_FAULTS)(apart)
        cases.append(case)
    return cases


class _Family:
    """Makes bodies whose prompts begin alike."""

    def __init__(self, draw: random.Random, salt: str) -> None:
        self._draw = draw
        self._ids = [draw.randrange(256) for _ in range(8 * _BLOCK_TOKENS)]
        self._text = "".join(draw.choice("abcdefgh é漢") for _ in range(100))
        self._salt = salt
        self._made = 0

    def body(self, path: str) -> JSON:
        draw, body = self._draw, self._sampling()
        if path == GENERATE:
            sampled, body = body, JSON(token_ids=self._prompt_ids())
            body["sampling_params"] = sampled
            if draw.random() < 0.3:
                sampled["logprobs"] = draw.choice([0, 1, 3])
            if draw.random() < 0.1:
                sampled["structured_outputs"] = draw.choice([{"choice": ["yes", "yessir"]}, {"json": _SCHEMA}])
        elif path == CHAT:
            body = self._chat(body)
        else:
            body = self._completion(body)
        body["cache_salt"] = self._salt
        if draw.random() < 0.5:
            body["stream"] = True
            if draw.random() < 0.7:
                options: JSON = {"include_usage": draw.random() < 0.8}
                if draw.random() < 0.4:
                    options["continuous_usage_stats"] = True
                body["stream_options"] = options
        elif draw.random() < 0.2:
            body["stream"] = draw.choice([False, None])
        if draw.random() < 0.3:
            body["model"] = "reference"
        if path != GENERATE and draw.random() < 0.3:
            body["return_token_ids"] = True
        for name in draw.sample(sorted(_UNKNOWN), draw.choice([0, 0, 1, 3])):
            body[name] = _UNKNOWN[name]
        names = list(body)
        draw.shuffle(names)
        return {name: body[name] for name in names}

    def _sampling(self) -> JSON:
        """Members that mean the same on all endpoints; each is mostly absent."""
        draw = self._draw
        body: JSON = {"max_tokens": draw.choice([1, 1, 2, 3, 7, 12, 20])}
        if draw.random() < 0.1:
            del body["max_tokens"]
        limit = draw.choice([1, 2, 3]) if "max_tokens" not in body else int(str(body["max_tokens"]))
        body["temperature"] = draw.choice([0, 0.5, 1, 1.7])
        if body["temperature"] or draw.random() < 0.3:
            body["seed"] = draw.randrange(-(1 << 62), 1 << 62)
        if body["temperature"] and draw.random() < 0.3:
            body["n"] = draw.choice([1, 2, 3])
        maybe: list[tuple[float, str, Callable[[], object]]] = [
            (0.3, "top_p", lambda: draw.choice([1, 0.9, 0.4])),
            (0.3, "top_k", lambda: draw.choice([-1, 0, 5, 40])),
            (0.1, "min_p", lambda: draw.choice([0, 0.05, 0.5])),
            (0.2, "min_tokens", lambda: draw.randrange(limit + 1)),
            (0.3, "ignore_eos", lambda: draw.random() < 0.7),
            (0.2, "stop", lambda: draw.choice(["a", "zq", [], ["{", "xy", "!", "nope"], list("abcdefghijklmno")])),
            (0.1, "include_stop_str_in_output", lambda: draw.random() < 0.8),
            (0.15, "stop_token_ids", lambda: draw.sample(range(0x20, 0x7F), draw.choice([0, 1, 10, 60]))),
            (0.1, "presence_penalty", lambda: draw.choice([0, 1.5, -2])),
            (0.1, "frequency_penalty", lambda: draw.choice([0, 0.7, -2])),
            (0.1, "repetition_penalty", lambda: draw.choice([1, 1.3, 0.5])),
            (0.1, "logit_bias", lambda: {str(draw.choice([_EOS, 65, 66])): draw.choice([-100, 5, 100])}),
        ]
        body |= {name: make() for chance, name, make in maybe if draw.random() < chance}
        return body

    def _completion(self, body: JSON) -> JSON:
        draw = self._draw
        kind = draw.random()
        if kind < 0.4:
            body["prompt"] = self._prompt_ids()
        elif kind < 0.75:
            body["prompt"] = self._prompt_text()
        else:  # nothing shared within a batch: what one prompt finds would depend on how far another has come
            make: Callable[[], object] = draw.choice([self._own_ids, self._own_text])
            body["prompt"] = [make() for _ in range(draw.choice([1, 2, 3]))]
        if draw.random() < 0.2:
            body["echo"] = True
        elif draw.random() < 0.3:
            body["logprobs"] = draw.choice([0, 1, 5])
        if draw.random() < 0.15:
            body |= self._form()
        return body

    def _chat(self, body: JSON) -> JSON:
        draw = self._draw
        system = {"role": "system", "content": self._text[: draw.randrange(100)]}
        messages: list[object] = [system] if draw.random() < 0.7 else []
        messages.append({"role": "user", "content": f"{self._unique()} {self._text[:10]}"})
        if draw.random() < 0.3:
            messages.append({"role": "assistant", "content": "I said ☃ so."})
            messages.append(
                {"role": "user", "content": [{"type": "text", "text": "Did"}, {"type": "text", "text": "n't"}]}
            )
        body["messages"] = messages
        if draw.random() < 0.3:
            body["max_completion_tokens"] = body.pop("max_tokens", 5)
        if draw.random() < 0.3:
            likely: list[JSON] = [{"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"logprobs": False}]
            body |= draw.choice(likely)
        asked = draw.random()
        if asked < 0.25:
            body["tools"] = _TOOLS
            named = {"type": "function", "function": {"name": draw.choice(["look-up", "stop"])}}
            body["tool_choice"] = draw.choice(["auto", "none", "required", "required", named, named])
        elif asked < 0.4:
            body |= self._form()
        if asked < 0.4 and draw.random() < 0.6:  # room for the whole of it
            body["max_completion_tokens"] = 90
        return body

    def _form(self) -> JSON:
        schema: JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
        forms: list[JSON] = [
            {"response_format": {"type": "text"}},
            {"response_format": {"type": "json_object"}},
            {"response_format": schema},
            {"structured_outputs": {"choice": ["yes", "no", "maybe", "maybe not"]}},
            {"structured_outputs": {"json": _SCHEMA}},
        ]
        return self._draw.choice(forms)

    def _unique(self) -> str:
        """Text that no other prompt of the family has, and that no engine generates."""
        self._made += 1
        return f"\x01{self._made}\x02"

    def _prompt_ids(self) -> list[int]:
        """The family's beginning up to somewhere, often beside a block's end, and something of its own."""
        draw = self._draw
        edge = draw.randrange(9) * _BLOCK_TOKENS + draw.choice([0, 0, -1, 1, 7])
        return self._ids[: max(edge, 0)] + self._own_ids()

    def _prompt_text(self) -> str:
        return self._text[: self._draw.randrange(100)] + self._own_text()

    def _own_ids(self) -> list[int]:
        own = [self._draw.randrange(264) for _ in range(self._draw.choice([0, 1, 5, 14, 15, 16, 17, 40]))]
        return [*self._unique().encode(), *own]

    def _own_text(self) -> str:
        return self._unique() + "".join(self._draw.choice('xyz ß🙂\n"\\') for _ in range(self._draw.randrange(30)))


def _inside(body: JSON) -> JSON:
    return cast("JSON", body["sampling_params"])


def _with(case: Case, expected: Expected, **changes: object) -> Case:
    """The case with other sampling members, wherever its endpoint has them."""
    if case.path != GENERATE:
        return _on_top(case, expected, **changes)
    return _on_top(case, expected, sampling_params=_inside(case.body) | changes)


def _on_top(case: Case, expected: Expected, **changes: object) -> Case:
    return replace(case, body=case.body | changes, expected=expected)


def _too_long(case: Case) -> Case:
    prompt = [7] * _MAX_MODEL_LEN
    message = {"role": "user", "content": "x" * _MAX_MODEL_LEN}
    long: dict[str, JSON] = {
        COMPLETIONS: {"prompt": prompt},
        CHAT: {"messages": [message]},
        GENERATE: {"token_ids": prompt},
    }
    return _on_top(case, "engine", **long[case.path])


def _unanswerable(case: Case) -> Case:
    """No prompt at all."""
    empty: dict[str, JSON] = {COMPLETIONS: {"prompt": ""}, CHAT: {"messages": []}, GENERATE: {"token_ids": []}}
    return _on_top(case, "early", **empty[case.path])


_FAULTS: Final[list[Callable[[Case], Case]]] = [
    lambda case: _with(case, "engine", max_tokens=3, max_completion_tokens=3, min_tokens=4),
    lambda case: _with(case, "engine", max_tokens=_MAX_MODEL_LEN, max_completion_tokens=_MAX_MODEL_LEN),
    lambda case: _with(case, "engine", temperature=-1),
    lambda case: _with(case, "engine", top_p=0),
    lambda case: _with(case, "engine", temperature=0, n=2),
    lambda case: _with(case, "engine", stop=["a", ""]),
    lambda case: _with(case, "engine", stop_token_ids=[264]),
    lambda case: _with(case, "engine", logit_bias={"x": 1}),
    lambda case: _with(case, "engine", logprobs=50),
    lambda case: _with(case, "engine", best_of=3),
    lambda case: _with(case, "engine", structured_outputs={"regex": "a+"}),
    lambda case: _with(case, "engine", structured_outputs={"json": {"type": "object", "minProperties": 1}}),
    lambda case: _on_top(case, "engine", stream=False, stream_options={"include_usage": True}),
    _too_long,
    lambda case: _with(case, "early", n=0),
    lambda case: _with(case, "early", max_tokens=0),
    lambda case: _with(case, "early", max_tokens="3"),
    lambda case: _on_top(case, "early", cache_salt=""),
    lambda case: _on_top(case, "early", model="another"),
    lambda case: _on_top(case, "early", stream="yes"),
    _unanswerable,
]
