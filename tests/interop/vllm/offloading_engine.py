"""Runs the scheduler's side of vLLM's offloading without an engine: its own manager and host memory, with our tier.

`compute(key)` is what a model would write into a chunk, so every chunk can be checked, byte by byte.
"""

import random
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import numpy as np

from tests.support.waiting import wait_until

if TYPE_CHECKING:  # vLLM is not installed where types are checked
    KVParamsTier: Any = None
    base: Any = None
    config: Any = None
    factory: Any = None
    spec: Any = None
    tiering_base: Any = None
else:
    with warnings.catch_warnings():  # what importing vLLM warns of is not ours
        warnings.simplefilter("ignore")
        from vllm.v1.kv_offload import base, config
        from vllm.v1.kv_offload.tiering import base as tiering_base
        from vllm.v1.kv_offload.tiering import factory, spec

        from kvparams_connectors.engines.vllm_tier.tier import KVParamsTier

__all__ = [
    "ROW",
    "USED",
    "Engine",
    "KVParamsTier",
    "base",
    "compute",
    "config",
    "engines",
    "factory",
    "keys_of",
    "offloading_config",
    "spec",
    "tiering_base",
    "wanted",
]

ROW: Final = 8192
"""Bytes of a chunk in host memory."""
USED: Final = 8000
"""Bytes of them that are used."""
_WAIT_S: Final = 120.0
_PATIENT: Final = {"deadline_s": 300.0}
"""On a busy machine too all that is stored is found and loaded."""


def offloading_config(store: str, *, rows: int = 16, dtype: str = "float32", told: dict[str, Any] | None = None) -> Any:
    tier = {"type": "KVParamsTier", "module_path": "kvparams_connectors.engines.vllm_tier.tier", "store": store}
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=USED // 2,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": rows * ROW,
            "secondary_tiers": [{**tier, "revision": "r", **_PATIENT, **(told or {})}],
        },
        engine_id=f"test-{uuid4().hex}",
        model=config.OffloadingModelConfig("org/model", dtype),
        cache=config.OffloadingCacheConfig(16, 1),
        parallel=config.OffloadingParallelConfig(
            rank=0,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )


class Engine:
    """A scheduler's calls; `compute` is what a model would write into the chunk of a key."""

    def __init__(self, store: str, **more: Any) -> None:
        self.spec = spec.TieringOffloadingSpec(offloading_config(store, **more))
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.rows: Any = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.served = 0

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self) -> None:
        """Until nothing is on its way."""

        def is_settled() -> bool:
            if not self.manager.has_pending_work():
                return True
            self.step()
            return False

        wait_until(is_settled, _WAIT_S, pause_s=0.0005)
        self.step()

    def found(self, context: Any, keys: list[bytes]) -> int:
        """How many chunks from the first on are in host memory by now; as vLLM's scheduler asks."""
        hits = 0

        def is_known() -> bool:
            nonlocal hits
            hits, later = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is base.LookupResult.MISS:
                    break
                hits += result in (base.LookupResult.HIT, base.LookupResult.HIT_PENDING)
                later |= result in (base.LookupResult.HIT_PENDING, base.LookupResult.RETRY)
            self.step()
            return not later

        wait_until(is_known, _WAIT_S, pause_s=0.0005)
        return hits

    def serve(self, keys: list[bytes]) -> list[bytes]:
        """One request: load what is stored, compute the rest, offload it. What the chunks of the request then hold."""
        self.served += 1
        context = base.ReqContext(f"request-{self.served}")
        self.manager.on_new_request(context)
        hits = self.found(context, keys)
        held: list[bytes] = []
        if hits:
            rows = self.manager.prepare_load(keys[:hits], context).chunk_ids
            held += [self.rows[row, :USED].tobytes() for row in rows]
            self.manager.complete_load(keys[:hits], context)
        held += [compute(key) for key in keys[hits:]]
        output = self.manager.prepare_store(keys, context)
        if output is not None and output.keys_to_store:
            for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.rows[row, :USED] = np.frombuffer(compute(key), np.uint8)
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step()
        return held

    def counts(self) -> dict[str, int]:
        """Since the last time, without what all names begin with."""
        stats = self.tier.get_stats()
        values: dict[str, dict[tuple[str, ...], int]] = stats.data["data"] if stats is not None else {}
        return {
            name.removeprefix("vllm:kvparams_tier_") + "".join(f"/{label}" for label in labels): number
            for name, found in values.items()
            for labels, number in found.items()
        }


def compute(key: bytes) -> bytes:
    return random.Random(key).randbytes(USED)


def keys_of(seed: int, count: int) -> list[bytes]:
    chance = random.Random(seed)
    return [base.make_offload_key(chance.randbytes(32), 0) for _ in range(count)]


def wanted(keys: list[bytes]) -> list[bytes]:
    return [compute(key) for key in keys]


@contextmanager
def engines(*stores: str, **more: Any) -> Generator[list[Engine]]:
    with ExitStack() as stack:
        made: list[Engine] = []
        for store in stores:
            engine = Engine(store, **more)
            stack.callback(engine.manager.shutdown)
            made.append(engine)
        try:
            yield made
        finally:
            for engine in made:
                engine.rows = None
