"""Lists and watches objects of a Kubernetes API server.

`lightkube` reads the kubeconfig or the service account (TLS, client certificates, exec plugins, and tokens that are
read again when the server refuses them). Its own watch is not used: in 1.0.1 (`core/async_client.py`) it waits for ever
on a connection that says nothing, asks for no bookmarks, and starts anew after 410 without telling, so that what was
deleted meanwhile is never heard of.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final, NamedTuple, cast

from kvparams_proxy.config_errors import ConfigError

__all__ = ["ExpiredVersion", "KubernetesAPI", "KubernetesError", "ListResult", "WatchEvent"]

_PATHS: Final[Mapping[str, str]] = {
    "pods": "/api/v1/namespaces/{}/pods",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
    "inferencepools": "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools",
    "inferenceobjectives": "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives",
}
_PAGE: Final = 500
"""Objects of one answer to a list."""
_MOST_OBJECTS: Final = 20_000
_MOST_BYTES: Final = 64 << 20
"""Of one answer to a list."""
_MOST_LINE_BYTES: Final = 4 << 20
"""Of one event; an object has at most 1.5 MiB in etcd."""
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 15.0
_GONE: Final = 410


class KubernetesError(Exception):
    """The API server cannot be asked, or it refuses; the message says why and what to do."""


class ExpiredVersion(KubernetesError):
    """The server no longer has the events behind a version: everything has to be listed anew."""


class ListResult(NamedTuple):
    """A `ListResult` is all objects that match, as of one version."""

    objects: list[Mapping[str, Any]]
    version: str


class WatchEvent(NamedTuple):
    """A `WatchEvent` is one change: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`."""

    kind: str
    object: Mapping[str, Any]


class KubernetesAPI:
    """A `KubernetesAPI` lists and watches the objects of one kind in one namespace that match a selector."""

    def __init__(self, resource: str, selector: str, namespace: str | None = None) -> None:
        """Reads the credentials. Blocks.

        Args:
            resource: `pods`, `endpointslices`, `inferencepools` or `inferenceobjectives`.
            selector: as `kubectl get --selector` takes it; empty: all.
            namespace: that of the service account or of the kubeconfig's context, if not said.

        Raises:
            ConfigError: lightkube is not installed, or there are no credentials.
        """
        try:
            from lightkube.config.client_adapter import AsyncClient, ConnectionParams
            from lightkube.config.kubeconfig import KubeConfig
        except ImportError:
            raise ConfigError(("Kubernetes needs lightkube: pip install 'kvparams[kubernetes]'",)) from None
        import httpx2

        try:
            config = KubeConfig.from_env().get()
            if config is None:
                raise ValueError("no context is chosen")
            timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
            self._client = AsyncClient(config, ConnectionParams(timeout=timeout, trust_env=False))
        except Exception as error:
            what = "neither a service account nor a kubeconfig (KUBECONFIG, ~/.kube/config) can be used"
            raise ConfigError((f"{what}: {error}",)) from error
        self._failures = (httpx2.HTTPError, httpx2.StreamError, OSError)
        self._timeout = httpx2.Timeout
        self.namespace: Final = namespace or config.namespace
        self._path = _PATHS[resource].format(self.namespace)
        self._resource = resource
        self._selector = selector

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def list(self) -> ListResult:
        """Returns all objects, page after page.

        Raises:
            KubernetesError: the server cannot be asked, or refuses.
        """
        objects: list[Mapping[str, Any]] = []
        token = ""
        while True:
            page = await self._page(token)
            objects += page.objects
            if len(objects) > _MOST_OBJECTS:
                raise KubernetesError(f"more than {_MOST_OBJECTS} {self._resource} match {self._selector!r}")
            token = page.token
            if not token:
                return ListResult(objects, page.version)

    async def watch(self, version: str, seconds: int, silence_s: float) -> AsyncGenerator[WatchEvent]:
        """Yields what has changed since a version, until the server ends it.

        Args:
            version: of a list, or of the last event.
            seconds: after which the server is asked to end it.
            silence_s: after which a connection that says nothing counts as lost.

        Raises:
            ExpiredVersion: the version is too old.
            KubernetesError: the server cannot be asked, or refuses, or the connection is lost.
        """
        query = {
            "watch": "true",
            "labelSelector": self._selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        timeout = self._timeout(silence_s, connect=_CONNECT_S)
        try:
            async with self._client.stream("GET", self._path, params=query, timeout=timeout) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise self._refusal(answer.status_code, answer.content)
                async with aclosing(_lines(answer.aiter_bytes())) as lines:
                    async for line in lines:
                        yield _event(line)
        except self._failures as error:
            raise KubernetesError(f"the watch was lost: {_reason(error)}") from error

    async def _page(self, token: str) -> "_Page":
        query = {"labelSelector": self._selector, "limit": str(_PAGE)} | ({"continue": token} if token else {})
        try:
            async with self._client.stream("GET", self._path, params=query) as answer:
                content = bytearray()
                async for part in answer.aiter_bytes():
                    content += part
                    if len(content) > _MOST_BYTES:
                        raise KubernetesError(f"an answer of the API server is larger than {_MOST_BYTES} bytes")
                if answer.status_code != 200:
                    raise self._refusal(answer.status_code, bytes(content))
        except self._failures as error:
            raise KubernetesError(f"the API server cannot be reached: {_reason(error)}") from error
        return _page(bytes(content))

    def _refusal(self, status: int, content: bytes) -> KubernetesError:
        """Returns the error for an answer that is not 200, with what to do about it."""
        if status == _GONE:
            return ExpiredVersion("the version is too old")
        message = _message(content)
        if status == 403:
            wanted = f"verbs list and watch on {self._resource} in the namespace {self.namespace}"
            return KubernetesError(f"the API server refuses (403 {message}): the service account needs {wanted}")
        if status == 401:
            return KubernetesError(f"the API server does not accept the credentials (401 {message})")
        return KubernetesError(f"the API server answers {status} {message}")


class _Page(NamedTuple):
    objects: list[Mapping[str, Any]]
    version: str
    token: str


def _page(content: bytes) -> _Page:
    document = _object(content)
    metadata = document.get("metadata")
    items = document.get("items")
    if not isinstance(metadata, dict) or not isinstance(items, list):
        raise KubernetesError("the API server's answer is no list")
    facts = cast("dict[str, Any]", metadata)
    objects = [cast("Mapping[str, Any]", each) for each in cast("list[object]", items) if isinstance(each, dict)]
    return _Page(objects, str(facts.get("resourceVersion") or ""), str(facts.get("continue") or ""))


def _event(line: bytes) -> WatchEvent:
    document = _object(line)
    kind, found = document.get("type"), document.get("object")
    if not isinstance(kind, str) or not isinstance(found, dict):
        raise KubernetesError("the API server has sent an event that is none")
    event = WatchEvent(kind, cast("Mapping[str, Any]", found))
    if kind == "ERROR":
        if event.object.get("code") == _GONE:
            raise ExpiredVersion("the version is too old")
        raise KubernetesError(f"the API server has ended the watch: {str(event.object.get('message'))[:200]}")
    return event


async def _lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yields whole lines. What stands behind the last line break when the answer ends is no event."""
    held = bytearray()
    async for part in parts:
        first, *others = part.split(b"\n")
        held += first
        for other in others:
            if held:
                yield bytes(held)
            held = bytearray(other)
        if len(held) > _MOST_LINE_BYTES:
            raise KubernetesError(f"an event of the API server is larger than {_MOST_LINE_BYTES} bytes")


def _object(content: bytes) -> Mapping[str, Any]:
    try:
        document: object = json.loads(content)
    except (ValueError, RecursionError):
        raise KubernetesError("the API server's answer is not JSON") from None
    if not isinstance(document, dict):
        raise KubernetesError("the API server's answer is no object")
    return cast("Mapping[str, Any]", document)


def _message(content: bytes) -> str:
    try:
        return str(_object(content).get("message", ""))[:200]
    except KubernetesError:
        return ""


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
