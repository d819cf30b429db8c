"""Finds engines of a command line and a fleet file that have the same URL."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from kvparams.instances import Role
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec

__all__ = ["notes_of_shared_urls"]


def notes_of_shared_urls(entries: Sequence[InstanceSpec]) -> list[str]:
    """Returns a note for each engine that is given twice, and each that prefills and decodes."""
    notes: list[str] = []
    first: dict[tuple[Role, str], InstanceSpec] = {}
    for entry in entries:
        other = first.setdefault((entry.role, _identity(entry.url)), entry)
        are_ranks = other.rank is not None and entry.rank is not None and other.rank != entry.rank
        if other is not entry and not are_ranks:
            notes.append(f"WARNING: {other.id} and {entry.id} are the same {entry.role} engine {entry.url}; remove one")
    for (role, url), entry in first.items():
        other = first.get((Role.PREFILL, url))
        if role is Role.DECODE and other is not None:
            notes.append(
                f"WARNING: {other.id} and {entry.id} have the same URL {entry.url}; that is right only for an engine "
                "that can do either part of a request. One that does both parts is declared with --aggregated"
            )
    return notes


def _identity(url: str) -> str:
    """Returns the form of an engine's URL that is equal for all of its spellings."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"
