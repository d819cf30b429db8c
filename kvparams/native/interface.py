"""The functions of the native code, as their callers see them; the C files in this folder implement them.

Every function handles the ordinary form of its input and returns None for any other.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

__all__ = ["NativeCode"]

S = TypeVar("S", bound=tuple[int, int, int])


class NativeCode(Protocol):
    """The extension module."""

    def member_spans(
        self, raw: bytes, document: dict[str, object], span_type: type[S], max_depth: int, /
    ) -> dict[str, S] | None:
        """Returns where the members of an object stand in its text, by the keys of `document`.

        Args:
            raw: the text that `document` was parsed from.
            document: the object.
            span_type: what each position is made as: the start of the member, the start and the end of its value.
            max_depth: of objects and lists inside each other.

        Returns:
            None where a key stands twice or has an escape, a number has an exponent or very many digits, an object
            has more than 32 members, or there are more than 2,000 objects and lists.
        """
        ...

    def edit_members(
        self, raw: bytes, spans: Mapping[str, tuple[int, int, int]], changes: Mapping[str, bytes | None], /
    ) -> bytes | None:
        """Returns what `kvparams.jsontext.editing.edit` does, or None where a member is to be removed."""
        ...

    def pack_numbers(self, raw: bytes, name: str, /) -> tuple[int, int, bytes] | None:
        """Packs the list of numbers that follows the first `"name"` in a JSON text.

        Returns:
            Where the list begins and ends, and its numbers as unsigned 32-bit integers of this machine. None where
            there is no such name, or anything else behind it than a list of whole numbers from 0 to 2^32 - 1.
        """
        ...

    def write_object(self, members: Mapping[str, object], /) -> bytes | None:
        """Returns what `pydantic_core.to_json` does, for a dictionary.

        Returns:
            None where there is more in it than whole numbers of 64 bits, truth values, null, texts that need no
            escapes, and lists and dictionaries of these.
        """
        ...

    def fill_line(self, pieces: tuple[bytes, ...], values: tuple[object, ...], /) -> bytes | None:
        """Returns what `kvparams.jsontext.writing.fill_line` does.

        Returns:
            None where a text needs escapes, or a value is none of those that `fill_line` names.
        """
        ...

    def are_within(self, values: list[object], low: int, high: int, /) -> bool:
        """Returns whether all values are whole numbers of 64 bits from `low` to `high`, and no booleans."""
        ...

    def request_head(self, data: bytes, at: int, /) -> tuple[int, bytes, bytes, list[tuple[bytes, bytes]], int] | None:
        """Reads the head of a request that begins at `at`.

        Returns:
            The position behind it, the method, the target, the headers with names in lower case, and the
            Content-Length (0 without one). None where it is not whole, or could be read in two ways, or asks for more
            than a response: `Expect`, `Upgrade`, `Transfer-Encoding`, `Connection: close`, another version or method.
        """
        ...

    def response_head(self, data: bytes, /) -> tuple[int, int, bytes, bytes, int] | None:
        """Reads the head of a response.

        Returns:
            The position behind it, the status, Content-Type and Retry-After (empty without one), and the
            Content-Length, or -1 for chunks. None where it is not whole, or has no body by its status, or no framing,
            or closes the connection.
        """
        ...

    def read_chunks(self, data: bytes, left: int, /) -> tuple[bytes, int, int, int]:
        """Reads a part of a body that comes in chunks.

        Args:
            data: the part.
            left: what the call before has returned, at first 0.

        Returns:
            The data in it; how far it was read; what is left of the last chunk; and 0 if more has to come, 1 at the
            end of the body, 2 before a size line that is not ordinary, 3 where a chunk does not end with a line break.
        """
        ...

    def copy_values(self, values: Sequence[Sequence[tuple[object, object]]], skip: int, /) -> list[int] | None:
        """Copies values and computes their checksums in the same pass over memory, without the interpreter lock.

        Args:
            values: a list; each value is a list of equally long pieces of memory, as `(target, source)`, in order.
            skip: how many bytes at the front of each value are copied and not part of its checksum.

        Returns:
            XXH3-64 of each value's other bytes, as they were written. None where the pieces of a pair overlap or have
            different lengths, or something is neither a list nor a tuple; then nothing was copied.

        Raises:
            BufferError: a piece is not contiguous, or a target is not writable.
            ValueError: a piece is a memoryview that was released.
        """
        ...

    def gather_pages(
        self,
        slices: list[tuple[object, int, int]],
        pages: list[tuple[memoryview, list[tuple[int, int, int]], int, int]],
        /,
    ) -> list[int] | None:
        """Copies pages out of an engine's blocks, without the interpreter lock, and computes their checksums.

        Args:
            slices: K or V of some layers: memory of the shape `[layers, heads, blocks, tokens, dim]`, and where it
                stands in a payload, in bytes: the first layer's offset, and the distance from one layer to the next.
            pages: for each page the payload; its tokens in order, as `(block, first token in it, how many)`; how many
                tokens of the payload come before these; how many tokens the payload has.

        Returns:
            XXH3-64 of each payload. None where the slices leave out a part of a payload, a place lies outside of its
            memory, or the elements of a token do not follow each other; payloads may have been written then.

        Raises:
            BufferError: a payload is not contiguous, or not writable.
            ValueError: a payload was released.
        """
        ...

    def scatter_pages(
        self,
        slices: list[tuple[object, int, int]],
        pages: list[tuple[memoryview, list[tuple[int, int, int]], int, int]],
        /,
    ) -> bool | None:
        """Copies pages into an engine's blocks, without the interpreter lock.

        Args:
            slices: as for `gather_pages`.
            pages: as for `gather_pages`.

        Returns:
            True, or None as `gather_pages`; then nothing was copied.
        """
        ...
