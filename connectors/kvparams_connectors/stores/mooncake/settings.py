"""Parses the settings of a Mooncake store: `mooncake://master:port?name=value`.

Everything is checked before the client library is touched, which answers a wrong setting with silence, with minutes of
waiting or with the end of the process.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvparams.settings_model import Allowed
from kvparams_connectors.store_settings import DIGITS, Devices, Host, Size, StoreSettings, one_of
from kvparams_connectors.store_url import StoreError, StoreURL

__all__ = ["MooncakeSettings", "MooncakeURLSettings"]

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_SMALLEST_SEGMENT: Final = 16 << 20


def _check_segment(nbytes: int) -> int:
    if 0 < nbytes < _SMALLEST_SEGMENT:
        raise ValueError("too small")
    return nbytes


_Segment = Annotated[
    Size,
    BeforeValidator(lambda value: 0 if value == "0" else value),
    AfterValidator(_check_segment),
    Allowed("0, or a size of at least 16MiB, such as 4GiB"),
]


class MooncakeURLSettings(StoreSettings):
    """The settings that a URL may have."""

    local: Annotated[
        Host | None,
        Field(
            description="where other clients reach this process (default: the address that this machine uses towards "
            "the master)"
        ),
    ] = None
    protocol: Annotated[
        Literal["tcp", "rdma"], one_of("tcp", "rdma"), Field(description="how values are transferred")
    ] = "tcp"
    devices: Annotated[Devices, Field(description="the RDMA devices to use, separated by commas (default: all)")] = ""
    metadata: Annotated[
        Annotated[str, Field(min_length=1), Allowed("the address of a metadata service")],
        Field(description="the metadata service of the cluster; by default clients ask each other"),
    ] = "P2PHANDSHAKE"
    segment: Annotated[
        _Segment, Field(description="the memory that this process itself lends to the store; 0: owners do")
    ] = 0
    replicas: Annotated[
        Annotated[int, DIGITS, Field(ge=1, le=16), Allowed("a whole number from 1 to 16")],
        Field(
            description="the number of copies of each value. When the owner of the first one dies, another is read "
            "once the master has noticed"
        ),
    ] = 1
    prefix: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]{1,64}$"), Allowed("1 to 64 characters from A-Za-z0-9._:/-")],
        Field(description="what every key begins with; deployments that share a server do not meet"),
    ] = "kvparams:"


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Holds what a Mooncake store needs: the place and settings of its URL, and what no URL says."""

    host: str
    port: int
    local: str = ""
    """Where other clients reach this process; empty: the address that this machine uses towards the master."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty: all."""
    metadata: str = "P2PHANDSHAKE"
    """The metadata service; by default clients ask each other."""
    segment_bytes: int = 0
    """Memory that this process itself offers to the store. 0: others do, see `owner.py`."""
    buffer_bytes: int = 64 << 20
    """For values that do not lie in a registered arena; they are copied through it."""
    max_value_bytes: int = 1 << 30
    """Larger values are refused. At most as large as the smallest owner's segment."""
    replicas: int = 1
    """Copies of each value, on as many owners if there are so many. The client reads the first; when its owner dies,
    the other is read once the master has noticed (`--client_ttl` of the master, 10 s)."""
    prefix: str = "kvparams:"
    """Before every key."""
    threads: int = 1
    connect_s: float = 1.0
    """How long to wait for the master's port."""

    def __post_init__(self) -> None:
        """Raises StoreError on what cannot be."""
        if not _HOST.fullmatch(self.host) or not 0 < self.port < 65536:
            raise StoreError(f"mooncake store: {self.host}:{self.port} is not a host and a port: mooncake://host:port")

    @property
    def master(self) -> str:
        """As the client library wants it."""
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: StoreURL) -> "MooncakeSettings":
        """The settings in a URL.

        Raises:
            StoreError: a setting is unknown or cannot be.
        """
        given = MooncakeURLSettings.read(url)
        host, colon, port = url.location.rpartition(":")
        if url.path not in ("", "/") or not colon or not (port.isascii() and port.isdigit() and len(port) < 6):
            raise StoreError(
                f"mooncake store: {url.redacted!r} has no address of the master; write mooncake://host:port"
            )
        return cls(
            host,
            int(port),
            local=given.local or "",
            protocol=given.protocol,
            devices=given.devices,
            metadata=given.metadata,
            segment_bytes=given.segment,
            replicas=given.replicas,
            prefix=given.prefix,
        )
