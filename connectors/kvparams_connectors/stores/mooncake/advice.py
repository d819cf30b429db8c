"""Finds out what of a Mooncake cluster and of our settings will hurt, with one value of a few bytes.

The master's own settings cannot be asked for through the client library; what they do to a value can be seen. Whatever
was put to find out is removed again, and nothing of anybody else's is touched.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final, Protocol

from kvparams_connectors.advice import Advice
from kvparams_connectors.store import PutOp, ResultCode, Results
from kvparams_connectors.store_url import is_loopback
from kvparams_connectors.stores.mooncake.client import MooncakeClient
from kvparams_connectors.stores.mooncake.library import ReplicaPlacement, replica_placement
from kvparams_connectors.stores.mooncake.settings import MooncakeSettings
from kvparams_connectors.stores.mooncake.status_codes import MooncakeStatus

__all__ = ["ClusterFacts", "advice_from_facts", "probe_cluster", "rdma_devices"]

_PROBE_BYTES: Final = 64
_LEASE_S: Final = 2.0
"""A lease that lasts as long is long enough: so long is waited for its end."""
_PAUSE_S: Final = 0.02
_SLOW_S: Final = 0.02
"""Every lookup and every get asks the master once at least."""
_QUESTIONS: Final = 5
_DEVICES: Final = Path("/sys/class/infiniband")
_OWNER: Final = "python -m kvparams_connectors.stores.mooncake.owner --master {} --size 4GiB"


class ValueWriter(Protocol):
    """Describes what puts the value."""

    def put(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """See `KVStore.put`."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Describes what was seen."""

    question_s: float
    """How long the master took to answer, at best."""
    put: ResultCode
    """What became of the value."""
    copies: ReplicaPlacement
    """Where it lay."""
    lease_s: float | None
    """How long it could not be removed after it was looked up; None: longer than it was tried."""
    devices: tuple[str, ...] = ()
    """RDMA devices of this machine."""


def rdma_devices(folder: Path = _DEVICES) -> tuple[str, ...]:
    """Returns the RDMA devices that Linux knows on this machine."""
    try:
        return tuple(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ()


def probe_cluster(
    client: MooncakeClient, writer: ValueWriter, settings: MooncakeSettings, deadline: float
) -> ClusterFacts:
    """Put a value, look it up, and remove it; takes as long as its lease, `_LEASE_S` at most.

    Args:
        writer: puts it under the store's own prefix.
        deadline: on the clock of `time.monotonic`.

    Raises:
        MooncakeClosedError: the client was closed.
    """
    name = f"kvparams-doctor-{token_hex(8)}"
    key = settings.prefix + name
    best = float("inf")
    for _ in range(_QUESTIONS):
        start = time.monotonic()
        client.exists([key], deadline)
        best = min(best, time.monotonic() - start)
    (result,) = writer.put([PutOp(name, (memoryview(os.urandom(_PROBE_BYTES)),))], deadline)
    if result.code is not ResultCode.OK:
        return ClusterFacts(best, result.code, [], None, rdma_devices())
    try:
        found = client.copies([key], deadline)
        lease_s = _lease_s(client, key, deadline)
    finally:
        client.remove([key], deadline)
    return ClusterFacts(
        best, result.code, replica_placement(found[key]) if key in found else [], lease_s, rdma_devices()
    )


def _lease_s(client: MooncakeClient, key: str, deadline: float) -> float | None:
    """Returns how long a value that was just looked up cannot be removed; None if that is long enough."""
    start = time.monotonic()
    end = min(start + _LEASE_S, deadline)
    while (now := time.monotonic()) < end:
        (answer,) = client.remove([key], deadline, leased=False)
        if answer != MooncakeStatus.LEASED:
            return now - start if answer in (MooncakeStatus.OK, MooncakeStatus.NOT_FOUND) else None
        time.sleep(_PAUSE_S)
    return None


def advice_from_facts(
    facts: ClusterFacts, settings: MooncakeSettings, environment: Mapping[str, str] | None = None
) -> list[Advice]:
    """Returns what that means. Pure.

    Args:
        environment: of this process, which the client library reads; None: `os.environ`.
    """
    environment = os.environ if environment is None else environment
    said = [_master(facts, settings)]
    if facts.put is not ResultCode.OK:
        said.append(_no_room(facts, settings))
        return said
    said.append(Advice("ok", f"a value is stored in {len(facts.copies)} places"))
    if len(facts.copies) < settings.replicas:
        fewer = (
            f"replicas={settings.replicas}, but a value was stored {len(facts.copies)} times, because there are "
            "no more owners"
        )
        said.append(Advice("warning", fewer, f"start more owners: {_OWNER.format(settings.master)}"))
    if facts.lease_s is not None:
        short = f"a lookup leases a value for only {facts.lease_s:.1f} s: the value may be gone before it is read"
        said.append(Advice("warning", short, "start mooncake_master with --default_kv_lease_ttl=10000"))
    said += _way(facts, settings, environment)
    said += _process(settings, environment)
    return said


def _master(facts: ClusterFacts, settings: MooncakeSettings) -> Advice:
    found = f"the master at {settings.master} answers in {1000 * facts.question_s:.1f} ms"
    if facts.question_s > _SLOW_S:
        return Advice(
            "warning",
            found,
            "every lookup waits for that: run the master near the engines, on a machine with little load",
        )
    return Advice("ok", found)


def _no_room(facts: ClusterFacts, settings: MooncakeSettings) -> Advice:
    if facts.put is ResultCode.FULL:
        full = "there is no room for a small value: no owner lends memory, or all of it is leased"
        return Advice("error", full, _OWNER.format(settings.master))
    failed = f"a small value could not be put: {facts.put.value}"
    return Advice("error", failed, "check that this machine can reach the owners' ports and the master's")


def _way(facts: ClusterFacts, settings: MooncakeSettings, environment: Mapping[str, str]) -> list[Advice]:
    """Returns how bytes travel."""
    said: list[Advice] = []
    if settings.protocol == "tcp" and facts.devices:
        tcp = f"protocol=tcp, but this machine has RDMA devices: {', '.join(facts.devices)}"
        said.append(Advice("warning", tcp, "set protocol=rdma, here and at the owners"))
    if settings.protocol == "rdma" and "MC_FORCE_TCP" in environment:
        said.append(Advice("warning", "MC_FORCE_TCP is set: protocol=rdma does nothing", "unset it"))
    hosts = {endpoint.rpartition(":")[0] for endpoint, _, _ in facts.copies}
    loopback = {host for host in hosts if is_loopback(host)}
    if loopback and not is_loopback(settings.host):
        only = f"an owner has the address {loopback.pop()}, which works only on its own machine"
        said.append(Advice("warning", only, "start owners with --local and an address that other machines can reach"))
    return said


def _process(settings: MooncakeSettings, environment: Mapping[str, str]) -> list[Advice]:
    """Returns what this process is to the cluster."""
    said: list[Advice] = []
    if settings.metadata != "P2PHANDSHAKE":
        third = "metadata names another service, without which no client starts"
        said.append(Advice("warning", third, "remove metadata, here and at the owners: clients ask each other"))
    if settings.segment_bytes:
        lends = "segment is set: values of other engines in this process are lost when it ends"
        said.append(Advice("warning", lends, f"run separate processes that lend memory: {_OWNER.format('...')}"))
        if environment.get("MC_STORE_MEMCPY", "").strip().lower() in ("0", "false", "off", "no"):
            off = "MC_STORE_MEMCPY is off: values in this process are copied over the network"
            said.append(Advice("warning", off, "unset it"))
    return said
