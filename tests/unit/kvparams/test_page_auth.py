"""Tests pages with a tag: without the key no one can write, change or move one."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvparams import pages
from kvparams.keys import Geometry, KVShard, Namespace, chain_pages
from kvparams.page_auth import PAGE_AUTH_METHODS, PageAuthError, PageAuthKeys, PageAuthMethod, TenantPageAuthKeys
from kvparams.pages import (
    HEADER_BYTES,
    PAGE_REFUSAL_REASONS,
    REASONS_USABLE_BY_OTHERS,
    PageIdentity,
    PageRefusalReason,
    page_identity,
    seal,
    verify,
)

SHAPE = Geometry(layers=2, kv_heads=2, k_dim=4, v_dim=4)
SPACE = Namespace("model", "revision", "float16", SHAPE, page_tokens=8)
PART = KVShard.whole(SHAPE)
PAGES = chain_pages(SPACE, list(range(16)))
IDENTITY = page_identity(SPACE, PAGES[0], PART)
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
EITHER = st.sampled_from(list(PAGE_AUTH_METHODS))


def keys(*secrets: bytes, method: PageAuthMethod = "aes-256-gmac", tenant: str | None = None) -> TenantPageAuthKeys:
    return PageAuthKeys(secrets or (KEY,), method).for_tenant(tenant)


def sealed(by: TenantPageAuthKeys | None, identity: PageIdentity = IDENTITY, seed: int = 0) -> bytearray:
    page = bytearray(HEADER_BYTES) + bytearray(Random(seed).randbytes(identity.payload_bytes))
    seal(memoryview(page), identity, by)
    return page


def reason(
    page: bytes | bytearray, by: TenantPageAuthKeys | None, expected: PageIdentity = IDENTITY
) -> PageRefusalReason | None:
    refusal = verify(memoryview(page), expected, by)
    return None if refusal is None else refusal.reason


def checked(page: bytearray) -> bytearray:
    """The page with checksums that fit again: what whoever can write to the store can do without a key."""
    page[40:48] = xxh3_64_intdigest(bytes(page[HEADER_BYTES:])).to_bytes(8, "little")
    page[248:256] = xxh3_64_intdigest(bytes(page[:248])).to_bytes(8, "little")
    return page


@given(EITHER, st.integers(1, 300), st.none() | st.text(max_size=20))
def test_a_page_is_opened_with_the_keys_it_was_sealed_with(
    method: PageAuthMethod, tokens: int, tenant: str | None
) -> None:
    namespace = replace(SPACE, page_tokens=tokens, cache_salt=tenant)
    identity = page_identity(namespace, chain_pages(namespace, list(range(tokens)))[0], PART)
    page = sealed(keys(method=method, tenant=tenant), identity)
    before = bytes(page)
    assert reason(page, keys(tenant=tenant), identity) is None  # by either method, whichever this reader seals with
    assert page == before


@pytest.mark.parametrize("method", PAGE_AUTH_METHODS)
def test_every_flipped_bit_of_the_header_is_refused_even_under_checksums_that_fit(method: PageAuthMethod) -> None:
    """Spec-mandated, 1.0#11.6."""
    page = sealed(keys(method=method))
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(page)
        flipped[bit // 8] ^= 1 << bit % 8
        assert reason(flipped, keys()) is not None, bit
        assert bit in range(320, 384) or bit >= 1984 or reason(checked(flipped), keys()) is not None, bit
    assert reason(page, keys()) is None  # the control: unflipped it is good


@given(EITHER, st.integers(0, 8 * IDENTITY.payload_bytes - 1))
def test_a_forged_payload_under_checksums_that_fit_is_refused_as_forged(method: PageAuthMethod, bit: int) -> None:
    """Spec-mandated, 1.0#11.6. The control: without keys the same forgery is believed."""
    for by, expected in ((keys(method=method), "forged"), (None, None)):
        page = sealed(by)
        page[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        assert reason(page, by) == "flipped_payload"
        assert reason(checked(page), by) == expected


@pytest.mark.parametrize("method", PAGE_AUTH_METHODS)
def test_tags_are_compared_in_constant_time(method: PageAuthMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec-mandated, 1.0#11.6: `hmac.compare_digest` decides, whatever it is told to say."""
    page = sealed(keys(method=method))
    compared: list[tuple[bytes, bytes]] = []

    def differ(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr(pages, "compare_digest", differ)
    assert reason(page, keys(method=method)) == "forged"
    assert compared == [(page[152:168], page[152:168])]


@given(st.integers(0, 2**256 - 1), st.integers(0, 2**128 - 1), st.sampled_from(list(PAGE_AUTH_METHODS.values())))
def test_whoever_guesses_salt_and_tag_is_refused_as_forged(salt: int, tag: int, flags: int) -> None:
    page = sealed(None)
    page[8:12] = flags.to_bytes(4, "little")
    page[112:120] = bytes.fromhex(PageAuthKeys([KEY]).key_ids[0])  # it is no secret
    page[120:152] = salt.to_bytes(32, "little")
    page[152:168] = tag.to_bytes(16, "little")
    assert reason(checked(page), keys()) == "forged"


def moved(page: bytearray, to: PageIdentity) -> bytearray:
    """The page under the identity of another one, checksums and all."""
    header = bytearray(HEADER_BYTES) + page[HEADER_BYTES:]
    seal(memoryview(header), to)
    header[8:12] = page[8:12]
    header[112:168] = page[112:168]
    return checked(header)


SALTED = replace(SPACE, cache_salt="tenant")
PLACES = [
    page_identity(SPACE, PAGES[1], PART),
    page_identity(SPACE, chain_pages(SPACE, [9] * 8)[0], PART),
    page_identity(
        replace(SPACE, revision="next"), chain_pages(replace(SPACE, revision="next"), list(range(8)))[0], PART
    ),
    page_identity(SPACE, PAGES[0], KVShard(1, 3, 0, 2)),
    page_identity(SALTED, chain_pages(SALTED, list(range(8)))[0], PART),
]


@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("method", PAGE_AUTH_METHODS)
def test_a_page_cannot_be_moved_to_another_position_prompt_model_part_or_tenant(
    method: PageAuthMethod, place: int
) -> None:
    to = PLACES[place]
    page = moved(sealed(keys(method=method)), to)
    assert reason(page, None, to) == "locked"
    assert reason(page, keys(), to) == "forged"
    assert reason(sealed(keys(method=method), to), keys(), to) is None  # the control: sealed for that place it is good


@given(st.none() | st.text(max_size=20), st.none() | st.text(max_size=20))
def test_the_keys_of_one_tenant_open_no_page_of_another(one: str | None, other: str | None) -> None:
    expected = None if one == other else "forged"
    assert reason(sealed(keys(tenant=one)), keys(tenant=other)) == expected


@given(EITHER, st.permutations([KEY, OTHER]))
def test_a_page_by_another_key_is_locked(method: PageAuthMethod, pair: list[bytes]) -> None:
    page = sealed(keys(pair[0], method=method))
    assert reason(page, keys(pair[1])) == "locked"
    page[112:120] = bytes.fromhex(PageAuthKeys([pair[1]]).key_ids[0])
    assert reason(checked(page), keys(pair[1])) == "forged"


def test_pages_with_and_without_tags_are_not_taken_for_each_other() -> None:
    """Spec-mandated, 1.0#11.6, 1.0#11.7: no downgrade, and in words what to do."""
    refusal = verify(memoryview(sealed(None)), IDENTITY, keys())
    assert refusal is not None
    assert (refusal.reason, "keys are configured here" in refusal.message) == ("unsealed", True)
    refusal = verify(memoryview(sealed(keys())), IDENTITY)
    assert refusal is not None
    assert (refusal.reason, "configure the keys" in refusal.message) == ("locked", True)


def test_a_tag_that_is_taken_off_is_missed() -> None:
    page = sealed(keys())
    page[8:12] = bytes(4)
    page[112:168] = bytes(56)
    assert reason(checked(page), keys()) == "unsealed"
    assert reason(page, None) is None  # the control: to a reader without keys it is good


def test_keys_are_changed_without_losing_a_page() -> None:
    old, both_old, both_new, new = keys(KEY), keys(KEY, OTHER), keys(OTHER, KEY), keys(OTHER)
    before, after = sealed(both_old), sealed(both_new)
    assert [reason(before, by) for by in (old, both_old, both_new, new)] == [None, None, None, "locked"]
    assert [reason(after, by) for by in (old, both_old, both_new, new)] == ["locked", None, None, None]


def test_a_refusal_says_whether_the_page_may_be_good_for_others() -> None:
    page = sealed(keys(OTHER))
    newer = bytearray(page)
    newer[4] = 2
    for found in (reason(page, keys(KEY)), reason(page, None), reason(newer, keys(OTHER))):
        assert found in REASONS_USABLE_BY_OTHERS
    for found in (reason(sealed(None), keys()), reason(page[:-1], keys(OTHER))):
        assert found is not None
        assert found not in REASONS_USABLE_BY_OTHERS
    assert set(PAGE_REFUSAL_REASONS) > REASONS_USABLE_BY_OTHERS


def test_no_two_pages_share_a_page_key() -> None:
    """Spec-mandated, 1.0#11.5: the fixed nonce is safe because of it."""
    salts = {bytes(sealed(keys())[120:152]) for _ in range(200)}
    assert len(salts) == 200


def test_the_text_of_a_key_file_is_read_and_errors_never_show_it() -> None:
    text = f"# engines\n\n{KEY.hex()}  # 2026\n{OTHER.hex().upper()}\n"
    found = PageAuthKeys.parse(text)
    assert found.key_ids == PageAuthKeys([KEY, OTHER]).key_ids
    assert reason(sealed(found.for_tenant(None)), keys(KEY)) is None
    for wrong, words in [
        ("", "1 to 16"),
        (f"{KEY.hex()}\n{KEY.hex()[:-1]}", "line 2"),
        (f"{KEY.hex()}\n{KEY.hex()[:-1]}x", "line 2"),
        (f"{KEY.hex()}\n{KEY.hex()}", "twice"),
        ("\n".join(Random(n).randbytes(32).hex() for n in range(17)), "1 to 16"),
        ("#" * (1 << 17), "longer"),
    ]:
        with pytest.raises(PageAuthError, match=words) as caught:
            PageAuthKeys.parse(wrong)
        assert KEY.hex()[:-1] not in str(caught.value)


@pytest.mark.parametrize("wrong", [[b"short"], [], [KEY, KEY]])
def test_what_is_no_key_is_refused(wrong: list[bytes]) -> None:
    with pytest.raises(PageAuthError):
        PageAuthKeys(wrong)


def test_keys_show_themselves_to_nobody() -> None:
    found = PageAuthKeys([KEY])
    shown = f"{found!r} {found} {found.for_tenant('t')!r} {found.key_ids}"
    assert KEY.hex()[:16] not in shown
    assert repr(KEY)[2:20] not in shown


def test_without_the_package_the_error_and_the_refusal_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    page = sealed(keys())
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(PageAuthError, match=r"kvparams\[sealed\]"):
        PageAuthKeys([KEY])
    plain = keys(method="hmac-sha256")
    refusal = verify(memoryview(page), IDENTITY, plain)
    assert refusal is not None
    assert (refusal.reason, "kvparams[sealed]" in refusal.message) == ("locked", True)
    assert reason(sealed(plain), plain) is None


def best_s(work: Callable[[], object], rounds: int) -> float:
    found: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


@pytest.mark.slow
@pytest.mark.alone
def test_what_a_tag_costs(effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]) -> None:
    """GB/s of sealing and verifying a page of 1 MiB, beside its checksum alone, all in one run."""
    payload_bytes = (1 << 20) - HEADER_BYTES
    identity = replace(IDENTITY, payload_bytes=payload_bytes)
    rounds = effort(50, 2000)
    speeds: dict[str, object] = {}
    for name, by in {"xxh3": None, **{method: keys(method=method) for method in PAGE_AUTH_METHODS}}.items():
        page = memoryview(sealed(by, identity))
        speeds[f"seal {name}"] = round((1 << 20) / best_s(lambda: seal(page, identity, by), rounds) / 1e9, 2)  # noqa: B023
        speeds[f"verify {name}"] = round((1 << 20) / best_s(lambda: verify(page, identity, by), rounds) / 1e9, 2)  # noqa: B023
        assert verify(page, identity, by) is None
    print(speeds)  # noqa: T201
    record({"page_bytes": 1 << 20, "gb_per_s": speeds})
