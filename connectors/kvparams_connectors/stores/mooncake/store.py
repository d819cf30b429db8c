"""The store over Mooncake: a master that knows where values lie, owners that lend their memory, clients such as this.

Values that lie in a registered arena are written from and read into it without a copy; others go through a small
staging area. Mooncake evicts roughly what was not used for longest, and not what was looked up or read in the last ten
seconds (`--default_kv_lease_ttl` of the master). Nobody waits for a call into the client library; a worker makes it,
and while one is stuck, or the master away, everything is refused at once.

Owners are processes of their own: see `owner.py`. The files: `client.py` guards the library
(`library.py`), `stall_breaker.py` is the breaker, `writer.py` and `reading.py` are put
and get, `advice.py` says which settings will hurt.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvparams_connectors.advice import Advice
from kvparams_connectors.jobs import Job, finished_job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    BlockingStore,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
)
from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.mooncake.advice import advice_from_facts, probe_cluster
from kvparams_connectors.stores.mooncake.client import MooncakeClient, MooncakeClosedError, master_address
from kvparams_connectors.stores.mooncake.reader import MooncakeReader
from kvparams_connectors.stores.mooncake.registered_memory import RegisteredMemory
from kvparams_connectors.stores.mooncake.settings import MooncakeSettings
from kvparams_connectors.stores.mooncake.status_codes import MooncakeStatus, result_code
from kvparams_connectors.stores.mooncake.writer import MooncakeWriter

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["MooncakeSettings", "MooncakeStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)
_REGISTER_S: Final = 5.0
_CLOSE_S: Final = 2.0
_ADVICE_S: Final = 8.0
_PROBE_PAUSES_S: Final = (0.1, 1.0)


class MooncakeStore(BlockingStore):
    """Values in the memory of a Mooncake cluster.

    An arena that was registered stays in memory as long as the store. The process must not fork while it is open.
    """

    def __init__(self, settings: MooncakeSettings, client: MooncakeClient | None = None) -> None:
        """Connects to the master.

        Args:
            settings: the address of the master, and the other settings.
            client: a client that several stores share, under other prefixes; the caller closes it. None: one of its
                own.

        Raises:
            StoreError: the master cannot be reached, or the client library is missing or cannot be set up.
        """
        self._settings = settings
        self._client = client or MooncakeClient(settings)
        self._shares_client = client is not None
        try:
            self._memory = RegisteredMemory(
                self._client.register, self._client.unregister, settings.buffer_bytes, settings.threads
            )
        except MemoryError as error:
            if not self._shares_client:
                self._client.close(_CLOSE_S)
            raise StoreError(f"mooncake store: buffer={settings.buffer_bytes}: {error}") from error
        self._writer = MooncakeWriter(self._client, self._memory, settings.prefix, settings.max_value_bytes)
        self._reader = MooncakeReader(self._client, self._memory, settings.prefix)
        self._capabilities = Capabilities(
            persistent=not settings.segment_bytes,
            shared=True,
            max_value_bytes=settings.max_value_bytes,
            exact_lru=False,
            reports_sizes=False,
        )
        self._probing = threading.Lock()
        self._ending = threading.Event()
        super().__init__("mooncake", threads=settings.threads)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return self._capabilities

    def advice(self) -> Sequence[Advice]:
        """For `kvparams doctor`: what a value of a few bytes meets on its way, and what the settings are good for."""
        if self._client.stalls.is_open(time.monotonic()):
            return [Advice("error", f"the master at {self._settings.master} does not answer", "check that it runs")]
        asked: Job[Sequence[Advice]] = self._lane.submit(
            lambda job: advice_from_facts(
                probe_cluster(self._client, self._writer, self._settings, job.deadline), self._settings
            ),
            _ADVICE_S,
            timed_out=[
                Advice("error", f"no answer within {_ADVICE_S:.0f} s", "check that the master and the owners run")
            ],
            refused=[Advice("error", "it is closed, or has too much to do", "ask again later")],
        )
        return asked.result()

    @property
    def stalls(self) -> int:
        """Returns how often everything began to be refused: a call was stuck, or the master away."""
        return self._client.stalls.trip_count

    def register(self, arena: "Arena") -> None:
        """Spare the values in this arena a copy. If the client library does not take it, they are copied."""

        def add(_: Job[bool]) -> bool:
            return self._memory.add(arena)

        if not self._lane.submit(add, _REGISTER_S, timed_out=False, refused=False).result():
            _LOGGER.warning("a Mooncake store could not register an arena; its values are copied")

    # ---- refused at once while something is stuck

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Stores values; see `KVStore.put`."""
        return self._refusal(len(ops), deadline_s) or super().put(ops, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Reads values; see `KVStore.get`."""
        return self._refusal(len(ops), deadline_s) or super().get(ops, deadline_s)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Looks keys up; see `KVStore.exists`."""
        return self._refusal(len(keys), deadline_s) or super().exists(keys, deadline_s)

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Deletes keys; see `KVStore.delete`."""
        return self._refusal(len(keys), deadline_s) or super().delete(keys, deadline_s)

    def _refusal(self, count: int, deadline_s: float) -> Job[Results] | None:
        if not self._client.stalls.is_open(time.monotonic()):
            return None
        self._probe()
        return finished_job([Result(ResultCode.UNAVAILABLE)] * count, deadline_s)

    # ---- the work

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        return self._guarded(len(ops), lambda: self._writer.put(ops, deadline))

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        return self._guarded(len(ops), lambda: self._reader.get(ops, deadline))

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        return self._guarded(len(keys), lambda: self._reader.exists(keys, deadline))

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        return self._guarded(len(keys), lambda: self._remove(keys, deadline))

    def _remove(self, keys: Sequence[str], deadline: float) -> Results:
        once = list(dict.fromkeys(keys))
        answers = self._client.remove([self._settings.prefix + key for key in once], deadline)
        found = dict(zip(once, answers, strict=True))
        # Of a key that stands there twice the second is a miss.
        return [Result(result_code(found.pop(key, MooncakeStatus.NOT_FOUND))) for key in keys]

    def _guarded(self, count: int, work: Callable[[], Results]) -> Results:
        refused = [Result(ResultCode.UNAVAILABLE)] * count
        if count == 0:
            return []
        if self._client.stalls.is_open(time.monotonic()):
            return refused
        try:
            return work()
        except MooncakeClosedError:
            return refused
        finally:
            if self._client.stalls.is_open(time.monotonic()):
                self._probe()

    # ---- recovery and the end

    def _probe(self) -> None:
        """Have a thread find out when the store is usable again, if none does."""
        if not self._ending.is_set() and self._probing.acquire(blocking=False):
            threading.Thread(target=self._recover, name="kvparams-mooncake-probe", daemon=True).start()

    def _recover(self) -> None:
        pause = _PROBE_PAUSES_S[0]
        try:
            while not self._ending.wait(pause):
                pause = min(2 * pause, _PROBE_PAUSES_S[1])
                if self._usable() and self._client.stalls.recover(time.monotonic()):
                    return
        finally:
            self._probing.release()

    def _usable(self) -> bool:
        try:
            master_address(self._settings)
            return self._client.is_master_alive()
        except (StoreError, MooncakeClosedError):
            return False

    def close(self) -> None:
        """Waits, within bounds, for what was submitted, and lets go of everything."""
        self._ending.set()
        super().close()

    def release(self) -> None:
        """Lets go of everything; no worker runs any more."""
        try:
            self._memory.release()
        except MooncakeClosedError:
            return
        if not self._shares_client and not self._client.close(_CLOSE_S):
            _LOGGER.error("a Mooncake store was closed while its cluster did not answer; its memory is kept")


def open_url(url: StoreURL) -> KVStore:
    """`mooncake://master:port?replicas=2&prefix=kvparams:`; see `MooncakeURLSettings`."""
    return MooncakeStore(MooncakeSettings.of(url))
