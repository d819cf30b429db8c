"""Defines a minor version that was never released, 1.1, as data: what it adds, and what it deprecates.

`tests/system/versions` makes a whole build of it. No released version will be this one.
"""

from collections.abc import Mapping
from datetime import date
from typing import Final

from kvparams.versions import Deprecation

__all__ = ["NEXT", "NEXT_ADDED", "NEXT_DEPRECATED"]

NEXT: Final = "1.1"
NEXT_ADDED: Final[Mapping[str, frozenset[str]]] = {NEXT: frozenset({"priority", "lease.renewable", "lease.once"})}
"""`priority` and `lease.renewable` may be overlooked. `lease.once` may not: the KV is there for one reader."""
NEXT_DEPRECATED: Final = (Deprecation("store_keys", NEXT, date(2026, 11, 30), date(2027, 11, 30), "load_keys"),)
