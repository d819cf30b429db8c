"""Tests operators' secrets: they are read from their source and never shown by accident."""

from pathlib import Path

import pytest

from kvparams_proxy.secret import Secret, SecretError, secret_from_file

TEXT = "sk-engine-7Zk2/+=_q"


def test_a_secret_is_shown_on_request_only() -> None:
    secret = Secret(TEXT)
    assert TEXT not in f"{secret} {secret!r} {(secret,)} {[secret]!r}"
    assert secret.reveal() == TEXT
    assert secret.authorization_header() == b"authorization: Bearer " + TEXT.encode() + b"\r\n"
    assert secret.matches(TEXT.encode())
    assert not secret.matches(TEXT.encode()[:-1])
    assert not secret.matches(b"")
    assert len({secret, Secret(TEXT), Secret("other")}) == 2


@pytest.mark.parametrize("raw", [TEXT, TEXT + "\n", f"  {TEXT}\r\n"])
def test_white_space_around_it_does_not_count(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "key"
    path.write_text(raw)
    assert secret_from_file(path) == Secret(TEXT)


@pytest.mark.parametrize("raw", ["", "\n", "two words", "line\r\nx-evil: 1", "k\x00y", "schlüssel", "x" * 4097])
def test_what_could_not_stand_in_a_header_is_refused_without_being_repeated(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(raw.encode())
    for read in (lambda: secret_from_file(path), lambda: Secret(raw)):
        with pytest.raises(SecretError) as caught:
            read()
        assert len(raw) < 3 or raw.strip() not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="no-such-file"):
        secret_from_file(tmp_path / "no-such-file")
