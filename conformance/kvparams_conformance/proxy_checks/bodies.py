"""Checks the bodies of legs: what prefill is asked for, and that nothing else is changed."""

from typing import Any, Final

from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.conversation import SeenLeg
from kvparams_conformance.proxy_checks.helpers import (
    AGGREGATED,
    BOOTSTRAP,
    CONTENT,
    EVERY,
    NIXL,
    STORE,
    WITH_RESULT,
    expect_answered,
)
from kvparams_conformance.raw_json import split_members
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_SPLICED: Final = {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
_LIMITS: Final = {"max_tokens", "max_completion_tokens", "ignore_eos", "stream"}
_ANSWER_ALONE: Final = (
    "stream_options",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "structured_outputs",
    "response_format",
)


def _odd_body(tag: str, *, stream: bool = False) -> bytes:
    """Returns a body that no writer of JSON makes like this: what is written anew is another text."""
    told = '"stream" :true , ' if stream else ""
    return (
        '{ "model" : "m",\t"prompt": "'
        + tag
        + ' \\u0057ho\\/?\\ud83d\\ude00 ü" ,\n"max_tokens":8, '
        + told
        + '"temperature": 0.50,'
        '"x_number":1E+2 , "x_big":18446744073709551615,"x_deep":{"b":[ 1,2 ],"a":null} , "user":"\\u00e9" }'
    ).encode()


def _others(leg_body: bytes, aside: set[str]) -> list[tuple[str, str]]:
    return [(member.text, member.value) for member in split_members(leg_body) if member.name not in aside]


def _compare(leg: SeenLeg, body: bytes, aside: set[str]) -> None:
    try:
        found, wanted = _others(leg.body, aside), _others(body, aside)
    except ValueError as error:
        expect(False, f"{leg.engine} was sent no object in JSON: {error}")
        return
    for told, sent in zip(found, wanted, strict=False):
        expect(told == sent, f"{leg.engine} was sent {told[0]!r} where the client has written {sent[0]!r}")
    expect(len(found) == len(wanted), f"{leg.engine} was sent {len(found)} members instead of {len(wanted)}")


@CHECKS.add(
    "17.1",
    "decode-bytes",
    sends="a body with odd white space, escapes and numbers",
    expects="the decode leg has every member of it as it is written",
    profiles=(STORE,),
)
async def check_decode_bytes(trial: Trial) -> None:
    """Compares the bytes of the decode leg with those of the client."""
    for stream in (False, True):
        talk = trial.talk()
        body = _odd_body(talk.tag, stream=stream)
        _, decode = expect_answered(talk, await trial.ask(talk, body))
        _compare(decode, body, _SPLICED)


@CHECKS.add(
    "17.4",
    "prefill-bytes",
    sends="a body with odd white space, escapes and numbers",
    expects="the prefill leg has every other member of it as it is written",
    profiles=(STORE,),
)
async def check_prefill_bytes(trial: Trial) -> None:
    """Compares the bytes of the prefill leg with those of the client."""
    talk = trial.talk()
    body = _odd_body(talk.tag)
    prefill, _ = expect_answered(talk, await trial.ask(talk, body))
    _compare(prefill, body, _SPLICED | _LIMITS)


@CHECKS.add(
    "17.1",
    "values",
    sends="a body with large integers, fractions and unknown members",
    expects="both legs have the same values",
    profiles=(NIXL, BOOTSTRAP, CONTENT, AGGREGATED),
)
async def check_values(trial: Trial) -> None:
    """Compares values, however they are written."""
    talk = trial.talk()
    members: dict[str, Any] = {"temperature": 0.5, "seed": 9007199254740993, "top_k": 20}
    for leg in expect_answered(talk, await trial.ask(talk, **members)):
        for name, value in members.items():
            expect(
                leg.json.get(name) == value, f"{leg.engine} was sent {name} {leg.json.get(name)!r} instead of {value!r}"
            )


@CHECKS.add(
    "17.1",
    "unknown-members",
    sends="a body with a member that the proxy does not know",
    expects="both legs have it",
    profiles=(NIXL, BOOTSTRAP, CONTENT, AGGREGATED),
    choice=True,
)
async def check_unknown_members(trial: Trial) -> None:
    """Sends what an engine of tomorrow may read."""
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk, x_later={"a": [1, None]})):
        expect(leg.json.get("x_later") == {"a": [1, None]}, f"{leg.engine} was not sent the unknown member")


@CHECKS.add(
    "17.2",
    "prefill-limits",
    sends="a stream of 8 tokens, with `max_completion_tokens` and without",
    expects="prefill is asked for one token and no stream",
    profiles=(*WITH_RESULT, CONTENT),
)
async def check_prefill_limits(trial: Trial) -> None:
    """Reads what prefill is asked for."""
    kinds: list[dict[str, Any]] = [{}, {"max_completion_tokens": 8}]
    for members in kinds:
        talk = trial.talk()
        prefill, decode = expect_answered(talk, await trial.ask(talk, stream=True, **members))
        asked = prefill.json
        expect(asked.get("max_tokens") == 1, f"prefill was sent `max_tokens` {asked.get('max_tokens')!r}")
        expect(not asked.get("stream"), "prefill was asked for a stream")
        for name in members:
            expect(asked.get(name) == 1, f"prefill was sent `{name}` {asked.get(name)!r}")
        expect(decode.json.get("max_tokens") == 8, f"decode was sent `max_tokens` {decode.json.get('max_tokens')!r}")
        expect(decode.json.get("stream") is True, "decode was not asked for a stream")


@CHECKS.add(
    "17.3",
    "answer-members",
    sends="a request with every member that concerns the answer alone",
    expects="prefill has none of them and `ignore_eos` true, decode has them all",
    profiles=(STORE,),
)
async def check_answer_members(trial: Trial) -> None:
    """Sends members that prefill would refuse, or wait for."""
    talk = trial.talk()
    members: dict[str, Any] = {
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "stop_token_ids": [5],
        "min_tokens": 4,
        "n": 1,
        "best_of": 1,
        "logprobs": 1,
        "top_logprobs": 1,
        "structured_outputs": {"regex": "a"},
        "response_format": {"type": "text"},
    }
    prefill, decode = expect_answered(talk, await trial.ask(talk, stream=True, **members))
    left = sorted(set(_ANSWER_ALONE) & prefill.json.keys())
    expect(not left, f"prefill was sent {', '.join(left)}")
    expect(prefill.json.get("ignore_eos") is True, "prefill was not sent `ignore_eos` true")
    for name, value in members.items():
        expect(decode.json.get(name) == value, f"decode was sent {name} {decode.json.get(name)!r}")


@CHECKS.add(
    "17.3",
    "min-tokens",
    sends="a request with `min_tokens` 4",
    expects="prefill, which may make one token, has no `min_tokens` above 1",
    profiles=(NIXL, CONTENT),
)
async def check_min_tokens(trial: Trial) -> None:
    """Sends a limit that contradicts `max_tokens` 1: vLLM refuses the two together."""
    talk = trial.talk()
    prefill, _ = expect_answered(talk, await trial.ask(talk, min_tokens=4))
    told = prefill.json.get("min_tokens")
    expect(told in (None, 0, 1), f"prefill was sent `min_tokens` {told!r} beside `max_tokens` 1")


@CHECKS.add(
    "17.3",
    "stream-options",
    sends="a stream with `stream_options`",
    expects="prefill, which does not stream, has no `stream_options`",
    profiles=(NIXL, CONTENT),
)
async def check_stream_options(trial: Trial) -> None:
    """Sends a member that vLLM refuses without `stream`."""
    talk = trial.talk()
    prefill, _ = expect_answered(talk, await trial.ask(talk, stream=True, stream_options={"include_usage": True}))
    told = prefill.json.get("stream_options")
    expect(not told, f"prefill was sent `stream_options` {told!r} without `stream`")


@CHECKS.add(
    "17.12",
    "null-ids",
    sends="`prompt_token_ids` null and `kv_transfer_params` null",
    expects="they count as absent: the request is answered",
    profiles=EVERY,
)
async def check_null_members(trial: Trial) -> None:
    """Sends nulls where a client may have them."""
    talk = trial.talk()
    expect_answered(talk, await trial.ask(talk, prompt_token_ids=None, kv_transfer_params=None))
