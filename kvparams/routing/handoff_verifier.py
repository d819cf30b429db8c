"""Holds what an engine answered against the instance that answered it, before it goes into the leg of another engine.

An engine's answer tells another engine where to connect to. An address in it must be one of the instance's own: the
host of one of its URLs, what that host has led the proxy to, or what the operator has declared. Which members are
addresses the dialects' tables say (`Row.address`), those of every dialect and at any depth, because an engine may have
several connectors that all read the same object. Names are compared as text and never resolved; an address that cannot
be shown to be the instance's is refused.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from kvparams.dialects.ec import EC_TABLE
from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.table import AddressKind, DialectTable
from kvparams.dialects.value_types import ObjectType, ValueType
from kvparams.errors import Problem
from kvparams.instances import Instance
from kvparams.native import NATIVE

__all__ = ["HANDOFF_REFUSAL_REASONS", "DeclaredAddress", "HandoffRefused", "HandoffVerifier", "parse_declared_address"]

HandoffRefusalReason = Literal["address", "value", "rank"]
HANDOFF_REFUSAL_REASONS: Final[tuple[HandoffRefusalReason, ...]] = ("address", "value", "rank")
"""An address that is not the instance's; a value that the dialect's table does not allow; a data-parallel rank that was
not asked."""

_ALWAYS: Final[Mapping[str, AddressKind]] = {
    "address": "url",
    **{row.name: row.address for row in EC_TABLE.native_keys if row.address is not None},
}
"""Of our own document, `producer.address`; and of encode engines, whose table need not be registered for them."""
_REMEMBERED: Final = 4096
_NAME: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9_.])?"
_HOST: Final = re.compile(rf"{_NAME}|\[?[0-9A-Fa-f:.]{{2,45}}(?:%[A-Za-z0-9._-]{{1,15}})?\]?")
_PLACE: Final = re.compile(
    rf"(?:[a-z][a-z0-9+.-]{{0,15}}://)?({_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\])(?::([0-9]{{1,5}}))?(?:/[!-~]*)?"
)
"""A URL without a user in it, or `host:port`."""


class HandoffRefused(HandoffMissing):
    """An engine's answer contains a value that may not go into the leg of another one.

    The message names no address, because clients see it too.
    """

    def __init__(self, message: str, reason: HandoffRefusalReason, detail: str) -> None:
        super().__init__(message)
        self.reason: HandoffRefusalReason = reason
        self.detail = detail
        """For the operator: what was said, and what to declare."""


class DeclaredAddress(NamedTuple):
    """A `DeclaredAddress` is an address that an operator has declared for an instance."""

    host: str
    """As `canonical_host` writes it; empty for a network."""
    network: IPv4Network | IPv6Network | None = None
    port: int | None = None
    """Where there is one, the host is the instance's with this port alone, and others declared beside it."""


def parse_declared_address(text: str) -> DeclaredAddress:
    """Read `host`, `host:port`, `[IPv6]:port` or a network such as `10.1.0.0/16`.

    Raises:
        ValueError: it is none of these.
    """
    if "/" in text:
        return DeclaredAddress("", ip_network(text))
    if _HOST.fullmatch(text) and (":" not in text or text.count(":") > 1) and "]:" not in text:
        return DeclaredAddress(canonical_host(text))
    place = _place(text)
    if place is None or "://" in text or place[1] is None:
        raise ValueError("neither host, host:port nor a network")
    return DeclaredAddress(place[0], None, place[1])


@lru_cache(1024)
def canonical_host(host: str) -> str:
    """The same text for the same host: addresses in their shortest form, names in lower case, loopback `localhost`."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ip_address(bare)
    except ValueError:
        return host.lower().rstrip(".")
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "localhost" if address.is_loopback else str(address)


class _InstanceAddresses:
    """An `_InstanceAddresses` holds the addresses that belong to one instance."""

    __slots__ = ("_hosts", "_networks", "_ports", "fitting", "looked", "reached", "shape", "usual")

    def __init__(self, instance: Instance) -> None:
        self.usual: dict[str, tuple[object, type, bool]] = {}
        """Of each key a value that was good, its type, and whether it was looked through for addresses: most have the
        same in every answer."""
        self.looked = 0
        """How many keys were looked through together, when these values were found good."""
        self.reached: Collection[str] = ()
        """What was `reached` then."""
        self.fitting: dict[str, ValueType] = {}
        """Of each key in which there is no address the form that its value had."""
        self.shape: _AnswerShape | None = None
        """Of the last answer that was found good member by member."""
        places = [parse_declared_address(text) for text in instance.addresses]
        urls = (instance.url, instance.bootstrap or "")
        self._hosts = {canonical_host(urlsplit(url).hostname or "") for url in urls}
        self._hosts |= {place.host for place in places if place.network is None}
        self._hosts.discard("")
        self._networks = [place.network for place in places if place.network is not None]
        self._ports: dict[str, set[int]] = {}
        for place in places:
            if place.port is not None:
                self._ports.setdefault(place.host, set()).add(place.port)

    def has(self, host: str, port: int | None, reached: Collection[str]) -> bool:
        known = canonical_host(host)
        if (ports := self._ports.get(known)) is not None:
            return port in ports
        if known in self._hosts or any(known == canonical_host(each) for each in reached):
            return True
        if not self._networks:
            return False
        try:
            address = ip_address("127.0.0.1" if known == "localhost" else known)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


class _AnswerShape(NamedTuple):
    """An `_AnswerShape` is what the answers of one instance have in common.

    An answer is compared with it at once, at the speed of C; otherwise each member takes its turn.
    """

    members: tuple[tuple[str, type, object], ...]
    """The name of each member, the type of its value, and the value, or Ellipsis where that changes."""
    changing: tuple[tuple[str, ValueType], ...]
    """Members with another value each time, and the forms that they must have."""

    @classmethod
    def of(cls, said: Mapping[str, object], changing: list[tuple[str, ValueType]]) -> "_AnswerShape":
        """Returns the shape of an answer that was found good."""
        changes = dict(changing)
        members = ((name, type(value), ... if name in changes else value) for name, value in said.items())
        return cls(tuple(members), tuple(changing))

    def fits(self, said: Mapping[str, object]) -> bool:
        """Returns True if an answer is as good as the one that this was made of."""
        if not _has_form(said, self.members):
            return False
        for name, form in self.changing:  # noqa: SIM110  an expression would take a generator
            if form.find_problem(said[name], (name,)) is not None:
                return False
        return True


def _has_form(said: Mapping[str, object], form: tuple[tuple[str, type, object], ...]) -> bool:
    """Returns whether an answer has these members, of the same types, in this order."""
    if NATIVE is not None and isinstance(said, dict):
        return NATIVE.has_form(said, form)
    if list(said) != [name for name, _, _ in form]:
        return False
    return all(type(said[name]) is kind and value in (..., said[name]) for name, kind, value in form)


class _KnownKey(NamedTuple):
    """A native key that stands in a dialect's table."""

    forms: tuple[ValueType, ...]
    """In one of which it must be; several where releases differ."""
    held: bool
    """Whether there may be an address in it."""

    def fitting(self, name: str, value: object) -> ValueType | Problem:
        """The form that it has, the latest first; or what is wrong with it in the latest, where it has none."""
        first: Problem | None = None
        for form in reversed(self.forms):
            fault = form.find_problem(value, (name,))
            if fault is None:
                return form
            first = first or fault
        assert first is not None
        return first


_NOTHING: Final[Mapping[str, _KnownKey]] = {}


class HandoffVerifier:
    """A `HandoffVerifier` checks the handoffs of all instances; it is made once, for the registered dialects."""

    def __init__(self, tables: Iterable[DialectTable]) -> None:
        """`tables` of every dialect, routed with or not: their addresses are looked for in every answer."""
        self._kinds: dict[str, AddressKind] = {}
        self._known: dict[str, dict[str, _KnownKey]] = {}
        self._rank_suffixes: dict[str, dict[str, str]] = {}
        """By dialect and key."""
        for table in tables:
            suffixes = {row.name: row.rank_suffix for row in table.native_keys if row.rank_suffix is not None}
            self._rank_suffixes[table.name] = suffixes
            known = self._known[table.name] = {}
            for row in table.native_keys:
                if row.address is not None:
                    self._kinds[row.name] = row.address
                if row.location == "home" and not (row.parents or row.name.endswith("*")) and set(row.legs) & set("RD"):
                    forms = (*known[row.name].forms, row.value_type) if row.name in known else (row.value_type,)
                    held = row.address is not None or any(isinstance(form, ObjectType) for form in forms)
                    known[row.name] = _KnownKey(forms, held)
        self._kinds.update(_ALWAYS)
        self._own: dict[Instance, _InstanceAddresses] = {}

    def verify(
        self,
        instance: Instance,
        said: Mapping[str, object],
        reached: Collection[str] = (),
        *,
        is_pinned: bool = True,
    ) -> None:
        """Raises if a decode engine may not be given these members.

        Args:
            instance: who has answered.
            said: native members of `kv_transfer_params`, or an endpoint of our document.
            reached: the IP addresses that the host of its URL has led to.
            is_pinned: whether the engine runs such requests on the data-parallel rank that they name.

        Raises:
            HandoffRefused: it names an address that is not the instance's, a value out of bounds, or another rank.
        """
        if instance.rank is not None and is_pinned:
            self._check_rank(instance, instance.rank.number, said)
        own = self._own.get(instance)
        if own is None:
            if len(self._own) >= _REMEMBERED:
                self._own.clear()
            own = self._own[instance] = _InstanceAddresses(instance)
        if own.shape is not None and reached is own.reached and own.shape.fits(said):
            return
        usual, fitting = own.usual, own.fitting
        same = 0
        new: list[tuple[str, object]] = []
        changing: list[tuple[str, ValueType]] = []
        for name, value in said.items():
            if value is None:
                continue
            last = usual.get(name)
            if last is not None and last[0] == value and last[1] is type(value):
                same += last[2]
            elif (form := fitting.get(name)) is None or form.find_problem(value, (name,)) is not None:
                new.append((name, value))
            else:
                changing.append((name, form))
        looked = [name for name, value in new if self._judge(instance, own, name, value)] if new else None
        if looked or same != own.looked or reached is not own.reached:
            own.shape = None
            self._look(instance, own, said, reached)
        elif not new:
            own.shape = _AnswerShape.of(said, changing)

    def _check_rank(self, instance: Instance, number: int, said: Mapping[str, object]) -> None:
        """Refuses what another rank than `number` says: its KV would be fetched, and the load counted elsewhere."""
        for name, suffix in self._rank_suffixes.get(instance.dialect, {}).items():
            value = said.get(name)
            if isinstance(value, str) and not value.endswith(f"{suffix}{number}"):
                ending = value.rpartition(suffix)
                named = f"{suffix}{ending[2][:8]}" if ending[1] else "no rank"
                raise _refused(instance, "rank", f"{name} with {named!r} instead of {f'{suffix}{number}'!r}")

    def _judge(self, instance: Instance, own: _InstanceAddresses, name: str, value: object) -> bool:
        """Returns True if the value has a permitted form and has to be searched for addresses."""
        known = self._known.get(instance.dialect, _NOTHING).get(name)
        if known is None:
            return True
        form = known.fitting(name, value)
        if isinstance(form, Problem):
            raise _refused(instance, "value", str(form))
        if not known.held:
            own.fitting[name] = form
            if isinstance(value, str | int):
                own.usual.setdefault(name, (value, type(value), False))
        return known.held

    def _look(
        self, instance: Instance, own: _InstanceAddresses, said: Mapping[str, object], reached: Collection[str]
    ) -> None:
        table = self._known.get(instance.dialect, _NOTHING)
        rest = {n: v for n, v in said.items() if v is not None and ((known := table.get(n)) is None or known.held)}
        own.looked = -1
        if (stray := self._stray(rest, own, reached, ())) is not None:
            raise _refused(instance, "address", stray)
        own.usual = {n: each for n, each in own.usual.items() if not each[2]}  # others were looked through without it
        if all(isinstance(value, str | int) for value in rest.values()):
            own.usual.update((name, (value, type(value), True)) for name, value in rest.items())
            own.looked, own.reached = len(rest), reached

    def _stray(
        self, value: object, own: _InstanceAddresses, reached: Collection[str], path: tuple[str, ...]
    ) -> str | None:
        """The first address that is not the instance's, with its place, in words."""
        if isinstance(value, list):
            entries = cast("list[object]", value)
            if not set(map(type, entries)) & {dict, list}:
                return None
            return next((found for one in entries if (found := self._stray(one, own, reached, path))), None)
        if not isinstance(value, dict):
            return None
        hosts: list[object] = []
        ports: list[object] = []
        for name, inner in cast("dict[str, object]", value).items():
            kind = self._kinds.get(name)
            if inner is None:
                continue
            if kind is None:
                stray = self._stray(inner, own, reached, (*path, name))
            elif kind == "url":
                stray = next((text for text in _texts(inner) if not _owned(own, _place(text), reached)), None)
                stray = stray and f"{'.'.join((*path, name))}: {stray[:128]!r}"
            else:
                stray = None
                (hosts if kind == "host" else ports).extend(_each(inner))
            if stray is not None:
                return stray
        for port in ports:
            if type(port) is not int or not 1 <= port <= 65_535:
                return f"{'.'.join(path)} a port: {str(port)[:16]!r}"
        for host in hosts:
            good = isinstance(host, str) and _HOST.fullmatch(host) is not None
            for port in ports or (None,):
                if not good or not own.has(cast("str", host), cast("int | None", port), reached):
                    return f"{'.'.join((*path, 'a host'))}: {str(host)[:128]!r}" + (f", port {port}" if port else "")
        return None


def _each(value: object) -> list[object]:
    return [one for one in cast("list[object]", value) if one is not None] if isinstance(value, list) else [value]


def _texts(value: object, *, inside: bool = False) -> Iterator[str]:
    """Yields every address in an address member; of an object, the texts that are URLs.

    A value that is no text has no form that an instance's own address could have.
    """
    if isinstance(value, dict):
        for inner in cast("dict[str, object]", value).values():
            yield from _texts(inner, inside=True)
    elif isinstance(value, list):
        for one in cast("list[object]", value):
            yield from _texts(one, inside=inside)
    elif not inside:
        yield from str(value).split(",")
    elif isinstance(value, str) and "://" in value:
        yield value


def _place(text: str) -> tuple[str, int | None] | None:
    found = _PLACE.fullmatch(text)
    if found is None:
        return None
    port = None if found[2] is None else int(found[2])
    return None if port is not None and not 1 <= port <= 65_535 else (canonical_host(found[1]), port)


def _owned(own: _InstanceAddresses, place: tuple[str, int | None] | None, reached: Collection[str]) -> bool:
    return place is not None and own.has(*place, reached)


def _refused(instance: Instance, reason: HandoffRefusalReason, what: str) -> HandoffRefused:
    if reason == "value":
        said = f"the {instance.role} engine's answer has a value that is impossible for its connector"
        return HandoffRefused(said, reason, f"{instance.id} answered {what}")
    if reason == "rank":
        said = (
            "the prefill engine's answer is of another data-parallel rank than the one that was asked; check `ranks` "
            "of the instance"
        )
        return HandoffRefused(said, reason, f"{instance.id} answered {what}")
    said = (
        f"the {instance.role} engine's answer names an address that is not declared for the engine. The proxy's log "
        "has the address; if it is right, add it to `addresses` of the instance"
    )
    return HandoffRefused(said, reason, f"{instance.id} answered {what}")
