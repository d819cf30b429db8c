"""Adds the proxy as middleware around an engine's own server, which then splits requests with other engines.

This is all that a server has to do for it. The engine knows nothing of it; its legs come as requests.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from starlette.types import ASGIApp

from kvparams.instances import Instance, Role
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.fleet.registry.credentials import EngineCredentials
from kvparams_proxy.secret import secret_from_file
from kvparams_proxy.sidecar.middleware import DisaggregatedServerMixin

__all__ = ["split"]


def split(
    app: ASGIApp, id: str, role: str, url: str, remotes: Sequence[str], key_file: str | None = None
) -> DisaggregatedServerMixin:
    """`app`, one of whose legs runs elsewhere.

    Args:
        app: the engine's.
        id: its name.
        role: what it does of a request: prefill or decode.
        url: where it is for others.
        remotes: engines of the other role, `http://host:port`.
        key_file: holds the key by which these engines know each other's legs from what clients send.

    Raises:
        KVParamsError: the key cannot be read.
        ValueError: a URL is none.
    """
    key = None if key_file is None else secret_from_file(Path(key_file))
    me = Instance(id, uuid4().hex, Role(role), url, "store")
    other = Role.DECODE if me.role is Role.PREFILL else Role.PREFILL
    instances = [Instance(f"{other}-{at}", uuid4().hex, other, each, "store") for at, each in enumerate(remotes)]
    rules = replace(default_spec_rules(), connector="store", credentials=EngineCredentials(key))
    settings = Settings(
        (me, *instances), local_id=id, spec_rules=rules, probe_interval_s=1.0, expose_route=True, log_requests="off"
    )
    return DisaggregatedServerMixin(app, settings, key=key)
