"""Tests the file of signing keys: its form, its permissions, its changes, and the command that makes it."""

import argparse
import hmac
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams import parse
from kvparams.cli.signing_keys_command import COMMAND
from kvparams.signing.keyring import SigningKey, SigningKeyring, SigningKeyringError
from kvparams.signing.keyring_file import WatchedKeyring, change_keyring, create_keyring, read_keyring
from kvparams.signing.request_verifier import RequestVerifier
from kvparams.signing.signer import Signer
from kvparams.signing.verification import UntrustedParams

NOW = 1_767_225_600
SECRET = bytes(range(32))
FILE: dict[str, Any] = {
    "format": 1,
    "keys": [
        {"kid": "a", "secret": SECRET.hex(), "not_before": "2026-01-01T00:00:00Z", "not_after": "2027-01-01T00:00:00Z"},
        {"kid": "b", "secret": "0" * 64, "not_before": "2026-06-01T02:00:00+02:00"},
    ],
}
SMALL: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "decode",
    "mode": "pull",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "signing-keys.json"


def command(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args([str(word) for word in words]))


def test_a_keyring_is_read_as_it_was_written() -> None:
    ring = SigningKeyring.parse(json.dumps(FILE))
    a, b = ring
    assert (a.kid, a.not_before, a.not_after) == ("a", NOW, NOW + 365 * 86_400)
    assert (b.kid, b.not_after) == ("b", None)
    again = SigningKeyring.parse(ring.text())
    assert [key.document() for key in again] == [key.document() for key in ring]
    assert [key.tag(b"x") for key in again] == [key.tag(b"x") for key in ring]
    assert a.tag(b"x") == hmac.new(SECRET, b"kvparams signature 1\nx", "sha256").hexdigest()


def spoilt(**changes: object) -> str:
    first, second = FILE["keys"]
    key = {name: value for name, value in {**first, **changes}.items() if value is not ...}
    return json.dumps({"format": 1, "keys": [key, second]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format":1,"format":1,"keys":[]}',
        json.dumps({**FILE, "format": 2}),
        json.dumps({**FILE, "x": 1}),
        json.dumps({"format": 1, "keys": []}),
        json.dumps({"format": 1, "keys": {}}),
        json.dumps({"format": 1, "keys": [5]}),
        json.dumps({"format": 1, "keys": FILE["keys"] * 2}),
        json.dumps({"format": 1, "keys": [{**FILE["keys"][0], "kid": f"k{n}"} for n in range(17)]}),
        *(spoilt(kid=value) for value in (..., 5, "", "a b", "a\n", "x" * 129)),
        *(spoilt(secret=value) for value in (..., 5, "", "0" * 63, "0" * 65, SECRET.hex().upper(), "g" * 64)),
        *(spoilt(not_before=value) for value in (..., 5, "soon", "2026-01-01T00:00:00", "0001-01-01T00:00:00Z")),
        *(spoilt(not_after=value) for value in (5, "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z")),
        spoilt(other=1),
    ],
)
def test_what_is_no_keyring_is_refused_without_showing_a_secret(text: str) -> None:
    with pytest.raises(SigningKeyringError) as caught:
        SigningKeyring.parse(text)
    said = str(caught.value)
    assert SECRET.hex() not in said.lower()
    assert "000000000000" not in said


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_no_file_leads_to_an_error_that_is_not_ours(text: bytes | str) -> None:
    with pytest.raises(SigningKeyringError):
        SigningKeyring.parse(text)


def test_nothing_shows_a_secret() -> None:
    ring = SigningKeyring.parse(json.dumps(FILE))
    key = ring.find("a")
    signer = Signer(ring, "pool", lambda: NOW)
    for thing in (ring, key, signer, [key], {"key": key}):
        assert SECRET.hex() not in f"{thing!r} {thing}"
    assert repr(ring) == "SigningKeyring(a, b)"
    assert SECRET.hex() not in json.dumps(signer.sign(parse(SMALL)))


# on disk


def test_only_its_owner_may_read_or_write_the_file(path: Path) -> None:
    create_keyring(path, SigningKeyring.parse(json.dumps(FILE)))
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_keyring(path)) == 2
    for mode in (0o640, 0o604, 0o620, 0o602, 0o644, 0o666):
        path.chmod(mode)
        with pytest.raises(SigningKeyringError, match="chmod 600"):
            read_keyring(path)
    path.chmod(0o400)
    assert len(read_keyring(path)) == 2


def test_a_file_that_cannot_be_used_says_why(path: Path) -> None:
    with pytest.raises(SigningKeyringError, match="cannot be read: No such file"):
        read_keyring(path)
    path.touch(0o600)
    with pytest.raises(SigningKeyringError, match=f"{path}: it is not a JSON object"):
        read_keyring(path)
    path.write_bytes(b" " * (65 << 10))
    with pytest.raises(SigningKeyringError, match="longer than"):
        read_keyring(path)
    with pytest.raises(SigningKeyringError, match="exists already"):
        create_keyring(path, SigningKeyring.parse(json.dumps(FILE)))
    with pytest.raises(SigningKeyringError, match="cannot be"), change_keyring(path.parent / "not" / "there"):
        pass


def test_a_change_is_whole_or_not_at_all(path: Path) -> None:
    create_keyring(path, SigningKeyring.parse(json.dumps(FILE)))
    before = path.read_bytes()

    def fail() -> None:
        with change_keyring(path) as held:
            held[0] = SigningKeyring([SigningKey.new(NOW)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == before
    with change_keyring(path) as held:
        held[0] = SigningKeyring([SigningKey.new(NOW)])
    assert len(read_keyring(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_followed_file_is_read_again_and_a_broken_one_changes_nothing(path: Path) -> None:
    create_keyring(path, SigningKeyring([SigningKey("a", SECRET, NOW)]))
    followed = WatchedKeyring(path)
    complaints: list[str] = []

    def kids(now: float) -> list[str]:
        return [key.kid for key in followed.current(now, 5.0, lambda error: complaints.append(str(error)))]

    assert kids(0.0) == ["a"]
    with change_keyring(path) as held:
        held[0] = SigningKeyring([SigningKey("b", SECRET, NOW), *held[0]])
    assert kids(4.9) == ["a"]  # not looked at so soon again
    assert kids(5.0) == ["b", "a"]
    path.write_text("garbage")
    assert kids(10.0) == kids(20.0) == ["b", "a"]
    assert len(complaints) == 1
    path.unlink()
    assert kids(30.0) == kids(40.0) == ["b", "a"]
    assert len(complaints) == 2
    create_keyring(path, SigningKeyring([SigningKey("c", SECRET, NOW)]))
    assert kids(50.0) == ["c"]
    assert kids(-100.0) == ["c"]  # a clock that was set back


def test_a_gate_follows_its_keys_and_counts_what_it_refuses(path: Path) -> None:
    create_keyring(path, SigningKeyring([SigningKey("a", SECRET, NOW)]))
    at = [float(NOW)]
    gate = RequestVerifier(path, "pool", lambda: at[0], since=NOW - 30, instance="d1")
    signer = Signer(read_keyring(path), "pool", lambda: at[0])
    carrier = signer.sign(parse({**SMALL, "consumer": {"id": "d1"}}), {"remote_host": "h"})
    assert gate.verify(carrier) is not None
    for wrong in (carrier, {"remote_host": "h"}, signer.sign(parse({**SMALL, "consumer": {"id": "d2"}}))):
        with pytest.raises(UntrustedParams):
            gate.verify(wrong)
    assert gate.refused == {"replayed": 1, "unsigned": 1, "instance": 1}
    assert gate.verify(None) is None
    with change_keyring(path) as held:
        held[0] = SigningKeyring([SigningKey("b", bytes(32), NOW), *held[0]])
    signer.use_keyring(read_keyring(path))
    at[0] += 10
    assert gate.verify(signer.sign(parse(SMALL))) is not None
    assert gate.verify(signer.sign(parse(SMALL)), arrived=at[0] - 5, part="1") is not None


def test_a_gate_says_how_long_it_refuses_what_an_engine_before_it_may_have_accepted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spec-mandated, 1.0#13.9."""
    create_keyring(path, SigningKeyring([SigningKey("a", SECRET, NOW - 100)]))
    at = [NOW + 8.0]
    gate = RequestVerifier(path, "pool", lambda: at[0], since=NOW)
    signer = Signer(read_keyring(path), "pool", lambda: at[0])
    assert [record.getMessage() for record in caplog.records] == [
        "signed documents are refused for another 22 s, because the process before a restart may have accepted them "
        "already"
    ]
    assert gate.ready == NOW + 30
    with pytest.raises(UntrustedParams, match="replayed"):
        gate.verify(signer.sign(parse(SMALL)))
    at[0] = gate.ready
    assert gate.verify(signer.sign(parse(SMALL))) is not None
    caplog.clear()
    RequestVerifier(path, "pool", lambda: at[0], since=NOW)  # vLLM's, which takes longer to start
    RequestVerifier(path, "pool", lambda: NOW + 1.0, since=NOW, skew_s=1)
    assert caplog.records == []


# the command


def test_keys_are_made_changed_and_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("create", path) == 0
    (first,) = read_keyring(path)
    assert command("create", path) == 2
    assert command("rotate", path, "--after", "1h") == 0
    second, old = read_keyring(path)
    assert old.kid == first.kid
    assert old.not_after == second.not_before + 3600
    assert command("list", path) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["KID", second.kid, first.kid]
    assert [line.split()[-1] for line in said.out.splitlines()[1:]] == ["later", "signs"]
    assert "exists already" in said.err
    for key in (first, second):
        assert str(key.document()["secret"]) not in said.out + said.err


def test_a_key_that_takes_over_at_once_signs(path: Path) -> None:
    assert command("create", path) == 0
    assert command("rotate", path, "--after", "0s", "--overlap", "0s") == 0
    new, _ = read_keyring(path)
    assert read_keyring(path).signing_key_at(new.not_before) is not None
    signing = read_keyring(path).signing_key_at(new.not_before)
    assert signing is not None
    assert signing.kid in {key.kid for key in read_keyring(path)}


def test_keys_that_are_over_go_and_one_that_is_still_to_come_stays(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_keyring(
        path, SigningKeyring([SigningKey("over", SECRET, 1_000_000_000, 1_000_000_060), SigningKey("now", SECRET, NOW)])
    )
    assert command("rotate", path) == 0
    assert [key.kid for key in read_keyring(path)][1:] == ["now"]
    assert command("rotate", path, "--after", "10d") == 0
    assert command("rotate", path, "--overlap", "0s") == 2
    assert "wait until it is in use" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("rotate", path, "--after", "soon")


def test_a_wrong_file_is_a_message_and_status_2(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["list", path], ["rotate", path]):
        assert command(*words) == 2
        assert "kvparams signing-keys: " in capsys.readouterr().err
    assert not os.listdir(path.parent)
