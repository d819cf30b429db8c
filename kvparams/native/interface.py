"""The functions of the native code, as their callers see them; the C files in this folder implement them.

Functions that read requests and pages handle the ordinary form of their input and return None for any other. Those of
the prefix index take arrays, which are objects with C-contiguous memory of native byte order, aligned to their words.
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

    def find_member(self, raw: bytes, name: str, /) -> tuple[int, int, int] | None:
        """Returns where a member of the object `raw` starts, where its value does and where that ends.

        `raw` is valid JSON. None where there is no such member or more than one, and as `member_spans`.
        """
        ...

    def find_words(self, raw: bytes, words: tuple[bytes, ...], at: int, /) -> list[int]:
        """Returns for each word where it stands first, from `at` on, or -1."""
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

    def write_object(self, members: Mapping[str, object], is_sorted: bool, /) -> bytes | None:
        """Returns what `pydantic_core.to_json` does, for a dictionary; with `is_sorted` in the order of the names.

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

    def has_form(self, members: dict[str, object], form: tuple[tuple[str, type, object], ...], /) -> bool:
        """Returns whether an object has exactly the members of a form, in this order.

        Args:
            members: the object. Values that the form names are texts, numbers, truth values or None.
            form: for each member its name, the type of its value, and the value, or Ellipsis where any will do.
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
        pages: list[tuple[memoryview, list[tuple[int, int, int]], int, int, int | None]],
        /,
    ) -> list[int] | None:
        """Copies pages out of an engine's blocks, without the interpreter lock, and computes their checksums.

        Args:
            slices: K or V of some layers: memory of the shape `[layers, heads, blocks, tokens, dim]`, and where it
                stands in a payload, in bytes: the first layer's offset, and the distance from one layer to the next.
            pages: for each page the payload; its tokens in order, as `(block, first token in it, how many)`; how many
                tokens of the payload come before these; how many tokens the payload has; None.

        Returns:
            XXH3-64 of each payload. None where the slices leave out a part of a payload or overlap in it, a place lies
            outside of its memory, or the elements of a token do not follow each other; payloads may have been written
            then.

        Raises:
            BufferError: a payload is not contiguous, or not writable.
            ValueError: a payload was released.
        """
        ...

    def scatter_pages(
        self,
        slices: list[tuple[object, int, int]],
        pages: list[tuple[memoryview, list[tuple[int, int, int]], int, int, int | None]],
        /,
    ) -> int | None:
        """Copies pages into an engine's blocks, without the interpreter lock.

        Args:
            slices: as for `gather_pages`.
            pages: as for `gather_pages`, but the last element is XXH3-64 of the payload, without which it is not
                copied, or None.

        Returns:
            How many were copied: those before the first one that has another checksum. None as `gather_pages`; then
            nothing was copied.
        """
        ...

    def put_values(
        self,
        fd: int,
        deadline: float,
        values: list[tuple[list[bytes | memoryview], bytes | None]],
        few_bytes: int,
        pair_bytes: int,
        /,
    ) -> tuple[int, int, list[bool], int, bytes]:
        """Puts values into a Valkey server, one after the other, without the interpreter lock.

        Args:
            fd: a connected socket that owes no reply.
            deadline: on the clock of `time.monotonic`.
            values: for each what is sent: the beginning of a command, the pieces of a value, the end of the command;
                and, if it is a page that lacks its checksums, `kvparams.pages.unsealed_header`, which is completed and
                written to the front of the first piece before that is sent.
            few_bytes: so many bytes may be under way, however many values they are.
            pair_bytes: so many bytes may be under way if they are two values.

        Returns:
            How it ended: 0 ordinarily; 1 before a reply that is not read here; 2 at the deadline; 3 when the server
            closed the connection; 5 with an error of the system. Then that error's number; for each value that was
            answered whether it was stored, and did not exist; how many were sent; what was received behind that. After
            0 and 1 the connection goes on.

        Raises:
            BufferError: a piece is not contiguous, or the header of a page is not writable.
            ValueError: a piece was released, or a page has no room for its header.
        """
        ...

    def get_values(
        self,
        fd: int,
        deadline: float,
        values: list[tuple[bytes, memoryview]],
        are_hashed: bool,
        few_bytes: int,
        pair_bytes: int,
        /,
    ) -> tuple[int, int, list[tuple[int, int]], int, bytes]:
        """Gets values from a Valkey server, one after the other, without the interpreter lock.

        Args:
            fd: as for `put_values`.
            deadline: as for `put_values`.
            values: for each the command, and the memory for the value, which may be larger.
            are_hashed: whether checksums are wanted. What has come is hashed while more is on its way.
            few_bytes: as for `put_values`.
            pair_bytes: as for `put_values`.

        Returns:
            As `put_values`, or 4 where a value does not end where it should. For each value that was answered its size,
            -1 if there is none, and XXH3-64 of what follows the header of a page.

        Raises:
            BufferError: memory is not contiguous or not writable.
            ValueError: memory was released.
        """
        ...

    def hash_blocks(
        self,
        tokens: object,
        weights: object,
        positions: object,
        namespace: int,
        parent: int,
        hashes: object,
        /,
    ) -> bool:
        """Computes what `kvparams.index.block_hashes.BlockHasher.hashes` does.

        Args:
            tokens: a list of ids, or an array of u32.
            weights: an array of u64, one for each token of a block.
            positions: an array of u64, one for each block.
            namespace: a number for the namespace.
            parent: the hash in front.
            hashes: an array of u64, one for each block; it is written.

        Returns:
            Whether every item of the list is an `int` in [0, 2^32). If not, `hashes` is partly written.
        """
        ...

    def find_nodes(
        self, table: tuple[object, object, object], base: int, buckets: int, hashes: object, numbers: object, /
    ) -> None:
        """Looks hashes up in a `kvparams.index.hash_table.HashTable`.

        Args:
            table: its arrays: the hash of each node as u64; the first node of each bucket and the next node of each
                node as u32.
            base: how many buckets there were when they were as many as a power of two.
            buckets: how many there are, at most twice as many.
            hashes: an array of u64.
            numbers: an array of u32; the number of each hash, or 0, is written there.
        """
        ...

    def find_runs(
        self, table: tuple[object, object, object], base: int, buckets: int, hashes: object, values: object, /
    ) -> list[tuple[int, int]]:
        """Returns what `HashTable.find_runs` does; `values` is an array of u32, by node number."""
        ...

    def link_nodes(self, table: tuple[object, object, object], base: int, buckets: int, numbers: object, /) -> None:
        """Inserts nodes, an array of u32, into the chains of a `HashTable`."""
        ...

    def unlink_nodes(self, table: tuple[object, object, object], base: int, buckets: int, numbers: object, /) -> None:
        """Removes nodes, an array of u32, from the chains of a `HashTable`."""
        ...

    def split_buckets(self, table: tuple[object, object, object], base: int, buckets: int, first: int, /) -> None:
        """Moves to the buckets of a `HashTable` from `first` on, which are new, the nodes that belong there."""
        ...

    def remove_leaves(
        self, links: tuple[object, ...], candidates: object, epoch: int, most: int, /
    ) -> tuple[int, bytes, bytes]:
        """Does what `kvparams.index.leaf_removal.remove_leaves` does; returns node numbers as packed u32.

        Raises:
            MemoryError: there is no memory for the numbers of removed nodes.
        """
        ...

    def find_file_values(
        self, buckets: memoryview, words: memoryview, records: memoryview, unit_bytes: int, keys: list[str], /
    ) -> list[tuple[int, int, int] | None] | None:
        """Looks keys up in the index of a `file` store, as `FileIndex.find` does.

        Args:
            buckets: see `kvparams_connectors.stores.file.file_map`, for this and the next two.
            words: one per slot.
            records: one per slot.
            unit_bytes: the size of a unit.
            keys: a list.

        Returns:
            For each key the slot of its value, the word of that slot and the size of the value; None where there is
            none. None for all if the memory has another shape.
        """
        ...
