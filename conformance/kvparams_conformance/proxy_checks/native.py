"""Checks proxies that speak vLLM's NIXL dictionary or SGLang's bootstrap members."""

from typing import Final

from kvparams_conformance.answers import nixl_params, prefill_answer
from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.proxy_checks.helpers import BOOTSTRAP, NIXL, expect_answered
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_MAX_ROOM: Final = 2**63 - 1


@CHECKS.add(
    "17.27",
    "prefill-keys",
    sends="an ordinary completion",
    expects="prefill is sent `do_remote_decode` true, `do_remote_prefill` false, and no address",
    profiles=(NIXL,),
)
async def check_prefill_keys(trial: Trial) -> None:
    """Reads the native keys of the prefill leg."""
    talk = trial.talk()
    prefill, _ = expect_answered(talk, await trial.ask(talk))
    told = prefill.carrier
    expect(
        told.get("do_remote_decode") is True, f"prefill was sent `do_remote_decode` {told.get('do_remote_decode')!r}"
    )
    expect(not told.get("do_remote_prefill"), f"prefill was sent `do_remote_prefill` {told.get('do_remote_prefill')!r}")
    for name in ("remote_host", "remote_port", "remote_engine_id", "remote_block_ids"):
        expect(told.get(name) is None, f"prefill was sent `{name}` {told.get(name)!r}")


@CHECKS.add(
    "17.28",
    "decode-keys",
    sends="a prefill answer with every key of NixlConnector",
    expects="decode is sent each of them as it came",
    profiles=(NIXL,),
)
async def check_decode_keys(trial: Trial) -> None:
    """Compares the native keys of the answer with those of the decode leg."""
    more = {"remote_num_tokens": 7, "remote_blocks_expiry_time": None, "dcp_size": 1, "transfer_mode": "pull"}
    talk = trial.talk(lambda leg: prefill_answer("nixl", talk, leg, **more))
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    for name, value in nixl_params(talk, prefill, **more).items():
        told = decode.carrier.get(name, ...)
        expect(
            told == value, f"decode was sent `{name}` {'absent' if told is ... else repr(told)} instead of {value!r}"
        )


@CHECKS.add(
    "17.28",
    "unknown-keys",
    sends="a prefill answer with a key that no table has",
    expects="decode is sent it as it came",
    profiles=(NIXL,),
)
async def check_unknown_keys(trial: Trial) -> None:
    """Answers as a later release of the engine."""
    later = {"a": [None, 1, "ü"]}
    talk = trial.talk(lambda leg: prefill_answer("nixl", talk, leg, x_later=later))
    _, decode = expect_answered(talk, await trial.ask(talk))
    expect(
        decode.carrier.get("x_later") == later,
        f"decode was sent {decode.carrier.get('x_later')!r} instead of {later!r}",
    )


@CHECKS.add(
    "17.29",
    "meeting-place",
    sends="an ordinary completion",
    expects="both legs have the same `bootstrap_host`, `bootstrap_port` and `bootstrap_room`",
    profiles=(BOOTSTRAP,),
)
async def check_meeting_place(trial: Trial) -> None:
    """Compares the members of both legs."""
    talk = trial.talk()
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    for name in ("bootstrap_host", "bootstrap_room"):
        told = prefill.json.get(name), decode.json.get(name)
        expect(
            told[0] is not None and told[0] == told[1], f"`{name}` is {told[0]!r} at prefill and {told[1]!r} at decode"
        )
    ports = {leg.json.get("bootstrap_port") for leg in (prefill, decode)}
    expect(len(ports) == 1, f"`bootstrap_port` is {ports}")


@CHECKS.add(
    "17.29",
    "rooms",
    sends="twenty requests",
    expects="twenty rooms, integers from 1 to 2^63 - 1, half of them above 2^31",
    profiles=(BOOTSTRAP,),
)
async def check_rooms(trial: Trial) -> None:
    """Collects the rooms."""
    rooms: list[object] = []
    for _ in range(20):
        talk = trial.talk()
        prefill, _ = expect_answered(talk, await trial.ask(talk))
        rooms.append(prefill.json.get("bootstrap_room"))
    expect(
        all(type(room) is int and 0 < room <= _MAX_ROOM for room in rooms), f"a room is no such integer: {rooms[:3]}"
    )
    expect(len(set(rooms)) == 20, f"20 requests have {len(set(rooms))} rooms")
    expect(sum(isinstance(room, int) and room > 2**31 for room in rooms) >= 5, "the rooms have few random bits")
