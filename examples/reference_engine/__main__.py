"""`python -m reference_engine`: one engine in one process.

Every setting is an argument; nothing is read from the environment.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import torch
import uvicorn
from starlette.types import ASGIApp

from kvparams.errors import KVParamsError
from kvparams.signing.request_verifier import RequestVerifier
from kvparams.signing.verification import CLOCK_SKEW_S
from kvparams_connectors.engines.process_start import process_start_time
from reference_engine.api import create_app
from reference_engine.cache import PagedCache
from reference_engine.embeddings import Embedder
from reference_engine.engine import Engine, EngineSettings
from reference_engine.kv import KVSharing, Role
from reference_engine.metrics import Metrics
from reference_engine.model import Model
from reference_engine.serving import Service
from reference_engine.shape import ModelShape
from reference_engine.splitting import split
from reference_engine.transfers import Transfers

__all__ = ["main"]

_SHUTDOWN_S: Final = 5
_MAX_MODEL_LEN: Final = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; requests in flight then have five seconds. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    host, port = cast("str", arguments.host), cast("int", arguments.port)
    try:
        listener = _bind(host, port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        print(
            f"reference_engine: cannot listen on {host} port {port}: {reason}; choose another --port", file=sys.stderr
        )
        return 1
    with listener:
        return _serve(arguments, listener)


def _serve(arguments: argparse.Namespace, listener: socket.socket) -> int:
    torch.set_num_threads(1)
    shape = ModelShape()
    blocks, block_size = cast("int", arguments.blocks), cast("int", arguments.block_size)
    rate = cast("int | None", arguments.tokens_per_s)
    settings = EngineSettings(
        blocks,
        block_size,
        min(_MAX_MODEL_LEN, blocks * block_size),
        max_sequences=cast("int", arguments.max_sequences),
        step_s=cast("int", arguments.step_ms) / 1000,
        token_s=0.0 if rate is None else 1 / rate,
    )
    metrics = Metrics()
    cache = PagedCache(shape.layers, settings.blocks, settings.block_size, shape.kv_heads, shape.head_dim)
    role = cast("Role", arguments.role)
    model_name = cast("str", arguments.model_name)
    try:
        sharing = KVSharing(
            role=role,
            instance_id=cast("str | None", arguments.id) or f"{role}-{os.getpid()}",
            store_url=cast("str | None", arguments.store),
            model_name=model_name,
            shape=shape,
            cache=cache,
            page_tokens=cast("int", arguments.page_tokens),
            verify=not cast("bool", arguments.no_verify),
            metrics=metrics,
            gate=_gate(arguments),
            legacy=cast("bool", arguments.legacy),
        )
    except (KVParamsError, ValueError) as error:
        print(f"reference_engine: cannot share KV: {error}", file=sys.stderr)
        return 2
    model = Model(shape, settings.max_model_len)
    service = Service(
        engine=Engine(model, cache, settings, metrics),
        sharing=sharing,
        transfers=Transfers(sharing, metrics),
        embedder=Embedder(model, settings.max_model_len),
        metrics=metrics,
        model_name=model_name,
        max_model_len=settings.max_model_len,
    )
    app: ASGIApp = create_app(service)
    if remotes := cast("list[str]", arguments.remote):
        where = listener.getsockname()
        host = f"[{where[0]}]" if ":" in where[0] else where[0]
        try:
            url = f"http://{host}:{where[1]}"
            app = split(app, sharing.instance.id, role, url, remotes, cast("str | None", arguments.engine_key_file))
        except (KVParamsError, ValueError) as error:
            print(f"reference_engine: cannot split requests: {error}", file=sys.stderr)
            return 2
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _gate(arguments: argparse.Namespace) -> RequestVerifier | None:
    """Lets only signed documents in, where keys are given.

    Raises:
        SigningKeyringError: they cannot be used.
        ValueError: nobody says which pool this engine belongs to.
    """
    keys, audience = cast("str | None", arguments.verify_with), cast("str | None", arguments.audience)
    if keys is None:
        return None
    if audience is None:
        raise ValueError("--verify-with needs --audience, the pool that this engine belongs to")
    skew_s = cast("int", arguments.clock_skew)
    name = cast("str | None", arguments.id)
    return RequestVerifier(Path(keys), audience, time.time, since=process_start_time(), instance=name, skew_s=skew_s)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port in use is known before the model is made; uvicorn listens when it can."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _port(text: str) -> int:
    """A port; 0 for any that is free."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose one from 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _skew(text: str) -> int:
    """Seconds by which clocks may differ: as many as the protocol allows."""
    if not text.isdecimal() or int(text) > 300:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 300")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reference_engine", description="A small but real inference engine.")
    parser.add_argument("--role", choices=("prefill", "decode", "both"), default="both")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, required=True)
    parser.add_argument("--id", help="the instance's name (default: role and process id)")
    parser.add_argument("--model-name", default="reference")
    parser.add_argument("--store", metavar="URL", help="share KV through this store, e.g. file:///dev/shm/kv?size=1GiB")
    parser.add_argument(
        "--remote",
        action="append",
        default=[],
        metavar="URL",
        help="an engine of the other role: requests of clients are split with it (repeat it for each)",
    )
    parser.add_argument(
        "--engine-key-file", metavar="FILE", help="... and this key tells the legs of other such engines from clients"
    )
    parser.add_argument("--verify-with", metavar="FILE", help="believe only documents signed with a key of this file")
    parser.add_argument("--audience", metavar="POOL", help="... and made for this pool")
    parser.add_argument(
        "--clock-skew",
        type=_skew,
        default=int(CLOCK_SKEW_S),
        metavar="SECONDS",
        help="... by how much clocks may differ; for so long after its start it is not ready (default: 30)",
    )
    parser.add_argument("--legacy", action="store_true", help="speak only the three fields of vLLM #12957")
    parser.add_argument("--no-verify", action="store_true", help="use stored pages unchecked (to show what that does)")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the paged KV cache (default: 4096)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: 16)")
    parser.add_argument("--step-ms", type=int, default=0, help="a step takes at least so long (default: 0)")
    parser.add_argument(
        "--tokens-per-s", type=_count, metavar="N", help="... and compute at most so many tokens (default: no limit)"
    )
    parser.add_argument(
        "--max-sequences", type=_count, default=64, metavar="N", help="computed at the same time (default: 64)"
    )
    parser.add_argument("--page-tokens", type=int, default=64, help="tokens of a stored page (default: 64)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
