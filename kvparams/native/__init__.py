"""Native code for what is done for each byte of a request and each block of the prefix index, where it was built.

`NATIVE` is None where there is none, where the environment says `KVPARAMS_NATIVE=off`, or where it was built from older
sources than the Python code beside it. The Python code beside each
call does the same for all forms of its input.
"""

import os
import warnings
from importlib import import_module
from typing import Final, cast

from kvparams.native.interface import NativeCode

__all__ = ["NATIVE", "NativeCode"]


def _load() -> NativeCode | None:
    if os.environ.get("KVPARAMS_NATIVE", "").lower() == "off":
        return None
    try:
        found = import_module("kvparams.native._native")
    except ImportError:
        return None
    wanted = [name for name in vars(NativeCode) if not name.startswith("_")]
    missing = [name for name in wanted if not hasattr(found, name)]
    if missing:
        what = f"kvparams/native was built from older sources and is not used (no {missing[0]}): make native"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
        return None
    return cast("NativeCode", found)


NATIVE: Final = _load()
