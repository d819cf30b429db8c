"""Native code for what is done for each byte of a request and each block of the prefix index, where it was built.

`NATIVE` is None where there is none, or where the environment says `KVPARAMS_NATIVE=off`. The Python code beside each
call does the same for all forms of its input.
"""

import os
from importlib import import_module
from typing import Final, cast

from kvparams.native.interface import NativeCode

__all__ = ["NATIVE", "NativeCode"]


def _load() -> NativeCode | None:
    if os.environ.get("KVPARAMS_NATIVE", "").lower() == "off":
        return None
    try:
        return cast("NativeCode", import_module("kvparams.native._native"))
    except ImportError:
        return None


NATIVE: Final = _load()
