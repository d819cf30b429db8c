"""Asks a server, by valkey-py, for what is no value: what it is, how it is set up, which slots are where.

Nothing here is on the way of a value, and every question ends within the time that is given for it.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

import valkey
import valkey.exceptions
from valkey.backoff import NoBackoff
from valkey.retry import Retry

from kvparams_connectors.advice import Advice
from kvparams_connectors.store_url import StoreError, StoreUnreachable
from kvparams_connectors.stores.valkey.connection_pool import ValkeyAccess
from kvparams_connectors.stores.valkey.topology import SLOTS, ValkeyNode

__all__ = [
    "ServerFacts",
    "TLSFiles",
    "advice_from_facts",
    "find_primary",
    "parse_facts",
    "read_facts",
    "read_password",
    "read_slots",
    "tls_context",
]

T = TypeVar("T")
_Slots = Sequence[tuple[int, int, Sequence[object]]]
"""First slot, last slot, and who has them: host, port and more; replicas follow."""

_OLDEST: Final = (7, 2)
_MAX_BULK: Final = 512 << 20
"""`proto-max-bulk-len` of a server that is not set up otherwise."""


class _ValkeyClient(Protocol):
    """Describes what is used of `valkey.Valkey`, whose own types leave the answers open."""

    def execute_command(self, *words: str) -> object: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """PEM files, as paths; empty where there is none."""

    ca: str = ""
    """Who may have signed the server's certificate; empty: whom the system trusts."""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Describes what a server says of itself."""

    version: str = ""
    """Empty where it may not be asked."""
    cluster: bool = False
    replica: bool = False
    primary: ValkeyNode | None = None
    """Whose replica it is, as it reaches it."""
    replicas: tuple[ValkeyNode, ...] = ()
    """Its own, as they say that they are reached."""
    max_memory: int = 0
    """Bytes; 0: no limit."""
    policy: str = ""
    """Which values go when the memory is full."""
    max_value_bytes: int = _MAX_BULK


def tls_context(files: TLSFiles) -> ssl.SSLContext:
    """Returns what connections to a server are wrapped with: its certificate and its name are always checked.

    Raises:
        StoreError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        if files.cert:
            context.load_cert_chain(files.cert, files.key or None)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"valkey store: the certificates cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def read_facts(node: ValkeyNode, access: ValkeyAccess, files: TLSFiles | None) -> ServerFacts:
    """Ask a server what it is. What an ACL keeps from us is left at its default.

    Raises:
        StoreError: it cannot be reached, does not let us in, or is too old.
    """

    def ask(client: _ValkeyClient) -> ServerFacts:
        try:
            sections = ("server", "memory", "cluster", "replication")
            info = cast("Mapping[str, object]", client.execute_command("INFO", *sections))
        except valkey.exceptions.NoPermissionError:
            info = {"cluster_enabled": int(_has_slots(client))}
        try:
            config = cast("Mapping[str, str]", client.execute_command("CONFIG GET", "proto-max-bulk-len"))
        except valkey.exceptions.ResponseError:  # refused, or a managed server that has no CONFIG
            config = dict[str, str]()
        return parse_facts(info, config)

    facts = _ask(node, access, files, ask)
    if facts.version and _release(facts.version) < _OLDEST:
        raise StoreError(f"valkey store: {node} has version {facts.version}; use Valkey 8, or at least 7.2")
    return facts


def read_slots(node: ValkeyNode, access: ValkeyAccess, files: TLSFiles | None) -> list[tuple[int, int, ValkeyNode]]:
    """The map of a cluster: `(first slot, last slot, its primary)`.

    Raises:
        StoreError: the server cannot be asked.
    """

    def ask(client: _ValkeyClient) -> list[tuple[int, int, ValkeyNode]]:
        ranges: list[tuple[int, int, ValkeyNode]] = []
        for first, last, primary, *_ in cast("_Slots", client.execute_command("CLUSTER SLOTS")):
            host, port = str(primary[0] or ""), int(str(primary[1]))
            if 0 <= first <= last < SLOTS:
                ranges.append((first, last, ValkeyNode(node.host if host in ("", "?") else host, port)))
        return ranges

    return _ask(node, access, files, ask)


def _has_slots(client: _ValkeyClient) -> bool:
    """Returns whether it is of a cluster, asked in another way."""
    try:
        return bool(client.execute_command("CLUSTER SLOTS"))
    except valkey.exceptions.ResponseError:  # it has no slots, or does not say
        return False


def parse_facts(info: Mapping[str, object], config: Mapping[str, str]) -> ServerFacts:
    """Returns what INFO and CONFIG GET say, as far as it matters to values.

    While a large value arrives, the server makes room for another one like it (`networking.c` of Valkey 8.0.1, where a
    big argument becomes the value), and `maxmemory` counts both: more than half of it never fits.
    """
    limit = str(config.get("proto-max-bulk-len", _MAX_BULK))
    max_memory = int(str(info.get("maxmemory", 0)))
    max_bulk = int(limit) if limit.isdigit() else _MAX_BULK
    return ServerFacts(
        version=str(info.get("valkey_version") or info.get("redis_version") or ""),
        cluster=str(info.get("cluster_enabled", 0)) == "1",
        replica=str(info.get("role", "")) == "slave",
        primary=_node_of(info.get("master_host"), info.get("master_port")),
        replicas=tuple(node for node in _replicas_of(info) if node is not None),
        max_memory=max_memory,
        policy=str(info.get("maxmemory_policy", "")),
        max_value_bytes=min(max_bulk, max_memory // 2) if max_memory else max_bulk,
    )


def _replicas_of(info: Mapping[str, object]) -> list[ValkeyNode | None]:
    """`slave0` and so on, each of which valkey-py takes apart."""
    found: list[ValkeyNode | None] = []
    for number in range(int(str(info.get("connected_slaves", 0)))):
        one = info.get(f"slave{number}")
        if isinstance(one, Mapping):
            place = cast("Mapping[str, object]", one)
            found.append(_node_of(place.get("ip"), place.get("port")))
    return found


def _node_of(host: object, port: object) -> ValkeyNode | None:
    """None if there is no such server, or it cannot be meant."""
    text = str(port)
    known = bool(host) and text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536
    return ValkeyNode(str(host), int(text)) if known else None


def find_primary(
    nodes: Sequence[ValkeyNode], ask: Callable[[ValkeyNode], ServerFacts | None]
) -> tuple[ValkeyNode, ServerFacts] | None:
    """The first of these servers, or of the primaries that they name, that is no replica.

    Args:
        nodes: who may be asked, the most likely first.
        ask: what a server says of itself; None if it says nothing. One that may not be asked for INFO is passed over.
    """
    left = list(nodes)
    for node in left:  # it grows meanwhile
        facts = ask(node)
        if facts is None or facts.cluster or not facts.version:
            continue
        if not facts.replica:
            return node, facts
        if facts.primary is not None and facts.primary not in left and len(left) < 2 * len(nodes) + 2:
            left.insert(left.index(node) + 1, facts.primary)
    return None


def advice_from_facts(facts: ServerFacts, *, ttl: bool) -> list[Advice]:
    """Returns what a server's settings are good for.

    Args:
        facts: what it says of itself.
        ttl: whether our values have a time to live.
    """
    if facts.replica and not facts.cluster and facts.primary is None:
        return [
            Advice(
                "error", "the server is a replica without a known primary, so no value can be put", "name the primary"
            )
        ]
    if facts.replica and not facts.cluster:  # in a cluster it says itself whom to ask
        found = f"the server is a replica; the first put switches to its primary, {facts.primary}"
        return [Advice("warning", found, "name the primary")]
    if not facts.version:
        return [Advice("warning", "the user may not send INFO", "allow the user `+info +config|get`")]
    found = [Advice("ok", f"Valkey {facts.version}, {'a cluster' if facts.cluster else 'a single server'}")]
    if not facts.max_memory:
        limit = "maxmemory is not set: the server grows until its machine has no memory left"
        found.append(Advice("warning", limit, "set maxmemory, and maxmemory-policy allkeys-lru"))
    elif facts.policy == "noeviction":
        full = "maxmemory-policy is noeviction: when the server is full, no value can be put"
        found.append(Advice("warning", full, "set maxmemory-policy allkeys-lru"))
    elif facts.policy.startswith("volatile-") and not ttl:
        never = f"maxmemory-policy is {facts.policy} and ttl is not set, so the store's values are never evicted"
        found.append(Advice("warning", never, "set maxmemory-policy allkeys-lru, or ttl in the store's URL"))
    else:
        found.append(Advice("ok", f"maxmemory {facts.max_memory} bytes, {facts.policy}"))
    return found


def _ask(node: ValkeyNode, access: ValkeyAccess, files: TLSFiles | None, question: Callable[[_ValkeyClient], T]) -> T:
    made = valkey.Valkey(
        host=node.host or "localhost",
        port=node.port,
        unix_socket_path=node.path or None,
        username=access.user or None,
        password=access.password.decode() or None,
        socket_timeout=access.connect_s,
        socket_connect_timeout=access.connect_s,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
        ssl=files is not None,
        ssl_ca_certs=(files.ca or None) if files else None,
        ssl_certfile=(files.cert or None) if files else None,
        ssl_keyfile=(files.key or files.cert or None) if files else None,
        ssl_check_hostname=files is not None,  # not valkey-py's default
        ssl_min_version=ssl.TLSVersion.TLSv1_2 if files else None,
    )
    client = cast("_ValkeyClient", made)
    with closing(client):
        try:
            return question(client)
        except (valkey.exceptions.AuthenticationError, valkey.exceptions.NoPermissionError) as error:
            raise StoreError(f"valkey store: {node} refuses this user: {error}") from error
        except (valkey.exceptions.ConnectionError, valkey.exceptions.TimeoutError, OSError) as error:
            raise StoreUnreachable(f"valkey store: {node} cannot be used: {error}") from error
        except valkey.exceptions.ValkeyError as error:
            raise StoreError(f"valkey store: {node} cannot be used: {error}") from error


def _release(version: str) -> tuple[int, int]:
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else (0, 0)


def read_password(path: str) -> bytes:
    """The one line of a file. Raises StoreError if it cannot be read or is empty."""
    try:
        with Path(path).open("rb") as file:
            password = file.read(4097).rstrip(b"\r\n")
    except OSError as error:
        raise StoreError(f"valkey store: password_file cannot be read: {error}") from error
    if not 0 < len(password) <= 4096 or b"\n" in password:
        raise StoreError(f"valkey store: password_file {path} must be one line with the password")
    return password
