"""What a proxy writes on the legs of a request, taken from the dialect's table once and then only filled in."""

from typing import Final, cast

from pydantic_core import to_json

from kvparams.codec import parse
from kvparams.dialects.message import Tree, look
from kvparams.dialects.table import LEGS, Table
from kvparams.params import PROTOCOL_VERSION, Phase
from kvparams.translation import customary, write

__all__ = ["Asking", "always", "wanted"]

_MARK: Final = "TRANSFER-ID-HERE"


class Asking:
    """The native members of one leg as JSON text, where a transfer's id is all that changes between requests."""

    __slots__ = ("_pieces",)

    def __init__(self, table: Table, phase: Phase) -> None:
        """Raises what `kvparams.translation.write` raises: the leg needs more than that."""
        document: Tree = {
            "version": PROTOCOL_VERSION,
            "request_id": _MARK,
            "transfer": {"id": _MARK, "attempt": 1},
            "phase": phase,
            "mode": table.mode,
        }
        usual = customary(table, phase)
        if usual:
            document["extensions"] = {table.extension: usual}
        message = write(table, parse(document)).message
        home = look(message.body, table.home(LEGS[phase]))
        self._pieces = to_json(cast("Tree", home) if isinstance(home, dict) else {}).split(_MARK.encode())

    def fill(self, transfer_id: str) -> bytes:
        """The text of the object; `transfer_id` as in our document, which needs no escaping."""
        return self._pieces[0] if len(self._pieces) == 1 else transfer_id.encode().join(self._pieces)


def always(table: Table, phase: Phase) -> dict[str, object]:
    """The native keys that are the same on this leg of every request."""
    leg = LEGS[phase]
    rows = [row for row in table.rows if leg in row.marks or leg in row.usual]
    return {row.name: row.marks.get(leg, row.usual.get(leg)) for row in rows}


def wanted(table: Table, phase: Phase) -> tuple[str, ...]:
    """The native keys without which the leg is worth nothing, whatever the engine's release."""
    leg = LEGS[phase]
    names = [row.name for row in table.rows if leg in row.needed and row.since is None and leg not in row.marks]
    return tuple(dict.fromkeys(names))
