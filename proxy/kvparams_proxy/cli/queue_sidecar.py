"""The queue beside an engine: what `kvparams sidecar --broker` makes of a prefill engine and of a decode engine.

A broker URL with a password must come from a file, since other users can read a command line.
"""

import argparse
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvparams.instances import Instance, Role
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.cli.proxy_command import load_configuration, run_server
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.queue.consumer import WorkConsumer
from kvparams_proxy.queue.queue_upstream import QueueUpstream
from kvparams_proxy.secret import Secret, SecretError, secret_from_file
from kvparams_proxy.server.app import create_app
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.interface import Upstream, UpstreamFactory

__all__ = ["create_decode_node_app", "load_broker_url", "queue_instance", "queue_upstream_factory", "run_queue_sidecar"]

_QUEUE: Final = "queue"
"""The name of the one decode instance that a prefill engine's sidecar has."""
_ROOM: Final = 16
_POOL: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def load_broker_url(text: str) -> Secret:
    """Reads the value of `--broker`: a URL, or the path of a file that holds one.

    Raises:
        ValueError: it is neither, or shows a password.
    """
    if text.startswith(("amqp://", "amqps://")):
        if urlsplit(text).password is not None:
            raise ValueError(
                "holds a password, which others can see in a command line or a variable; put the URL into a file, and "
                "give the file's path"
            )
        return Secret(text)
    try:
        found = secret_from_file(Path(text))
    except SecretError as error:
        raise ValueError(f"must be amqp://host:port/vhost, amqps://..., or a file with such a URL: {error}") from error
    if not found.reveal().startswith(("amqp://", "amqps://")):
        raise ValueError(f"{text} does not hold an amqp:// or amqps:// URL")
    return found


def queue_instance(connector: str) -> Instance:
    """Returns one instance of the fleet that stands for all decode nodes of a pool."""
    return Instance(_QUEUE, _QUEUE, Role.DECODE, f"http://{_QUEUE}.invalid", connector)


def queue_upstream_factory(broker: Secret, pool: str, settings: Settings) -> UpstreamFactory:
    """Returns a factory of the upstream to that instance."""

    def reach(instance: Instance) -> Upstream | None:
        if instance.id != _QUEUE:
            return None
        wait_s, most = settings.queue.wait_s, settings.upstream_limits.answer_bytes
        return QueueUpstream(broker, name=pool, wait_s=wait_s, answer_bytes=most)

    return reach


def run_queue_sidecar(arguments: argparse.Namespace, role: Role, remote: Role) -> int:
    """Runs `kvparams sidecar --broker` and returns the exit status.

    Raises:
        ValueError: what is asked for does not go together.
    """
    if getattr(arguments, remote) or arguments.config is not None or arguments.check:
        raise ValueError(f"cannot be combined with --{remote}, --config or --check")
    broker, pool = load_broker_url(arguments.broker), cast("str", arguments.pool)
    if _POOL.fullmatch(pool) is None:
        raise ValueError("--pool must be 1 to 64 letters, digits, - or _")
    asked = load_configuration("sidecar", arguments)
    if asked is None:
        return 2
    (local,) = asked.settings.instances
    if role is Role.DECODE:
        return run_server(
            "sidecar",
            asked._replace(server=replace(asked.server, direct=False)),
            arguments=arguments,
            make=partial(create_decode_node_app, broker, pool, engine=local),
        )
    instances, modes = (local, queue_instance(local.dialect)), (ManagerMode("queue_mediated"),)
    settings = replace(asked.settings, instances=instances, local_id=local.id, modes=modes, modes_are_fixed=True)
    make = partial(create_app, reach=queue_upstream_factory(broker, pool, settings))
    return run_server("sidecar", asked._replace(settings=settings), arguments=arguments, make=make)


def create_decode_node_app(broker: Secret, pool: str, settings: Settings, engine: Instance) -> Starlette:
    """Creates the app beside a decode engine.

    It pulls requests instead of serving them, and serves its health and its metrics.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[Mapping[str, Any]]:
        access, limits = settings.spec_rules.credentials, settings.limits.get(Role.DECODE)
        room = (limits.requests if limits is not None else None) or _ROOM
        async with AsyncExitStack() as stack:
            way = UpstreamConnectionPool(
                engine.url, settings.upstream_limits, access.tls, server_name=access.server_name, key=access.key
            )
            stack.callback(way.close)
            consumer = WorkConsumer(
                broker,
                way,
                name=pool,
                room=room,
                silence_s=settings.decode_timeout_s,
                probe_s=settings.probe_interval_s,
            )
            yield {"consumer": await stack.enter_async_context(consumer)}

    return Starlette(routes=[Route("/health", _health), Route("/metrics", _metrics)], lifespan=lifespan)


async def _health(request: Request) -> Response:
    """Reports whether the node would accept work now."""
    consumer: WorkConsumer = request.state.consumer
    missing = [what for what, there in (("broker", consumer.connected), ("engine", consumer.engine_ready)) if not there]
    body = {"status": "unavailable" if missing else "ok", **({"missing": missing} if missing else {})}
    return Response(json.dumps(body), 503 if missing else 200, media_type="application/json")


async def _metrics(request: Request) -> Response:
    consumer: WorkConsumer = request.state.consumer
    lines = ["# TYPE kvparams_queue_work_total counter"]
    lines += [f'kvparams_queue_work_total{{outcome="{name}"}} {count}' for name, count in consumer.counts.items()]
    lines += ["# TYPE kvparams_queue_running gauge", f"kvparams_queue_running {consumer.running_count}"]
    lines += ["# TYPE kvparams_queue_room gauge", f"kvparams_queue_room {consumer.capacity}"]
    return PlainTextResponse("\n".join([*lines, ""]))
