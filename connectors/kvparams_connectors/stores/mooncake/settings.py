"""Parses the settings of a Mooncake store: `mooncake://master:port?name=value`.

Everything is checked before the client library is touched, which answers a wrong setting with silence, with minutes of
waiting or with the end of the process.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.store_url import StoreError, StoreURL

__all__ = ["MooncakeSettings"]

_PREFIX: Final = re.compile(r"[A-Za-z0-9._:/-]{1,64}")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_DEVICES: Final = re.compile(r"[A-Za-z0-9._,-]{0,1024}")
_PROTOCOLS: Final = ("tcp", "rdma")
_SMALLEST_SEGMENT: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Every setting of a Mooncake store."""

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
    soft_pin_s: int = 0
    """A value that was put is evicted last for so long. 0: the master's default."""
    prefix: str = "kvparams:"
    """Before every key."""
    threads: int = 1
    connect_ms: int = 1000
    """How long to wait for the master's port."""

    def __post_init__(self) -> None:
        """Raises StoreError on what cannot be."""
        if not _HOST.fullmatch(self.host) or not 0 < self.port < 65536:
            raise _wrong(f"{self.host}:{self.port} is not a host and a port: mooncake://host:port")
        if self.local and not _HOST.fullmatch(self.local):
            raise _wrong(f"local={self.local} is not a host name or an address, without a port")
        if self.protocol not in _PROTOCOLS:
            raise _wrong(f"protocol={self.protocol} must be one of {', '.join(_PROTOCOLS)}")
        if not _DEVICES.fullmatch(self.devices):
            raise _wrong(f"devices={self.devices} is not a list of device names, separated by commas")
        if not _PREFIX.fullmatch(self.prefix):
            raise _wrong(f"prefix={self.prefix} must be 1 to 64 characters from A-Za-z0-9._:/-")
        if 0 < self.segment_bytes < _SMALLEST_SEGMENT:
            raise _wrong(f"segment={self.segment_bytes} is less than {_SMALLEST_SEGMENT} bytes")
        if self.buffer_bytes < self.threads * 4096:
            raise _wrong(f"buffer={self.buffer_bytes} is less than 4096 bytes for each of {self.threads} threads")

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
        url.reject_unknown(
            "local", "protocol", "devices", "metadata", "segment", "buffer", "max_value", "replicas", "soft_pin",
            "prefix", "threads", "connect_ms",
        )  # fmt: skip
        host, colon, port = url.location.rpartition(":")
        if url.path not in ("", "/") or not colon or not (port.isascii() and port.isdigit() and len(port) < 6):
            raise _wrong(f"{url.redacted!r} has no address of the master; write mooncake://host:port")
        given = url.settings.get
        default = cls(host, int(port))
        return cls(
            host=host,
            port=int(port),
            local=given("local", default.local),
            protocol=given("protocol", default.protocol),
            devices=given("devices", default.devices),
            metadata=given("metadata", default.metadata),
            segment_bytes=0 if given("segment") == "0" else url.read_size("segment") or default.segment_bytes,
            buffer_bytes=url.read_size("buffer") or default.buffer_bytes,
            max_value_bytes=url.read_size("max_value") or default.max_value_bytes,
            replicas=url.read_int("replicas", default.replicas, low=1, high=16),
            soft_pin_s=url.read_int("soft_pin", default.soft_pin_s, low=0, high=7 * 86_400),
            prefix=given("prefix", default.prefix),
            threads=url.read_int("threads", default.threads, low=1, high=64),
            connect_ms=url.read_int("connect_ms", default.connect_ms, low=1, high=60_000),
        )


def _wrong(what: str) -> StoreError:
    return StoreError(f"mooncake store: {what}")
