"""The tests of the level engine order: the calls as engines make them, in their order.

A prefill engine saves the pages of a prompt in portions; a decode engine asks how far they reach, reads them, and the
last one is deleted when the transfer is over. Whatever comes back is verified as an engine would.
"""

import threading
from typing import Final

from kvparams.pages import PageIdentity, PageRefusal, verify
from kvparams_connectors.arena import Arena
from kvparams_connectors.conformance.helpers import (
    DEADLINE_S,
    ConformanceLevel,
    ConformancePrompt,
    Opener,
    check_lookup,
    make_sealed_page,
    put_one,
    result_codes,
)
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode

__all__ = ["EngineOrderLevel"]

_PORTION: Final = 4
_PAUSE_S: Final = 0.002


def verify_read(target: memoryview, result: Result, identity: PageIdentity) -> PageRefusal | None:
    """Returns what an engine makes of a page: it looks at the bytes that were read, and at no others."""
    return verify(target[: result.nbytes], identity)


class EngineOrderLevel(ConformanceLevel):
    """Lookup, save, load, release."""

    def test_a_thousand_pages_are_looked_up_at_once(self, store: KVStore) -> None:
        prompt = ConformancePrompt(1_000 * 16, dim=4)
        ops = [
            PutOp(key, (make_sealed_page(identity),))
            for key, identity in zip(prompt.keys[:24], prompt.identities, strict=False)
        ]
        assert result_codes(store.put(ops, DEADLINE_S).result()) == [ResultCode.OK] * 24
        sizes = [one.stored_bytes for one in prompt.identities[:24]]
        check_lookup(store, list(zip(prompt.keys, [*sizes, *[None] * 976], strict=True)))

    def test_a_decode_engine_reads_what_a_prefill_engine_is_still_saving(self, opener: Opener) -> None:
        prefill = opener()
        decode = opener() if prefill.capabilities.shared else prefill
        prompt = ConformancePrompt(16 * 20 + 3)
        wrong: list[str] = []
        read: list[str] = []

        saved = threading.Event()

        def load() -> None:
            left = list(range(len(prompt.keys)))
            last = False
            while left and not last:
                last = saved.wait(_PAUSE_S)  # once more after the last page
                there = decode.exists([prompt.keys[index] for index in left], DEADLINE_S).result()
                ready = [index for index, result in zip(left, there, strict=True) if result.code is ResultCode.OK]
                targets = {index: memoryview(bytearray(prompt.identities[index].stored_bytes)) for index in ready}
                ops = [GetOp(prompt.keys[index], (target,)) for index, target in targets.items()]
                for index, result in zip(ready, decode.get(ops, DEADLINE_S).result(), strict=True):
                    if result.code is not ResultCode.OK or verify_read(
                        targets[index], result, prompt.identities[index]
                    ):
                        wrong.append(f"page {index}: {result}")
                    read.append(prompt.keys[index])
                    left.remove(index)

        thread = threading.Thread(target=load)
        thread.start()
        for start in range(0, len(prompt.keys), _PORTION):
            ops = [
                PutOp(key, (make_sealed_page(identity),))
                for key, identity in zip(prompt.keys, prompt.identities, strict=True)
            ][start : start + _PORTION]
            codes_of_portion = result_codes(prefill.put(ops, DEADLINE_S).result())
            wrong += [f"save: {code}" for code in codes_of_portion if code is not ResultCode.OK]
        saved.set()
        thread.join(DEADLINE_S)
        assert wrong == []
        assert sorted(read) == sorted(prompt.keys)

    def test_two_engines_that_save_the_same_prompt_do_not_mix(self, opener: Opener) -> None:
        """Their numbers differ in the last bits, so the bytes differ under one key."""
        stores = [opener()]
        if stores[0].capabilities.shared:
            stores.append(opener())
        prompt = ConformancePrompt(16 * 8)
        jobs = [
            stores[writer % len(stores)].put(
                [
                    PutOp(key, (make_sealed_page(identity, writer),))
                    for key, identity in zip(prompt.keys, prompt.identities, strict=True)
                ],
                DEADLINE_S,
            )
            for writer in range(2)
        ]
        ends = [
            sorted(code.name for code in pair)
            for pair in zip(*(result_codes(job.result()) for job in jobs), strict=True)
        ]
        if stores[0].capabilities.one_winner:
            assert ends == [["EXISTS", "OK"]] * 8
        assert all("OK" in pair and set(pair) <= {"EXISTS", "OK"} for pair in ends)
        for key, identity in zip(prompt.keys, prompt.identities, strict=True):
            target = memoryview(bytearray(identity.stored_bytes))
            (result,) = stores[-1].get([GetOp(key, (target,))], DEADLINE_S).result()
            assert result.code is ResultCode.OK
            assert verify_read(target, result, identity) is None
            assert target in (make_sealed_page(identity, 0), make_sealed_page(identity, 1))

    def test_a_page_that_is_released_while_it_is_read_is_whole_or_missing(self, store: KVStore) -> None:
        prompt = ConformancePrompt(16)
        (key,), (identity,) = prompt.keys, prompt.identities
        page = make_sealed_page(identity)
        for _ in range(30):
            assert put_one(store, key, page).code is ResultCode.OK
            target = memoryview(bytearray(identity.stored_bytes))
            reading = store.get([GetOp(key, (target,))], DEADLINE_S)
            releasing = store.delete([key], DEADLINE_S)
            (result,) = reading.result()
            assert result.code in (ResultCode.OK, ResultCode.MISS)
            assert result.code is ResultCode.MISS or verify_read(target, result, identity) is None
            assert result_codes(releasing.result()) == [ResultCode.OK]

    def test_slots_of_an_arena_are_used_again_as_soon_as_a_save_is_settled(self, store: KVStore) -> None:
        prompt = ConformancePrompt(16 * 12)
        arena = Arena(0, prompt.identities[0].stored_bytes)
        store.register(arena)
        for key, identity in zip(prompt.keys, prompt.identities, strict=True):
            slot = arena.lease(DEADLINE_S)
            assert slot is not None
            slot.view[:] = make_sealed_page(identity)
            job = store.put([PutOp(key, (slot.view,))], DEADLINE_S)
            job.add_settled_callback(slot.release)
            assert result_codes(job.result()) == [ResultCode.OK]
        slot = arena.lease(DEADLINE_S)
        assert slot is not None
        for key, identity in zip(prompt.keys, prompt.identities, strict=True):
            (result,) = store.get([GetOp(key, (slot.view,))], DEADLINE_S).result()
            assert result.code is ResultCode.OK
            assert verify_read(slot.view, result, identity) is None
            assert slot.view == make_sealed_page(identity)

    def test_a_prompt_that_is_saved_again_moves_nothing(self, store: KVStore) -> None:
        prompt = ConformancePrompt(16 * 8 + 1)
        for wanted in (ResultCode.OK, ResultCode.EXISTS):
            ops = [
                PutOp(key, (make_sealed_page(identity, wanted.value),))
                for key, identity in zip(prompt.keys, prompt.identities, strict=True)
            ]
            assert result_codes(store.put(ops, DEADLINE_S).result()) == [wanted] * 9
        target = memoryview(bytearray(prompt.identities[-1].stored_bytes))
        (result,) = store.get([GetOp(prompt.keys[-1], (target,))], DEADLINE_S).result()
        assert result == Result(ResultCode.OK, target.nbytes)
        assert target == make_sealed_page(prompt.identities[-1], ResultCode.OK.value)
