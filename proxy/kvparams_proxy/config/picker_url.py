"""The URL of `--decode-picker`: where an external endpoint picker is asked for decode engines.

grpc://host:9002?timeout=0.5        grpcs:// speaks TLS, with the system's authorities
"""

from importlib.util import find_spec
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

__all__ = ["PickerURL", "parse_picker_url"]

_TIMEOUT_S: Final = 0.5
_MOST_S: Final = 60.0


class PickerURL(NamedTuple):
    """A checked URL."""

    target: str
    """`host:port`."""
    has_tls: bool
    timeout_s: float
    """For an answer; then the proxy's policy chooses."""


def parse_picker_url(text: str) -> PickerURL:
    """Parses the URL.

    Raises:
        ValueError: what is wrong and what to write instead; or a library is missing.
    """
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("grpc", "grpcs") and bool(parts.hostname and parts.port)
        settings = dict(parse_qsl(parts.query, keep_blank_values=True))
        timeout_s = float(settings.pop("timeout", _TIMEOUT_S))
    except ValueError:
        is_right, settings, timeout_s = False, {}, 0.0
        parts = urlsplit("")
    if not is_right or settings or parts.path or parts.fragment or "@" in parts.netloc or not 0 < timeout_s <= _MOST_S:
        raise ValueError(
            "must be grpc://host:port, or grpcs://host:port for TLS; ?timeout=SECONDS may follow, at most 60"
        )
    if find_spec("grpc") is None or find_spec("envoy") is None:
        raise ValueError("needs gRPC and Envoy's protocol: pip install 'kvparams[picker]'")
    return PickerURL(parts.netloc, parts.scheme == "grpcs", timeout_s)
