"""Builds the next minor version, which was never released: this source with the edits that a minor version is.

`tests.support.kvparams.next_minor` defines its additions. The proxy's own source needs no edit. An edit that no longer
fits the source is an error.
"""

import shutil
from pathlib import Path
from typing import Final

from tests.support.kvparams.next_minor import NEXT, NEXT_ADDED, NEXT_DEPRECATED

__all__ = ["ONCE", "PRIORITY", "make_build"]

ROOT: Final = Path(__file__).parents[3]
PRIORITY: Final = 5
"""What the new proxy writes on every leg."""
ONCE: Final = "for-one-reader"
"""The cache salt for which the new prefill engine says that the KV is there for one reader: that must be understood."""

(_OLD,) = NEXT_DEPRECATED
_EDITS: Final = {
    "kvparams/params.py": [
        ('PROTOCOL_VERSION: Final = "1.0"', f'PROTOCOL_VERSION: Final = "{NEXT}"'),
        (
            "    ttl_ms: Annotated[int, Field(ge=1, le=86_400_000)]\n",
            "    ttl_ms: Annotated[int, Field(ge=1, le=86_400_000)]\n"
            "    renewable: bool | None = None\n"
            "    once: bool | None = None\n",
        ),
        (
            "    usage: Usage | None = None\n",
            "    usage: Usage | None = None\n    priority: Annotated[int, Field(ge=0, le=9)] | None = None\n",
        ),
    ],
    "kvparams/versions.py": [
        (
            "ADDED_MEMBERS: Final[Mapping[str, frozenset[str]]] = {}",
            f"ADDED_MEMBERS: Final[Mapping[str, frozenset[str]]] = {dict(NEXT_ADDED)!r}",
        ),
        (
            "DEPRECATED_MEMBERS: Final[tuple[Deprecation, ...]] = ()",
            f"DEPRECATED_MEMBERS: Final = (Deprecation({_OLD.member!r}, {_OLD.since!r}, "
            f"date.fromisoformat('{_OLD.day}'), date.fromisoformat('{_OLD.until}'), {_OLD.instead!r}),)",
        ),
    ],
    "kvparams/routing/managers/leg_documents.py": [
        ('        "mode": mode,\n', f'        "mode": mode,\n        "priority": {PRIORITY},\n')
    ],
    "reference_engine/kv.py": [
        ("Lease(ttl_ms=LEASE_MS)", "Lease(ttl_ms=LEASE_MS, renewable=True)"),
        (
            "            if len(sessions) == 1:\n",
            "            isolation = handoff.shared and handoff.shared.isolation\n"
            f"            if isolation and isolation.cache_salt == {ONCE!r}:\n"
            "                more['lease'] = Lease(ttl_ms=LEASE_MS, renewable=True, once=True)\n"
            "                more['must_understand'] = ('lease.once',)\n"
            "            if len(sessions) == 1:\n",
        ),
    ],
}


def make_build(folder: Path) -> Path:
    """Put it there. What is run in this folder with `python -m` is the new build; elsewhere it is this source."""
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvparams", folder / "kvparams", ignore=without)
    shutil.copytree(ROOT / "examples" / "reference_engine", folder / "reference_engine", ignore=without)
    for name, edits in _EDITS.items():
        text = (folder / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times, not once"
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder
