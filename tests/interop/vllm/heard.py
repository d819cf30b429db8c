"""Runs stock vLLM engines that publish KV events, a proxy that subscribes to them, and connections that can be cut."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import httpx
import yaml

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server, free_port
from tests.interop.vllm.engines import ANSWER_S, CALM, PATIENCE_S, READY_S, complete, start_engine, until

if TYPE_CHECKING:  # where types are checked there is no vLLM, and no ZMQ
    zmq: Any = None
else:
    import zmq

__all__ = ["BLOCK", "LOOK_S", "Kind", "Line", "Site"]

BLOCK: Final = 64
"""Tokens of a block of the proxy."""
LOOK_S: Final = 0.01
"""Between two looks at what is heard at once."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How an engine is started, and how it names its blocks."""

    block_size: int
    cache_bytes: int
    kept: int
    """Batches that can be asked for again."""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


class Line:
    """From a publisher to who listens: it carries everything, until it is cut."""

    def __init__(self, source: str, target: str, *, binds: bool = False) -> None:
        """`binds`: whether the publisher connects to `source`, as vLLM's does to an address of one host."""
        self._source, self._target, self._binds = source, target, binds
        self._cut = self._over = False
        self.lost = 0
        """Messages that came while it was cut."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._thread.join(10)

    def cut(self) -> None:
        """What comes from now on is lost."""
        self._cut = True

    def mend(self) -> None:
        """It carries again."""
        self._cut = False

    def _run(self) -> None:
        context = zmq.Context()
        source, target = context.socket(zmq.SUB), context.socket(zmq.PUB)
        source.subscribe(b"")
        if self._binds:
            source.bind(self._source)
        else:
            source.connect(self._source)
        target.bind(self._target)
        while not self._over:
            if not source.poll(50):
                continue
            frames = source.recv_multipart()
            if self._cut:
                self.lost += 1
            else:
                target.send_multipart(frames)
        source.close(linger=0)
        target.close(linger=0)
        context.term()


class Site:
    """Engines that are asked directly: what the proxy believes of them it has only heard."""

    def __init__(self, folder: Path, model: Path, kinds: Mapping[str, Kind]) -> None:
        """`folder` takes sockets, whose paths must be short, and logs."""
        self._folder, self._model, self._kinds = folder, model, kinds
        self._stack = ExitStack()
        self._ports = {name: free_port() for name in kinds}
        self._numbers = count()
        self._token = "a-token-of-these-tests"
        self.engines: dict[str, Server] = {}
        self.lines: dict[str, Line] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._processes = stack.enter_context(Processes(self._folder))
            for name in self._kinds:
                self.lines[name] = stack.enter_context(Line(self._at(name, "said"), self._at(name, "heard")))
                self._start(name)
            self._processes.wait_ready(*self.engines.values(), within_s=READY_S)
            self.proxy = self._proxy()
            self._client = stack.enter_context(httpx.Client(timeout=ANSWER_S, verify=NO_CERTIFICATES))
            for name in self._kinds:
                until(lambda name=name: self.metric("connected", name) == 1, pause_s=LOOK_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def restart(self, name: str) -> None:
        """End an engine and start it anew, in the same place."""
        self._processes.stop(self.engines[name])
        self._start(name)
        self._processes.wait_ready(self.engines[name], within_s=READY_S)

    def ask(self, name: str, prompt: str | Sequence[int]) -> int:
        """An engine, directly. How many tokens it had cached, as it says."""
        usage = complete(self.engines[name].url, prompt, max_tokens=1)["usage"]
        details: dict[str, int] = usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0  # vLLM leaves out what is 0

    def believed(self, body: Mapping[str, object], path: str = "/v1/completions") -> dict[str, Any]:
        """What the proxy would do with this request; under `cached`, what each engine is believed to have of it."""
        answer = self._client.post(
            f"{self.proxy.url}/admin/explain-route",
            params={"path": path},
            json={"model": "tiny", "max_tokens": 1, **body},
            headers={"authorization": f"Bearer {self._token}"},
        )
        assert answer.status_code == 200, answer.text
        document = answer.json()
        return {**document, "cached": {one["id"]: one["cached"] for one in document["candidates"]}}

    def has(self, name: str, prompt: Sequence[int]) -> int:
        """Tokens of this prompt that the engine is believed to have; none where the proxy has not found it yet."""
        return self.believed({"prompt": list(prompt)})["cached"].get(name, 0)

    def settle(self, name: str) -> None:
        """Until the proxy has heard everything that an engine has said so far: of a prompt of its own at last."""
        number = next(self._numbers)
        own = [2 + number % 250, 2 + number // 250, *range(300, 300 + max(BLOCK, self._kinds[name].block_size))]
        self.ask(name, own)
        until(lambda: self.has(name, own) > 0, pause_s=LOOK_S)

    def metric(self, what: str, name: str) -> float:
        """One of `kvparams_proxy_kv_events_*`."""
        wanted = {f'kvparams_proxy_kv_events_{what}{end}{{instance="{name}"}}' for end in ("", "_total")}
        for line in self._client.get(f"{self.proxy.url}/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series in wanted:
                return float(value)
        return 0.0

    def _at(self, name: str, what: str) -> str:
        return f"ipc://{self._folder}/{name}-{what}"

    def _start(self, name: str) -> None:
        kind = self._kinds[name]
        told = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": kind.kept}
        told |= {"endpoint": self._at(name, "said"), "replay_endpoint": self._at(name, "again")}
        self.engines[name] = start_engine(
            self._processes,
            name,
            self._model,
            *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(told)),
            *kind.arguments,
            core=len(self.engines) % 2,
            block_size=kind.block_size,
            cache_bytes=kind.cache_bytes,
            environment={"VLLM_SERVER_DEV_MODE": "1", **kind.environment},
            port=self._ports[name],
        )

    def _proxy(self) -> Server:
        entries = [
            {
                "id": name,
                "url": engine.url,
                "role": "aggregated",
                "kv_events": self._at(name, "heard"),
                "kv_events_replay": self._at(name, "again"),
            }
            for name, engine in self.engines.items()
        ]
        fleet, token = self._folder / "fleet.yaml", self._folder / "token"
        fleet.write_text(yaml.safe_dump({"instances": entries}))
        token.write_text(self._token)
        token.chmod(0o600)
        port = free_port()
        command = [sys.executable, "-m", "kvparams", "proxy", "--config", str(fleet), "--port", str(port), *CALM]
        command += ["--mode", "aggregated", "--tokenizer", str(self._model), "--admin-token-file", str(token)]
        proxy = self._processes.start("proxy", *command, port=port)
        self._processes.wait_ready(proxy, within_s=PATIENCE_S)
        return proxy
