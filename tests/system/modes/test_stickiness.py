"""Tests that a conversation returns to its prefill and decode engine: in replicas, in a pool, and in both."""

from collections.abc import Sequence

import pytest

from kvparams_proxy.secret import Secret
from tests.support.proxy.stage import BODY, COMPLETIONS
from tests.system.modes.conftest import ModeStage, StartMode, Way

TOKEN = "admin-token-of-this-test"

WAYS = (
    Way("prefill_then_decode"),
    Way("prefill_then_decode", "nixl"),
    Way("prefill_then_decode,decode_first=true"),
    Way("concurrent_legs", "store-meet"),
    Way("conditional,remote_tokens=1"),
)
FLEETS: dict[str, Sequence[str | None]] = {
    "replicas": ("left", "left", "right", "right"),
    "pool": (None, None, None, None),
    "both": ("left", "left", None, None),
}
Served = tuple[int, int]
"""Which prefill engine and which decode engine."""


async def turns(found: ModeStage, session: str | None, many: int = 3) -> list[Served]:
    headers = {} if session is None else {"x-session-id": session}
    served: list[Served] = []
    for _ in range(many):
        got = await found.running.client.post(COMPLETIONS, json=BODY, headers=headers)
        assert got.status_code == 200, got.text
        engines = (got.headers[f"x-kvparams-{role}"] for role in ("prefill", "decode"))
        prefill, decode = (int(engine.rpartition("-")[2]) for engine in engines)
        served.append((prefill, decode))
    return served


async def drain(found: ModeStage, decode: int, how: str) -> None:
    url, headers = f"/admin/instances/decode-{decode}/{how}", {"authorization": f"Bearer {TOKEN}"}
    assert (await found.running.client.post(url, headers=headers)).status_code == 200


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_conversation_stays_with_its_pair(staged: StartMode, way: Way, fleet: str) -> None:
    """And comes back to it after a time in which one of the two was drained. The control: whoever names no conversation
    goes round."""
    names = FLEETS[fleet]
    found = await staged(way, "group", names, policy="session_affinity", admin_token=Secret(TOKEN))
    before = {f"s-{number}": await turns(found, f"s-{number}") for number in range(24)}
    pairs = {session: served[0] for session, served in before.items()}
    assert all(set(served) == {pairs[session]} for session, served in before.items())
    assert all(names[prefill] == names[decode] for prefill, decode in pairs.values())
    assert {decode for _, decode in pairs.values()} == {prefill for prefill, _ in pairs.values()} == set(range(4))
    assert len(set(await turns(found, None, 8))) > 1

    gone = pairs["s-0"][1]
    await drain(found, gone, "drain")
    for session, (prefill, decode) in pairs.items():
        served = set(await turns(found, session, 2))
        assert len(served) == 1
        ((now, elsewhere),) = served
        assert names[now] == names[elsewhere]
        assert (elsewhere == decode) is (decode != gone)
        assert now == prefill or decode == gone
    await drain(found, gone, "undrain")
    assert {session: (await turns(found, session, 1))[0] for session in pairs} == pairs
    assert await found.settled()
