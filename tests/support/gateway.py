"""Runs a real Envoy in front of engines, with the configuration of docs/gateway.md, and a picker beside it."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.processes import Processes, free_ports

__all__ = ["Gateway", "Picker", "gateway_config", "start_envoy", "start_picker"]

_PAGE: Final = Path(__file__).parents[2] / "docs" / "gateway.md"
_OWN_BIN: Final = Path(sys.executable).parent
_BIN: Final = _OWN_BIN if (_OWN_BIN / "envoy").exists() else _PAGE.parents[1] / ".venv" / "bin"
"""Engines have environments of their own, without Envoy."""


@dataclass(frozen=True, slots=True)
class Picker:
    """A picker that runs."""

    pid: int
    grpc_port: int
    url: str
    """Of its HTTP port: health and metrics."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """An Envoy that runs."""

    pid: int
    url: str
    admin_url: str


def gateway_config() -> dict[str, Any]:
    """Returns the configuration of Envoy that docs/gateway.md shows."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    return yaml.safe_load(next(block for block in blocks if block.startswith("static_resources:")))


def start_picker(processes: Processes, name: str, *flags: str, port: int | None = None) -> Picker:
    """Starts `kvparams picker` and waits until it has an engine of each role. `port`: for gRPC."""
    grpc_port, http_port = free_ports(2)
    grpc_port = grpc_port if port is None else port
    command = [str(_BIN / "kvparams"), "picker", "--grpc-port", str(grpc_port), "--port", str(http_port), *flags]
    url = f"http://127.0.0.1:{http_port}"
    pid = processes.start(name, [*command, "--log-requests", "off"], ready=[f"{url}/health"])
    return Picker(pid, grpc_port, url)


def start_envoy(
    processes: Processes,
    folder: Path,
    name: str,
    picker_port: int,
    engine_ports: Sequence[int],
    change: Callable[[dict[str, Any]], None] = lambda config: None,
) -> Gateway:
    """Starts Envoy with the documented configuration, other ports, and what `change` does to it."""
    config = gateway_config()
    listen, admin = free_ports(2)
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = listen
    engines, picker = resources["clusters"]
    engines["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(port) for port in engine_ports]
    picker["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(picker_port)]
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
    change(config)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    command = [str(_BIN / "envoy"), "-c", str(path), "--concurrency", "1", "--log-level", "warning"]
    command += ["--use-dynamic-base-id"]
    url = f"http://127.0.0.1:{admin}"
    pid = processes.start(name, command, ready=[f"{url}/ready"])
    return Gateway(pid, f"http://127.0.0.1:{listen}", url)


def filters(config: dict[str, Any]) -> list[Any]:
    """Returns the HTTP filters of a configuration, which may be changed."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["http_filters"]


def _endpoint(port: int) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
