"""Starts engines that refuse to start, each in a forked process: `python -m tests.interop.vllm.refusing JSON`.

JSON is a list of [model folder, settings of `kv_transfer_config`]. The last line of the output has the message of each
of them, in their order. The parent imports vLLM once and starts no server, which takes a quarter of the time.
"""

import json
import multiprocessing
import sys
from importlib import import_module
from typing import Any

__all__ = ["main"]


def _start(model: str, transfer: dict[str, Any], said: Any) -> None:
    vllm: Any = import_module("vllm")
    try:
        vllm.LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            block_size=32,
            kv_cache_memory_bytes=64 << 20,
            distributed_executor_backend="uni",
            kv_transfer_config=import_module("vllm.config").KVTransferConfig(**transfer),
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
        said.send(f"{type(error).__name__}: {error}")
    else:
        said.send("it has started")


def main() -> None:
    """Start them two at a time."""
    import_module("vllm")  # before it is forked
    context = multiprocessing.get_context("fork")
    cases: list[tuple[str, dict[str, Any]]] = json.loads(sys.argv[1])
    said: list[str] = []
    for first in range(0, len(cases), 2):
        started: list[tuple[Any, Any]] = []
        for model, transfer in cases[first : first + 2]:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_start, args=(model, transfer, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        for process, ours in started:
            try:
                said.append(ours.recv())
            except EOFError:
                said.append("it ended and said nothing")
            process.join()
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
