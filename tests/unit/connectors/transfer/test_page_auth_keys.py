"""Tests the key file of authenticated pages, on disk."""

from pathlib import Path

import pytest

from kvparams.page_auth import PageAuthError, PageAuthKeys
from kvparams_connectors.transfer.page_auth_keys import read_page_auth_keys

KEY = bytes(range(32))


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# engines\n{KEY.hex()}\n")
    path.chmod(0o640)
    assert read_page_auth_keys(path).key_ids == PageAuthKeys([KEY]).key_ids
    assert read_page_auth_keys(path, "hmac-sha256").method == "hmac-sha256"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (f"{KEY.hex()}\n", 0o602, "chmod 600"),
        ("", 0o600, "1 to 16"),
        (f"{KEY.hex()[1:]}\n", 0o600, "line 1"),
        (f"\xff{KEY.hex()[1:]}\n", 0o600, "line 1"),
        ("#" * 70_000, 0o600, "not a key file"),
    ],
)
def test_a_file_that_is_not_safe_or_holds_something_else_is_refused(
    tmp_path: Path, content: str, mode: int, words: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode("latin-1"))
    path.chmod(mode)
    with pytest.raises(PageAuthError, match=words) as caught:
        read_page_auth_keys(path)
    assert str(path) in str(caught.value)
    assert KEY.hex()[1:20] not in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(PageAuthError, match="No such file"):
        read_page_auth_keys(tmp_path / "none")
