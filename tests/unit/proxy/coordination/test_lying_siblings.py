"""Tests that a sibling that holds the key of the site and says what cannot be does no lasting harm."""

from collections.abc import Iterable, Mapping
from struct import pack

import pytest

from kvparams.instances import Instance, Role
from kvparams.replication.entries import BlocksHeld, EngineLoad, Entry, PrefillBegan, engine_key
from kvparams.replication.entry_codec import encode_entry, encode_heartbeat
from kvparams.replication.messages import MessageAuthenticator, MessageKind
from kvparams_proxy.coordination.exchange import HEARTBEAT_S, LEASE_S
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SECRET, SharedProxy
from tests.support.virtual_loop import VirtualLoop

_PREFILL = Instance("prefill-0", "1", Role.PREFILL, "http://prefill-0", "nixl")
_ENGINE = Instance("decode-0", "1", Role.DECODE, "http://decode-0", "nixl")
_LIAR = 77


class Site:
    """One proxy, and a sibling that the test speaks for."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.proxy = SharedProxy(MemoryNetwork(self.loop), 0, [_PREFILL, _ENGINE])
        self._sequence = 0
        self._seal = MessageAuthenticator("site", [SECRET]).seal
        self.after(3.0)

    def after(self, seconds: float) -> None:
        """Lets time pass."""
        self.loop.run_until(self.loop.time() + seconds)
        assert not self.loop.faults

    def say(self, kind: MessageKind, payload: bytes) -> None:
        """Sends what the sibling says to all."""
        self._sequence += 1
        message = self._seal(kind, _LIAR, 0, self._sequence, self.loop.time(), payload)
        self.proxy.transport.take(message)

    def beat(self, info: Mapping[str, object]) -> None:
        """Sends a heartbeat of the sibling."""
        self.say(MessageKind.HEARTBEAT, encode_heartbeat(info, ()))

    def tell(self, entries: Iterable[Entry]) -> None:
        """Sends entries of the sibling."""
        self.say(MessageKind.ENTRIES, b"".join(map(encode_entry, entries)))


@pytest.mark.parametrize("name", ["settings", "blocks", "has_snapshot", "policy", "chain"])
@pytest.mark.parametrize("value", [[], {}, None, 0, float("nan"), 10**300, "text"])
def test_heartbeats_go_on_whatever_a_sibling_says_of_itself(name: str, value: object) -> None:
    site = Site()
    exchange = site.proxy.shared.exchange
    for _ in range(6):
        sent = exchange.sent_messages
        site.beat({name: value})
        site.after(HEARTBEAT_S)
        assert len(exchange.siblings) == 1
        assert exchange.sent_messages > sent
    assert not exchange.refused
    site.after(LEASE_S + 0.2)
    assert not len(exchange.siblings)


def _prefill_began(leg: int, hashes: bytes, held: int = 0, parent: int = 0) -> PrefillBegan:
    key = engine_key(_PREFILL.id, _PREFILL.url, _PREFILL.role)
    return PrefillBegan(leg, key, 1000, 1.0, 0.0, 0, 0, held, parent, hashes)


def test_a_leg_with_impossible_blocks_ends_with_its_sibling() -> None:
    site = Site()
    chain = site.proxy.prefixes.chain_mark
    site.beat({"chain": chain})
    backlog = site.proxy.member(_PREFILL.id).backlog
    for leg in range(3):
        site.tell([_prefill_began(leg, pack("<QQ", 5, 5))])
        site.tell([_prefill_began(leg, pack("<QQ", 5, 5))])
    assert backlog.given_legs <= 3
    site.after(LEASE_S + 0.2)
    assert backlog.given_legs == 0
    assert not len(site.proxy.prefixes)


def test_blocks_that_stand_in_front_of_themselves_are_no_endless_prompt() -> None:
    site = Site()
    site.beat({"chain": site.proxy.prefixes.chain_mark})
    key = engine_key(_PREFILL.id, _PREFILL.url, _PREFILL.role)
    site.tell([BlocksHeld(key, 100, 0, pack("<QQ", 5, 6), pack("<QQ", 6, 5))])
    assert site.proxy.prefixes.blocks == 2
    assert len(site.proxy.prefixes.chain_to(5, 1000)) == 1
    site.tell([_prefill_began(1, pack("<Q", 7), 2**32 - 1, 5)])
    assert site.proxy.member(_PREFILL.id).backlog.given_legs == 1


def test_loads_of_engines_without_end_are_not_kept() -> None:
    site = Site()
    site.beat({})
    (sibling,) = site.proxy.shared.exchange.siblings.alive.values()
    key = engine_key(_ENGINE.id, _ENGINE.url, _ENGINE.role)
    site.tell([EngineLoad(key, 3, 30)])
    for first in range(0, 40_000, 4_000):
        site.tell(EngineLoad(first + number, 1, 1) for number in range(4_000))
    assert len(sibling.loads) < 20_000
    site.tell([EngineLoad(key, 4, 40)])  # the control: what was believed is still brought up to date
    member = site.proxy.member(_ENGINE.id)
    assert (member.in_flight, member.tokens) == (4, 40)
    site.after(LEASE_S + 0.2)
    assert (member.in_flight, member.tokens) == (0, 0)
