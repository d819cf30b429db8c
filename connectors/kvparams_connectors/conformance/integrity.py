"""The tests of the level integrity: what is read is exactly what was put, whatever it looks like.

Every test compares whole values; a store that mixes up, shortens or lengthens one fails here.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

import pytest
from xxhash import xxh3_64_intdigest

from kvparams.pages import HEADER_BYTES, seal, unsealed_header, verify
from kvparams_connectors.conformance.helpers import (
    DEADLINE_S,
    ConformanceLevel,
    ConformancePrompt,
    check_lookup,
    get_one,
    make_sealed_page,
    make_value,
    put_one,
    result_codes,
)
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode

__all__ = ["IntegrityLevel"]

_PATTERNS: Final = {
    "zeros": bytes(10_000),
    "ones": b"\xff" * 10_000,
    "a reply that ends early": b"$-1\r\n" * 100,
    "a line's end first": b"\r\n" + bytes(range(256)),
    "a line's end last": bytes(range(256)) + b"\r\n",
    "the end of a list": b"END\r\nVALUE key 0 5\r\n",
    "text with a zero": "a\0b\N{SNOWMAN}".encode(),
    "a page's beginning": b"KVPG\1\0\0\1" + bytes(300),
}
_STEPS: Final = 150


class IntegrityLevel(ConformanceLevel):
    """No value is taken for another one, nor for more or less than it is."""

    @pytest.mark.parametrize("pattern", list(_PATTERNS))
    def test_a_value_may_look_like_anything(self, store: KVStore, pattern: str) -> None:
        content = _PATTERNS[pattern]
        assert put_one(store, "key", memoryview(content)).code is ResultCode.OK
        assert get_one(store, "key", len(content) + 64)[1] == content

    def test_keys_that_differ_in_one_character_have_values_of_their_own(self, store: KVStore) -> None:
        base = "k" * 128
        keys = [base, base[1:], base.upper(), *(f"{base[:at]}j{base[at + 1 :]}" for at in range(0, 128, 7))]
        results = store.put([PutOp(key, (make_value(key, 300),)) for key in keys], DEADLINE_S).result()
        assert result_codes(results) == [ResultCode.OK] * len(keys)
        assert [key for key in keys if get_one(store, key, 300)[1] != bytes(make_value(key, 300))] == []

    @pytest.mark.parametrize("pieces", [1, 2])
    def test_a_checksum_that_is_reported_is_that_of_the_bytes_that_were_written(
        self, store: KVStore, pieces: int
    ) -> None:
        """`PutOp.on_checksum` and `GetOp.on_checksum`: in place of the other reports, once, and the truth."""
        sizes = {"great": 300_000, "little": 300, "huge": min(5_000_000, store.capabilities.max_value_bytes // 4)}
        wanted = {key: make_value(key, size) for key, size in sizes.items()}
        sources = {key: memoryview(bytearray(bytes(HEADER_BYTES) + wanted[key][HEADER_BYTES:])) for key in sizes}
        targets = {key: memoryview(bytearray(size + 1_000)) for key, size in sizes.items()}
        reports: list[tuple[str, str]] = []

        def completing(key: str) -> Callable[[], None]:
            def complete() -> None:
                reports.append(("put", key))
                sources[key][:HEADER_BYTES] = wanted[key][:HEADER_BYTES]

            return complete

        def completing_hashed(key: str) -> Callable[[int], None]:
            complete = completing(key)

            def check(checksum: int) -> None:
                assert checksum == xxh3_64_intdigest(wanted[key][HEADER_BYTES:])
                complete()

            return check

        def looking(key: str) -> Callable[[int, int], None]:
            def look(nbytes: int, checksum: int) -> None:
                reports.append(("get", key))
                assert nbytes == sizes[key]
                assert checksum == xxh3_64_intdigest(targets[key][HEADER_BYTES:nbytes])

            return look

        def cut(memory: memoryview, at: int) -> list[memoryview]:
            return [memory] if pieces == 1 else [memory[:at], memory[at:]]

        puts = [
            PutOp(key, cut(source, 100), completing(key), on_checksum=completing_hashed(key))
            for key, source in sources.items()
        ]
        assert store.put(puts, DEADLINE_S).result() == [Result(ResultCode.OK, size) for size in sizes.values()]
        assert sorted(reports) == sorted(("put", key) for key in sizes)
        gets = [GetOp(key, cut(target, 200_000), on_checksum=looking(key)) for key, target in targets.items()]
        assert store.get(gets, DEADLINE_S).result() == [Result(ResultCode.OK, size) for size in sizes.values()]
        assert len(set(reports)) == len(reports)
        for key, size in sizes.items():
            same = targets[key][:size] == wanted[key]  # a test that fails shall not print a value
            assert same, key

    @pytest.mark.parametrize("pieces", [1, 2])
    def test_a_page_that_lacks_its_checksums_is_stored_with_them(self, store: KVStore, pieces: int) -> None:
        """`PutOp.page_header` and `PutOp.before_read`: whoever of both writes the header, it is the right one."""
        prompt = ConformancePrompt(16 * 5 + 3)
        targets: dict[str, memoryview] = {}
        puts: list[PutOp] = []
        for key, identity in zip(prompt.keys, prompt.identities, strict=True):
            page = memoryview(bytearray(make_sealed_page(identity)))
            page[:HEADER_BYTES] = bytes(HEADER_BYTES)
            assert verify(page, identity) is not None, "the page is whole before it is put"
            buffers = [page] if pieces == 1 else [page[: HEADER_BYTES + 10], page[HEADER_BYTES + 10 :]]
            header = unsealed_header(identity)
            puts.append(PutOp(key, buffers, partial(seal, page, identity), page_header=header))
            targets[key] = memoryview(bytearray(page.nbytes))
        assert result_codes(store.put(puts, DEADLINE_S).result()) == [ResultCode.OK] * len(puts)
        results = store.get([GetOp(key, (target,)) for key, target in targets.items()], DEADLINE_S).result()
        assert result_codes(results) == [ResultCode.OK] * len(puts)
        for identity, target, result in zip(prompt.identities, targets.values(), results, strict=True):
            assert verify(target[: result.nbytes], identity) is None
            assert target[HEADER_BYTES:] == make_sealed_page(identity)[HEADER_BYTES:]

    def test_pages_come_back_as_they_were_sealed_in_any_order(self, store: KVStore) -> None:
        prompt = ConformancePrompt(16 * 12 + 5)
        pages = {key: make_sealed_page(identity) for key, identity in zip(prompt.keys, prompt.identities, strict=True)}
        identities = dict(zip(prompt.keys, prompt.identities, strict=True))
        put_results = store.put([PutOp(key, (page,)) for key, page in pages.items()], DEADLINE_S).result()
        assert result_codes(put_results) == [ResultCode.OK] * len(pages)
        order = Random(0).sample(prompt.keys, len(prompt.keys))
        targets = {key: memoryview(bytearray(pages[key].nbytes)) for key in order}
        results = store.get([GetOp(key, (targets[key],)) for key in order], DEADLINE_S).result()
        assert results == [Result(ResultCode.OK, pages[key].nbytes) for key in order]
        assert {key: verify(targets[key], identities[key]) for key in order} == dict.fromkeys(order)
        assert [key for key in order if targets[key] != pages[key]] == []

    def test_a_shorter_value_under_the_same_key_has_nothing_of_the_longer_one(self, store: KVStore) -> None:
        for number, size in enumerate((70_000, 5, 0, 66_000, 4096, 1)):
            wanted = make_value(number, size)
            assert put_one(store, "key", wanted).code is ResultCode.OK
            check_lookup(store, [("key", size)])
            assert get_one(store, "key", 80_000)[1] == bytes(wanted)
            assert result_codes(store.delete(["key"], DEADLINE_S).result()) == [ResultCode.OK]

    def test_nothing_is_written_beside_the_buffers_of_a_batch_that_partly_fails(self, store: KVStore) -> None:
        put_one(store, "whole", make_value("whole", 20_000))
        put_one(store, "large", make_value("large", 30_000))
        memory = bytearray(b"\xa5" * 100_000)
        view = memoryview(memory)
        places = {"whole": slice(1_000, 21_000), "none": slice(30_000, 50_000), "large": slice(60_000, 89_999)}
        results = store.get([GetOp(key, (view[place],)) for key, place in places.items()], DEADLINE_S).result()
        assert result_codes(results) == [ResultCode.OK, ResultCode.MISS, ResultCode.TOO_LARGE]
        assert memory[places["whole"]] == make_value("whole", 20_000)
        beside = memory[:1_000] + memory[21_000:30_000] + memory[50_000:60_000] + memory[89_999:]
        assert set(beside) == {0xA5}

    def test_many_random_operations_agree_with_a_dictionary(self, store: KVStore) -> None:
        """Checks that random operations agree with a dictionary.

        All values fit, so that none may be evicted; each write has other bytes, so that a stale one shows.
        """
        random = Random(1)
        largest = max(1, min(50_000, store.capabilities.max_value_bytes // 64))
        names = [f"key-{number}" for number in range(12)]
        model: dict[str, bytes] = {}
        for step in range(_STEPS):
            keys = random.sample(names, random.randint(1, 5))
            action = random.choice(["put", "get", "get", "exists", "delete"])
            if action == "put":
                values = {key: bytes(make_value(f"{key} {step}", random.randint(0, largest))) for key in keys}
                ops = [PutOp(key, (memoryview(content),)) for key, content in values.items()]
                wanted = [ResultCode.EXISTS if key in model else ResultCode.OK for key in keys]
                assert result_codes(store.put(ops, DEADLINE_S).result()) == wanted, f"step {step}"
                model = values | model
            elif action == "get":
                found = [get_one(store, key, largest) for key in keys]
                assert [content for _, content in found] == [model.get(key, b"") for key in keys], f"step {step}"
                hits = [key in model for key in keys]
                assert [result.code is ResultCode.OK for result, _ in found] == hits, f"step {step}"
            elif action == "exists":
                check_lookup(store, [(key, len(model[key]) if key in model else None) for key in keys])
            else:
                wanted = [ResultCode.OK if key in model else ResultCode.MISS for key in keys]
                assert result_codes(store.delete(keys, DEADLINE_S).result()) == wanted, f"step {step}"
                for key in keys:
                    model.pop(key, None)
