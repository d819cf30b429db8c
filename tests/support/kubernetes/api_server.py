"""Serves an `ObjectHistory` over HTTP as a Kubernetes API server does: list in pages, watch, bookmarks, refusals.

What goes wrong is set by attributes: `status` refuses everything, `token` is the only one that is accepted,
`cut` ends watches after some events in the middle of a line, `is_silent` keeps watches open and says nothing.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.kubernetes.object_history import Gone, ObjectHistory
from tests.support.waiting import until

__all__ = ["FakeAPIServer"]

_POLL_S: Final = 0.005
_KINDS: Final = {
    "/api/v1/namespaces/{}/pods": "PodList",
    "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices": "EndpointSliceList",
    "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools": "InferencePoolList",
    "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives": "InferenceObjectiveList",
}


class FakeAPIServer:
    """The server. `pods`, `slices`, `pools` and `objectives` are what it has."""

    def __init__(self, namespace: str = "default") -> None:
        self.pods = ObjectHistory()
        self.slices = ObjectHistory()
        self.pools = ObjectHistory()
        self.objectives = ObjectHistory()
        self.port = 0
        self.status: int | None = None
        """Refuses everything with this status."""
        self.token: str | None = None
        """Only this token is accepted, if one is set."""
        self.cut: int | None = None
        """Watches end after so many events, in the middle of the next line."""
        self.is_silent = False
        """Watches say nothing."""
        self.delay_s = 0.0
        """Before each event."""
        self.bookmark_s = 0.2
        self.lists = 0
        self.watches = 0
        histories = (self.pods, self.slices, self.pools, self.objectives)
        self._histories = dict(zip((each.format(namespace) for each in _KINDS), histories, strict=True))
        self._namespace = namespace
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["FakeAPIServer"]:
        """Serves for as long as the context lasts."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        """Begins to serve, on the port it had before, if any."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cuts all connections and closes the port."""
        if self._server is not None:
            self._server.close()
            self.cut_connections()
            await until(lambda: not self._connections)
            self._server = None

    def cut_connections(self) -> None:
        """Cuts all connections."""
        for writer in list(self._connections):
            writer.transport.abort()

    def write_kubeconfig(self, path: Path, token_file: Path | None = None) -> Path:
        """Writes a kubeconfig for this server, and returns its path."""
        user: dict[str, str] = {} if token_file is None else {"tokenFile": str(token_file)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": self._namespace}}
            ],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if not await self._answer(head, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> bool:
        """Answers one request, and returns whether the connection can be used again."""
        target = head.split(" ", 2)[1]
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        history = self._histories.get(parts.path)
        if self.token is not None and f"authorization: bearer {self.token}".lower() not in head.lower():
            return await _refuse(writer, 401, "Unauthorized")
        if self.status is not None:
            return await _refuse(writer, self.status, "refused for the test")
        if history is None:
            return await _refuse(writer, 404, "the server could not find the requested resource")
        if query.get("watch") == "true":
            self.watches += 1
            await self._watch(history, query, writer)
            return False
        self.lists += 1
        try:
            page = history.page(
                query.get("labelSelector", ""), int(query.get("limit", "500")), query.get("continue", "")
            )
        except Gone:
            return await _refuse(writer, 410, "The provided continue parameter is too old")
        metadata = {"resourceVersion": str(page.version), "continue": page.token}
        return await _send(writer, 200, {"kind": "List", "metadata": metadata, "items": list(page.objects)})

    async def _watch(self, history: ObjectHistory, query: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
        loop = asyncio.get_running_loop()
        end_s = loop.time() + float(query.get("timeoutSeconds", "60"))
        version, sent, bookmarked_s = int(query["resourceVersion"]), 0, loop.time()
        while loop.time() < end_s and not writer.transport.is_closing():
            if self.is_silent:
                await asyncio.sleep(_POLL_S)
                continue
            try:
                changes = list(history.since(version, query.get("labelSelector", "")))
            except Gone:
                _event(writer, "ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
                await writer.drain()
                return
            for change in changes:
                await asyncio.sleep(self.delay_s)
                if self.cut is not None and sent >= self.cut:
                    line = json.dumps({"type": change.kind, "object": change.object}).encode()
                    writer.write(line[: len(line) // 2])
                    await writer.drain()
                    return
                _event(writer, change.kind, change.object)
                version, sent = change.version, sent + 1
            if not changes and loop.time() - bookmarked_s >= self.bookmark_s:
                bookmarked_s, version = loop.time(), max(version, history.version)
                _event(writer, "BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})
            await writer.drain()
            await asyncio.sleep(_POLL_S)


def _event(writer: asyncio.StreamWriter, kind: str, found: Mapping[str, Any]) -> None:
    writer.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")


async def _refuse(writer: asyncio.StreamWriter, status: int, message: str) -> bool:
    return await _send(writer, status, {"kind": "Status", "code": status, "message": message})


async def _send(writer: asyncio.StreamWriter, status: int, document: Mapping[str, Any]) -> bool:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return True
