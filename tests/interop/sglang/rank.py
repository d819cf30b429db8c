"""Runs one of two tensor parallel ranks in a process: `python -m tests.interop.sglang.rank STORE PORT RANK`.

Both ranks store and load the same tokens. In between, the second one damages a page of its own. It prints its results
as JSON.
"""

import json
import sys
from datetime import timedelta
from typing import Any

import torch

from kvparams_connectors.store import open_store
from tests.interop.sglang.importing import import_sglang

_KEPT = import_sglang()

from tests.interop.sglang.engine import Engine  # noqa: E402 - SGLang first
from tests.interop.sglang.pools import Shape, extra_config, parallel, put_value, value_of  # noqa: E402

_TOKENS = list(range(7, 7 + 16 * 12))


def main(url: str, port: int, rank: int) -> dict[str, object]:
    """What this rank saw."""
    distributed: Any = torch.distributed
    rendezvous = distributed.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=600))
    distributed.init_process_group("gloo", rank=rank, world_size=2, store=rendezvous, timeout=timedelta(seconds=600))
    group = distributed.group.WORLD
    with parallel(tp_size=2, tp_rank=rank):
        engine = Engine("hybrid", Shape(heads=1), group, extra_config(url))
        stored, pages = engine.store(_TOKENS, rank)
        distributed.barrier()
        whole = engine.load(_TOKENS)
        keys = [engine.backend._traffic._form.page(name).key for name in engine.hashes(_TOKENS)]
        distributed.barrier()
        if rank == 1:
            store = open_store(url)
            value = bytearray(value_of(store, keys[5]))
            value[700] ^= 1
            put_value(store, keys[5], bytes(value))
            store.close()
        distributed.barrier()
        damaged = engine.load(_TOKENS)
        gone = engine.load(_TOKENS)
        distributed.barrier()
        engine.controller.detach_storage_backend()
    distributed.destroy_process_group()
    return {
        "keys": keys,
        "stored": stored,
        "whole": whole[:2],
        "damaged": damaged[:2],
        "gone": gone[:2],
        "same": (whole[2], damaged[2], gone[2]) == (pages, pages[:5], pages[:5]),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
