"""Asks a running proxy with a token, for commands that show what it answers."""

from http.client import HTTPException
from typing import IO, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pydantic import ValidationError

from kvparams.errors import printable
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.admin_answers import ErrorAnswer

__all__ = ["NO_PROXY", "ProxyClient", "describe_refusal"]

NO_PROXY: Final = "is no kvparams proxy, or one of another version"
_TIMEOUT_S: Final = 30.0
_MOST_BYTES: Final = 16 << 20
_REDIRECTS: Final = range(300, 400)


class ProxyClient:
    """A proxy and the token that is shown to it."""

    def __init__(self, url: str, token: Secret) -> None:
        """`url` is that of the proxy, without a path.

        Raises:
            ValueError: it is no such URL.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError("URL must be http://host:port or https://host:port")
        self.url = url.rstrip("/")
        self._token = token
        self._opener = build_opener(_RefusedRedirects)

    def get(self, path: str) -> bytes:
        """Returns the body of an answer.

        Raises:
            HTTPError: its status is not 2xx.
            HTTPException, OSError: there is none.
        """
        return self.send(path, None, {})

    def send(self, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        """Returns the body of the answer to a POST, or to a GET where there is no body. Raises as `get` does."""
        shown = {"authorization": f"Bearer {self._token.reveal()}", **headers}
        with self._opener.open(Request(self.url + path, body, shown), timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read(_MOST_BYTES)
            return text


def describe_refusal(error: HTTPError, url: str, otherwise: str) -> str:
    """Says why a proxy has refused. `otherwise` says what else may be the reason if it is no proxy's answer."""
    if error.code in _REDIRECTS:
        return f"{url} answers with a redirect, which is not followed; give the URL of the proxy itself"
    try:
        return f"{error.code} {printable(ErrorAnswer.model_validate_json(error.read(_MOST_BYTES)).error.message)}"
    except (ValidationError, HTTPException, OSError):
        return f"{error.code} {printable(error.reason)}; {url} {NO_PROXY}, or {otherwise}"


class _RefusedRedirects(HTTPRedirectHandler):
    """Follows no redirect: the request holds a token."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: object, newurl: str
    ) -> Request | None:
        """See `HTTPRedirectHandler.redirect_request`. The redirect is raised as an `HTTPError`."""
        return None
