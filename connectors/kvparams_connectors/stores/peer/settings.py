"""Parses the settings of a peer store: `peer://host:port?name=value`.

Everything is checked before anything is opened.
"""

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, PlainValidator

from kvparams.settings_model import Allowed
from kvparams_connectors.store_settings import DIGITS, Devices, FilePath, Size, StoreSettings, one_of
from kvparams_connectors.store_url import StoreError, StoreURL, is_loopback
from kvparams_connectors.stores.peer.addresses import LOOPBACK_HOSTS, AllowedPeers

__all__ = ["PeerSettings", "PeerTransport", "PeerURLSettings", "read_secret", "url_for_rank"]

PeerTransport = Literal["tcp", "mooncake"]

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_PORTS: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_LONGEST_LEASE_S: Final = 86_400
_LONGEST_SESSION_HOST: Final = 240
"""A session, with brackets and a port, has at most 255 characters on the wire."""
_SECRET: Final = range(16, 4097)


def _read_ports(value: object) -> range:
    match = _PORTS.fullmatch(value) if isinstance(value, str) else None
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last < 65536:
        raise ValueError("must be a port or a range of ports, such as 7400-7499")
    return range(first, last + 1)


class PeerURLSettings(StoreSettings):
    """The settings that a URL may have."""

    size: Annotated[Size, Field(description="the memory for what this process has put")] = 1 << 30
    lease: Annotated[
        Annotated[
            int,
            DIGITS,
            Field(ge=0, le=_LONGEST_LEASE_S),
            Allowed(f"a whole number of seconds from 0 to {_LONGEST_LEASE_S}"),
        ],
        Field(description="the seconds after a put, or after this process found the value again, in which it stays"),
    ] = 60
    peers: Annotated[
        Annotated[str, Field(min_length=1), Allowed("networks, addresses and names, separated by commas")],
        Field(
            description="the peers that this process may read from: `10.0.0.0/8,node-5`; required unless the host is "
            "loopback"
        ),
    ] = ""
    ports: Annotated[
        range, PlainValidator(_read_ports), Field(description="the ports of these peers (default: all)")
    ] = range(1, 65536)
    local: Annotated[
        Annotated[
            str,
            Field(pattern=r"^\[?[A-Za-z0-9._:-]{1,253}\]?$"),
            Allowed("a host name or an address, without a port"),
        ],
        Field(description="where others reach this process (default: the host of the URL)"),
    ] = ""
    secret_file: Annotated[
        FilePath | None, Field(description="a file with one line that readers and peers have to know")
    ] = None
    transport: Annotated[
        Literal["tcp", "mooncake", "rdma"],
        one_of("tcp", "mooncake", "rdma"),
        Field(
            description="how values are read: over TCP, or by Mooncake's transfer engine, over TCP (mooncake) or RDMA; "
            "it asks for no secret"
        ),
    ] = "tcp"
    devices: Annotated[Devices, Field(description="the RDMA devices to use, separated by commas (default: all)")] = ""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Holds what a peer store needs: the place and settings of its URL, and what no URL says."""

    host: str
    """Where this process listens for readers."""
    port: int | None = None
    """None: any that is free; readers are told. 0: nobody reads here, this process only reads."""
    local: str = ""
    """Where others reach this process, without a port; empty: `host`."""
    size_bytes: int = 1 << 30
    """For what this process has put."""
    unit_bytes: int = 64 << 10
    """A value takes whole units."""
    threads: int = 4
    """How many peers are read from at a time."""
    lease_s: int = 60
    """So long after it was put, or found again by this process, a value is not evicted."""
    transport: PeerTransport = "tcp"
    """How values are read: over the connection, or by Mooncake's transfer engine. With the engine neither a secret nor
    a loopback address protects anything: see `transfer_engine.py`."""
    protocol: str = "tcp"
    """Of Mooncake's transfer engine: `tcp` or `rdma`."""
    devices: str = ""
    """RDMA devices, separated by commas; empty: all."""
    buffer_bytes: int = 64 << 20
    """Where Mooncake's transfer engine lets values land; they are copied from there."""
    peers: str = ""
    """Whom this process may ask: networks, addresses and names. Empty: this machine, if `host` is on it."""
    ports: range = range(1, 65536)
    """At which ports of theirs."""
    secret: bytes = field(default=b"", repr=False)
    """Readers have to know it, and the peers that are read from. Not with `mooncake`, whose transfer engine asks
    nobody for it: seal the pages instead."""
    connect_s: float = 1.0
    """How long a connection may take, with everything until it can be used; and how long a peer may leave a request
    without the beginning of an answer."""

    def __post_init__(self) -> None:
        """Raises StoreError on what cannot be."""
        for host in (self.host, self.local):
            if host and _misread(host):
                raise _wrong(f"{host} is neither an address nor a name; programs may read it as different addresses")
        if not _HOST.fullmatch(self.host) or not (self.port is None or 0 <= self.port < 65536):
            raise _wrong(f"{self.host}:{self.port} is not a host and a port")
        if self.local and not _HOST.fullmatch(self.local):
            raise _wrong(f"local={self.local} is not a host name or an address, without a port")
        if _everywhere(self.host) and not self.local and self.port != 0:
            raise _wrong(
                f"{self.host} stands for all addresses of this machine; set local= to the address that other "
                "machines use"
            )
        if self.transport == "mooncake" and self.secret:
            raise _wrong(
                "secret_file does not protect Mooncake's transfer engine, which lets every client that "
                "reaches its port read and write this memory; use transport=tcp, or authenticated pages without "
                "a secret_file"
            )
        if self.transport == "mooncake" and len(self.reachable) > _LONGEST_SESSION_HOST:
            raise _wrong(f"transport=mooncake takes host names of at most {_LONGEST_SESSION_HOST} characters")
        if not self.peers and not is_loopback(self.host):
            raise _wrong("peers is missing; set the networks or names that may be read from: peers=10.0.0.0/8,node-5")

    @property
    def reachable(self) -> str:
        """Returns the address at which others find this process."""
        return self.local or self.host

    @property
    def allowed(self) -> AllowedPeers:
        """Whom this process may ask."""
        return AllowedPeers(self.peers or LOOPBACK_HOSTS, self.ports)

    @property
    def private(self) -> bool:
        """Returns True if only this machine can reach it."""
        return is_loopback(self.host)

    @classmethod
    def of(cls, url: StoreURL) -> "PeerSettings":
        """The settings in a URL.

        Raises:
            StoreError: a setting is unknown or cannot be.
        """
        given = PeerURLSettings.read(url)
        place = _PLACE.fullmatch(url.location)
        if place is None or url.path not in ("", "/"):
            raise _wrong(
                f"{url.redacted!r} has no address to listen on; write peer://host:port, with port 0 for a process "
                "that only reads"
            )
        made = cls(
            host=place[1].strip("[]"),
            port=None if place[2] is None else int(place[2]),
            local=given.local.strip("[]"),
            size_bytes=given.size,
            lease_s=given.lease,
            transport="tcp" if given.transport == "tcp" else "mooncake",
            protocol="rdma" if given.transport == "rdma" else "tcp",
            devices=given.devices,
            peers=given.peers,
            ports=given.ports,
            secret=b"" if given.secret_file is None else read_secret(given.secret_file),
        )
        _ = made.allowed  # raises
        return made


def url_for_rank(text: str, rank: int) -> str:
    """Returns a store's URL as one of several engines of a machine uses it that are configured alike.

    Args:
        text: the URL that all have; only a `peer://` one with a port of its own changes.
        rank: of the engine on its machine, from 0. It listens at the port that the URL names plus this.

    Raises:
        StoreError: the URL is wrong, or there is no such port.
    """
    url = StoreURL.parse(text)
    place = _PLACE.fullmatch(url.location) if url.scheme == "peer" and rank else None
    if place is None or not int(place[2] or 0):
        return text
    port = int(place[2]) + rank
    if port > 65535:
        raise _wrong(f"rank {rank} of this machine would listen at port {port}; choose a lower port")
    return text.replace(f"//{url.location}", f"//{place[1]}:{port}", 1)


def read_secret(path: str) -> bytes:
    """The one line of a file. Raises StoreError if it cannot be read, or is too short to be a secret."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_SECRET.stop + 2).rstrip(b"\r\n")
    except OSError as error:
        raise _wrong(f"secret_file cannot be read: {error}") from error
    if len(secret) not in _SECRET or b"\n" in secret:
        raise _wrong(f"secret_file {path} is not one line of {_SECRET.start} to {_SECRET.stop - 1} bytes")
    return secret


def _misread(host: str) -> bool:
    """Returns True if the C library reads an irregular text as an address: `0`, `127.1`, `0x7f000001`."""
    try:
        ip_address(host)
    except ValueError:
        return _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None
    return False


def _everywhere(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _wrong(what: str) -> StoreError:
    return StoreError(f"peer store: {what}")
