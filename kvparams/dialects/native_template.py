"""Caches the native keys that a proxy writes on each leg: the table is read once, then values are filled in."""

from typing import Final, cast

from pydantic_core import to_json

from kvparams.codec import parse
from kvparams.dialects.message import JSONObject, get_at
from kvparams.dialects.table import LEGS, DialectTable
from kvparams.dialects.translation import customary_members, encode_lossy
from kvparams.params import PROTOCOL_VERSION, Phase

__all__ = ["NativeKeysTemplate", "constant_native_keys", "required_native_keys"]

_MARK: Final = "TRANSFER-ID-HERE"


class NativeKeysTemplate:
    """The native members of one leg as JSON text, where a transfer's id is all that changes between requests."""

    __slots__ = ("_pieces",)

    def __init__(self, table: DialectTable, phase: Phase) -> None:
        """Raises what `kvparams.dialects.translation.write` raises: the leg needs more than that."""
        document: JSONObject = {
            "version": PROTOCOL_VERSION,
            "request_id": _MARK,
            "transfer": {"id": _MARK, "attempt": 1},
            "phase": phase,
            "mode": table.mode,
        }
        usual = customary_members(table, phase)
        if usual:
            document["extensions"] = {table.extension: usual}
        message = encode_lossy(table, parse(document)).message
        home = get_at(message.body, table.home(LEGS[phase]))
        self._pieces = to_json(cast("JSONObject", home) if isinstance(home, dict) else {}).split(_MARK.encode())

    def fill(self, transfer_id: str) -> bytes:
        """The text of the object; `transfer_id` as in our document, which needs no escaping."""
        return self._pieces[0] if len(self._pieces) == 1 else transfer_id.encode().join(self._pieces)


def constant_native_keys(table: DialectTable, phase: Phase) -> dict[str, object]:
    """The native keys that are the same on this leg of every request."""
    leg = LEGS[phase]
    rows = [row for row in table.native_keys if leg in row.marker_values or leg in row.default_values]
    return {row.name: row.marker_values.get(leg, row.default_values.get(leg)) for row in rows}


def required_native_keys(table: DialectTable, phase: Phase) -> tuple[str, ...]:
    """The native keys without which the leg is worth nothing, whatever the engine's release."""
    leg = LEGS[phase]
    names = [
        row.name
        for row in table.native_keys
        if leg in row.required_legs and row.since is None and leg not in row.marker_values
    ]
    return tuple(dict.fromkeys(names))
