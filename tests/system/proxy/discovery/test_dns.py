"""Tests the DNS provider before a name server of its own: addresses, SRV records, and what goes wrong."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from kvparams.instances import Role, RoundRobin
from kvparams_proxy.config.discovery_url import DNSSource, parse_discovery_url
from kvparams_proxy.discovery.dns_provider import DNSProvider
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.fleet.registry.registry import Registry
from tests.support.waiting import until

_RULES = SpecRules(frozenset(("nixl", "store")))


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`: (name, type) to texts. What it does not have does not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl_s = 1
        self.is_silent = False
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        """Begins to answer."""
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def close(self) -> None:
        """Ends."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answers a question."""
        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        question = asked.question[0]
        kind = dns.rdatatype.to_text(question.rdtype)
        name = question.name.to_text(omit_final_dot=True)
        found = self.records.get((name, kind))
        if found:
            answer.answer.append(dns.rrset.from_text_list(question.name, self.ttl_s, "IN", kind, found))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        if self._transport is not None and not self.is_silent:
            self._transport.sendto(answer.to_wire(), addr)


@pytest.fixture
async def names() -> AsyncGenerator[NameServer]:
    """Returns a name server."""
    server = NameServer()
    await server.start()
    yield server
    server.close()


class Following:
    """A registry that follows a DNS name."""

    def __init__(self, names: NameServer, url: str) -> None:
        source = parse_discovery_url(url)
        assert isinstance(source, DNSSource)
        self.provider = DNSProvider(source, _RULES)
        self.provider.resolver.nameservers = ["127.0.0.1"]
        self.provider.resolver.port = names.port
        loop = asyncio.get_running_loop()
        fleet = Fleet((), {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
        self.registry = Registry(fleet, _RULES)
        self.task = asyncio.create_task(self.provider.watch(self.registry))

    @property
    def urls(self) -> set[str]:
        """The URLs of the fleet."""
        return {owned.spec.url for owned in self.registry.owned.values()}

    @property
    def unreachable(self) -> str | None:
        """Why the name cannot be asked."""
        state = self.registry.sources.get(self.provider.source)
        return None if state is None else state.unreachable

    async def close(self) -> None:
        """Ends the provider."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def test_addresses_are_followed(names: NameServer) -> None:
    names.records[("prefill.example", "A")] = ["10.0.0.1", "10.0.0.2"]
    names.records[("prefill.example", "AAAA")] = ["fd00::1"]
    following = Following(names, "dns://prefill.example:8000?role=prefill&connector=store")
    await until(lambda: len(following.urls) == 3)
    assert following.urls == {"http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"}
    (first, *_) = following.registry.owned.values()
    assert (first.spec.role, first.spec.dialect, first.spec.id) == (Role.PREFILL, "store", "prefill-10.0.0.1-8000")
    names.records[("prefill.example", "A")] = ["10.0.0.2"]
    await until(lambda: len(following.urls) == 2)
    await following.close()


async def test_srv_records_say_the_ports(names: NameServer) -> None:
    names.records[("_vllm._tcp.example", "SRV")] = ["0 0 8001 a.example.", "0 0 8002 b.example."]
    names.records[("a.example", "A")] = ["10.0.0.1"]
    names.records[("b.example", "A")] = ["10.0.0.1"]
    following = Following(names, "dns+srv://_vllm._tcp.example?role=decode")
    await until(lambda: following.urls == {"http://10.0.0.1:8001", "http://10.0.0.1:8002"})
    await following.close()


@pytest.mark.parametrize("fault", ["vanished", "silent", "empty"])
async def test_a_name_that_says_nothing_changes_nothing(names: NameServer, fault: str) -> None:
    names.records[("prefill.example", "A")] = ["10.0.0.1"]
    following = Following(names, "dns://prefill.example:8000?role=prefill")
    following.provider.resolver.lifetime = 0.2
    following.provider.resolver.timeout = 0.2
    await until(lambda: bool(following.urls))
    if fault == "vanished":
        names.records.clear()
    elif fault == "empty":
        names.records[("prefill.example", "A")] = []
    else:
        names.is_silent = True
    await until(lambda: following.unreachable is not None, within_s=20.0)
    assert following.urls == {"http://10.0.0.1:8000"}
    names.is_silent = False
    names.records[("prefill.example", "A")] = ["10.0.0.9"]
    await until(lambda: following.urls == {"http://10.0.0.9:8000"}, within_s=20.0)
    assert following.unreachable is None
    await following.close()
