"""Tests clients' keys: the proxy knows their holders, tells others nothing, and keeps tenants' caches apart."""

import asyncio
import json
import os
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvparams.cli import main
from kvparams_proxy.requests.api_keys_file import (
    KEY_BYTES,
    APIKeyRecord,
    APIKeysError,
    create_api_key,
    edit_api_keys,
    hash_api_key,
    read_api_keys,
)
from kvparams_proxy.requests.authentication import (
    APIKeyAuthenticator,
    AuthenticatedClient,
    Unauthorized,
    tenant_cache_salt,
)
from tests.support.proxy.fixtures import answer
from tests.support.waiting import until

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def add(path: Path, tenant: str, *, priority: int = 0, expires: datetime | None = None) -> str:
    """A new key of this tenant, which is then in the file."""
    key, record = create_api_key(tenant, NOW, priority=priority, expires=expires)
    with edit_api_keys(path) as records:
        records[record.id] = record
    return key


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


# keys


def test_a_key_says_whose_it_is(path: Path) -> None:
    keys = {tenant: add(path, tenant, priority=number) for number, tenant in enumerate(("acme", "globex"))}
    ring = APIKeyAuthenticator(path)
    for number, (tenant, key) in enumerate(keys.items()):
        assert len(key) == KEY_BYTES
        client = AuthenticatedClient(key[4:16], tenant, number, tenant_cache_salt(tenant, None))
        assert ring.authenticate(bearer(key)) == client
        assert ring.authenticate(b"bEaReR " + key.encode()) == client


def test_whatever_is_not_a_valid_key_is_nobody(path: Path) -> None:
    one, other = add(path, "acme"), add(path, "globex")
    ring = APIKeyAuthenticator(path)
    last = "A" if one[-1] != "A" else "B"
    wrong = [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        one.encode(),
        b"Basic " + one.encode(),
        b"Bearer  " + one.encode(),
        bearer(one) + b" ",
        bearer(one)[:-1],
        bearer(one) + b"x",
        bearer(one[:-1] + last),
        bearer(one.upper()),
        bearer("kvq" + one[3:]),
        bearer(one[:16] + other[16:]),
        bearer("kvp_000000000000" + one[16:]),
        b"Bearer " + b"\xff" * KEY_BYTES,
        b"Bearer " + hash_api_key(one.encode()).hex()[:KEY_BYTES].encode(),
        b"Bearer " + b"a" * 100_000,
    ]
    assert [ring.authenticate(header) for header in wrong] == [None] * len(wrong)
    assert ring.authenticate(bearer(one)) is not None


def test_an_unknown_id_takes_the_same_steps_as_a_wrong_secret(path: Path) -> None:
    """The control: what has not the form of a key is sent away earlier; its form is no secret."""
    key = add(path, "acme")
    ring = APIKeyAuthenticator(path)

    def steps(header: bytes) -> list[str]:
        seen: list[str] = []

        def note(frame: FrameType, event: str, argument: Any) -> None:
            seen.append(f"{event} {getattr(argument, '__name__', frame.f_code.co_name)}")

        sys.setprofile(note)
        try:
            ring.authenticate(header)
        finally:
            sys.setprofile(None)
        return seen

    wrong = steps(bearer(key[:17] + "x" * 43))
    assert any("compare_digest" in step for step in wrong)
    assert steps(bearer("kvp_ffffffffffff" + key[16:])) == wrong
    assert steps(b"Bearer x") != wrong


def test_a_key_ends_when_it_expires(path: Path) -> None:
    key = add(path, "acme", expires=NOW + timedelta(days=1))
    now_s = NOW.timestamp()
    ring = APIKeyAuthenticator(path, lambda: now_s)
    assert ring.authenticate(bearer(key)) is not None
    now_s += 86_400
    assert ring.authenticate(bearer(key)) is None


def test_the_file_holds_no_key_and_is_its_owners(path: Path) -> None:
    key = add(path, "acme")
    assert key[17:] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert hash_api_key(key.encode()).hex() in path.read_text()


def test_no_two_keys_are_alike() -> None:
    keys = {create_api_key("acme", NOW)[0] for _ in range(200)}
    assert len(keys) == len({key[4:16] for key in keys}) == len({key[17:] for key in keys}) == 200


def test_a_refusal_says_what_to_do_and_never_repeats_the_key() -> None:
    missing, wrong = Unauthorized(given=False), Unauthorized(given=True)
    for error in (missing, wrong):
        assert error.status == 401
        said = json.loads(error.body())["error"]
        assert (said["type"], said["code"]) == ("invalid_request_error", "invalid_api_key")
        assert error.headers().startswith(b"www-authenticate: Bearer ")
    assert b"invalid_token" in wrong.headers()
    assert b"invalid_token" not in missing.headers()


# the file

GOOD: dict[str, object] = {
    "id": "0123456789ab",
    "tenant": "acme",
    "hash": "sha256:" + "0" * 64,
    "created": "2026-01-02T03:04:05Z",
}


def test_a_line_as_it_should_be_is_read(path: Path) -> None:
    """The control of the next test."""
    path.write_text("\n" + json.dumps(GOOD | {"priority": -5, "expires": "2027-01-02T03:04:05+02:00"}) + "\n")
    (record,) = read_api_keys(path)[0].values()
    assert (record.tenant, record.priority, record.digest) == ("acme", -5, bytes(32))


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        json.dumps({name: value for name, value in GOOD.items() if name != "hash"}),
        json.dumps(GOOD | {"hash": "sha256:" + "0" * 63}),
        json.dumps(GOOD | {"hash": "md5:" + "0" * 64}),
        json.dumps(GOOD | {"hash": None}),
        json.dumps(GOOD | {"id": "../../../etc"}),
        json.dumps(GOOD | {"id": "0123456789AB"}),
        json.dumps(GOOD | {"id": 5}),
        json.dumps(GOOD | {"tenant": ""}),
        json.dumps(GOOD | {"tenant": "a b"}),
        json.dumps(GOOD | {"tenant": "a\n"}),
        json.dumps(GOOD | {"tenant": "x" * 129}),
        json.dumps(GOOD | {"priority": 1.5}),
        json.dumps(GOOD | {"priority": True}),
        json.dumps(GOOD | {"priority": 1001}),
        json.dumps(GOOD | {"created": "yesterday"}),
        json.dumps(GOOD | {"created": "2026-01-02T03:04:05"}),
        json.dumps(GOOD | {"created": "0001-01-01T00:00:00+14:00"}),
        json.dumps(GOOD | {"expires": None}),
        json.dumps(GOOD | {"key": "kvp_"}),
        json.dumps(GOOD)[:-1] + ',"tenant":"globex"}',
        json.dumps(GOOD | {"tenant": "x" * 5000}),
    ],
)
def test_a_wrong_line_refuses_the_file_by_its_number(path: Path, line: str) -> None:
    path.write_text(json.dumps(GOOD | {"id": "ffffffffffff"}) + "\n" + line + "\n")
    with pytest.raises(APIKeysError, match="line 2"):
        read_api_keys(path)
    with pytest.raises(APIKeysError):
        APIKeyAuthenticator(path)


def test_an_id_that_stands_twice_refuses_the_file(path: Path) -> None:
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | {'tenant': 'globex'})}\n")
    with pytest.raises(APIKeysError, match="twice"):
        read_api_keys(path)


def test_a_file_that_is_not_there_or_not_the_owners_is_refused(path: Path) -> None:
    with pytest.raises(APIKeysError, match="cannot be read"):
        APIKeyAuthenticator(path)
    add(path, "acme")
    path.chmod(0o666)
    with pytest.raises(APIKeysError, match="chmod"):
        APIKeyAuthenticator(path)


def test_a_record_that_the_file_could_not_hold_is_never_made() -> None:
    for tenant, priority in (("a b", 0), ("", 0), ("acme", 5000)):
        with pytest.raises(APIKeysError):
            create_api_key(tenant, NOW, priority=priority)


@given(
    st.lists(
        st.builds(
            APIKeyRecord,
            st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
            st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
            st.binary(min_size=32, max_size=32),
            st.just(NOW),
            st.integers(-1000, 1000),
            st.none() | st.just(NOW + timedelta(days=3)),
        ),
        unique_by=lambda record: record.id,
        max_size=5,
    )
)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, records: list[APIKeyRecord]) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    with edit_api_keys(path) as kept:
        kept.update({record.id: record for record in records})
    assert list(read_api_keys(path)[0].values()) == records


def test_keys_made_at_the_same_time_are_all_there(path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        keys = list(pool.map(add, [path] * 40, [f"t{number}" for number in range(40)]))
    ring = APIKeyAuthenticator(path)
    assert [ring.authenticate(bearer(key)) is not None for key in keys] == [True] * 40
    assert os.listdir(path.parent) == [path.name]


def test_a_change_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    add(path, "acme")
    before = path.read_bytes()

    def fail() -> None:
        with edit_api_keys(path) as records:
            records.clear()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


# while the proxy runs


def test_keys_come_and_go_while_the_ring_is_used(path: Path) -> None:
    first = add(path, "acme")
    ring = APIKeyAuthenticator(path)
    assert not ring.reload()
    second = add(path, "globex")
    assert ring.authenticate(bearer(second)) is None
    assert ring.reload()
    assert ring.authenticate(bearer(second)) is not None
    with edit_api_keys(path) as records:
        del records[first[4:16]]
    assert ring.reload()
    assert ring.authenticate(bearer(first)) is None
    assert ring.authenticate(bearer(second)) is not None
    assert not ring.reload()


def test_a_broken_file_changes_nothing_and_is_told_once(path: Path) -> None:
    key = add(path, "acme")
    ring = APIKeyAuthenticator(path)
    good = path.read_bytes()
    path.write_text("broken")
    with pytest.raises(APIKeysError):
        ring.reload()
    assert not ring.reload()
    path.unlink()
    with pytest.raises(APIKeysError):
        ring.reload()
    assert not ring.reload()
    assert ring.authenticate(bearer(key)) is not None
    path.write_bytes(good)
    assert ring.reload()
    assert ring.authenticate(bearer(key)) is not None


async def test_the_file_is_followed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(path, "acme")
    ring = APIKeyAuthenticator(path)
    task = asyncio.create_task(ring.watch_file(0.02))
    key = add(path, "globex")
    await until(lambda: ring.authenticate(bearer(key)) is not None)
    path.write_text("broken")  # noqa: ASYNC240
    await until(lambda: "line 1" in caplog.text)
    assert ring.authenticate(bearer(key)) is not None
    assert key not in caplog.text
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# the command


def test_the_command_makes_shows_and_revokes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", str(path), "--tenant", "acme", "--priority", "7", "--expires", "90d"]) == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert key not in err
    ring = APIKeyAuthenticator(path)
    assert ring.authenticate(bearer(key)) == AuthenticatedClient(key[4:16], "acme", 7, tenant_cache_salt("acme", None))
    assert main(["keys", "list", str(path)]) == 0
    listed = capsys.readouterr().out
    assert key[4:16] in listed
    assert "acme" in listed
    assert key[17:] not in listed
    assert main(["keys", "revoke", str(path), key[4:16]]) == 0
    ring.reload()
    assert ring.authenticate(bearer(key)) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "FILE"],
        ["revoke", "FILE", "0123456789ab"],
        ["create", "FILE", "--tenant", "a b"],
        ["create", "FILE/no/such/folder", "--tenant", "acme"],
        ["create", "FILE", "--tenant", "acme", "--priority", "9999"],
    ],
)
def test_what_the_command_cannot_do_is_one_line(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["keys", *(argument.replace("FILE", str(path)) for argument in arguments)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not path.exists()


@pytest.mark.parametrize("when", ["0d", "soon", "2001-01-01", "-1d"])
def test_a_key_never_expires_in_the_past(path: Path, when: str) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "create", str(path), "--tenant", "acme", f"--expires={when}"])
    assert not path.exists()


# salts

TENANTS = st.text(max_size=6, alphabet=st.sampled_from('ab:|/\x00\x01\\"é\u0301eAÅ\u212b\ud800')) | st.text(max_size=20)
SALTS = st.none() | TENANTS


@given(TENANTS, SALTS, TENANTS, SALTS)
@example("a", "bc", "ab", "c")
@example("a", None, "a", "")
@example("a\x01", None, "a", "")
@example("a", "\x01b", "a\x01", "b")
@example("caf\u00e9", "s", "cafe\u0301", "s")
@example("t", "\u212b", "t", "\u00c5")
@example("a", "a", "aa", None)
def test_salts_are_alike_only_where_tenant_and_salt_are(
    tenant: str, salt: str | None, other: str, another: str | None
) -> None:
    same = (tenant, salt) == (other, another)
    assert (tenant_cache_salt(tenant, salt) == tenant_cache_salt(other, another)) is same


@given(st.text(max_size=30))
def test_no_salt_of_a_client_leads_to_another_tenants_cache(salt: str) -> None:
    """Also not one that is itself a bound salt."""
    targets = {tenant_cache_salt("victim", None), tenant_cache_salt("victim", salt), tenant_cache_salt("victim", "s")}
    tries = {tenant_cache_salt("thief", text) for text in (salt, None, *targets, "victim" + salt, "\x01" + salt)}
    assert targets.isdisjoint(tries)


@given(TENANTS, SALTS)
def test_a_bound_salt_is_short_plain_text(tenant: str, salt: str | None) -> None:
    """vLLM takes any string, LMCache at most 128 characters without `@`, `/`, backslash and NUL."""
    bound = tenant_cache_salt(tenant, salt)
    assert len(bound) == 43
    assert set(bound) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert bound == tenant_cache_salt(tenant, salt)


def test_texts_that_look_alike_are_two_texts() -> None:
    composed = unicodedata.normalize("NFC", "e\u0301")
    assert composed != "e\u0301"
    assert tenant_cache_salt(composed, None) != tenant_cache_salt("e\u0301", None)


# through the proxy

BODY: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 4}
NIXL = {"remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 1}
ANSWER = {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1}, "kv_transfer_params": NIXL}


async def well(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(json.dumps(ANSWER).encode()))


async def test_without_a_key_nothing_reaches_an_engine(scripted: Any, proxy: Any, path: Path) -> None:
    key = add(path, "acme")
    prefill, decode = await scripted(well), await scripted(well)
    running = await proxy([prefill.url], [decode.url], client_keys=path)
    for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": f"Bearer {key[:-1]}~"}):
        for stream in (False, True):
            got = await running.client.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
            assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
            assert got.headers["www-authenticate"].startswith("Bearer")
        assert (await running.client.get("/v1/models", headers=headers)).status_code == 401
    assert prefill.bodies == decode.bodies == []
    assert (await running.client.get("/health")).status_code == 200


async def test_with_keys_the_salt_is_the_tenants_and_the_key_stays_here(scripted: Any, proxy: Any, path: Path) -> None:
    keys = {tenant: add(path, tenant) for tenant in ("acme", "globex")}
    prefill, decode = await scripted(well), await scripted(well)
    running = await proxy([prefill.url], [decode.url], client_keys=path)
    for tenant, key in keys.items():
        headers = {"authorization": f"Bearer {key}"}
        assert (await running.client.get("/v1/models", headers=headers)).status_code == 200
        for salt in (None, "mine", tenant_cache_salt("acme", None)):
            body = BODY if salt is None else BODY | {"cache_salt": salt}
            assert (await running.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            for engine in (prefill, decode):
                assert json.loads(engine.bodies[-1])["cache_salt"] == tenant_cache_salt(tenant, salt)
                assert b"authorization" not in engine.heads[-1].lower()
                assert key.encode() not in engine.heads[-1]
    assert len({json.loads(body)["cache_salt"] for body in decode.bodies}) == 6


async def test_without_keys_salt_and_authorization_pass_as_they_came(scripted: Any, proxy: Any) -> None:
    """The control: nobody is known, so nothing can be bound."""
    prefill, decode = await scripted(well), await scripted(well)
    running = await proxy([prefill.url], [decode.url])
    headers = {"authorization": "Bearer engines-own"}
    got = await running.client.post("/v1/completions", json=BODY | {"cache_salt": "mine"}, headers=headers)
    assert got.status_code == 200
    for engine in (prefill, decode):
        assert json.loads(engine.bodies[-1])["cache_salt"] == "mine"
        assert b"authorization: bearer engines-own" in engine.heads[-1].lower()
