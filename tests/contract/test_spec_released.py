"""Checks that releases under `spec/` stay unchanged, and tests how a draft is released."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from spec.release import DIGESTS, DRAFT, faults, freeze, main, release, released, seal

SPEC = Path(__file__).parents[2] / "spec"
SEALS = {
    "1.0": "474a3629dd8865d0814d7e8cfd119fa431261f60503e2ff847eec8aac3ea73fd",
}
"""By release the SHA-256 of its `DIGESTS`, which could be written anew. Lines here are added, never changed."""
FILES = {
    f"spec/{DRAFT}/spec.md": f"# KVTransferParams 1.1 ({DRAFT})\n\n"
    f"This is a draft: it may change until it is released as `spec/1.1`.\n- **{DRAFT}#1.1** It MUST.\n",
    f"spec/{DRAFT}/schema.json": f'{{"$id": "urn:kvparams:{DRAFT}:document", "version": "1.1-{DRAFT}"}}',
    f"spec/{DRAFT}/vectors/a.json": f'{{"requirements": ["{DRAFT}#1.1"]}}',
    "spec/1.0/spec.md": f"written when `spec/{DRAFT}` was another one: {DRAFT}#1.1\n",
    "tests/test_a.py": f'SPEC = ROOT / "spec" / "{DRAFT}"\n\n# {DRAFT}#1.1, spec/{DRAFT}/spec.md\n',
    "model.py": "draft_tokens = 4\n",
}


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", root, *identity, *words], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a release and a draft."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(f"\xff spec/{DRAFT}".encode("latin-1"))
    freeze(tmp_path / "spec" / "1.0")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def test_what_has_been_released_is_as_it_was() -> None:
    """Released folders never change: see VERSIONING.md. The control is the next test."""
    assert {folder.name: faults(folder) for folder in released(SPEC)} == {folder.name: [] for folder in released(SPEC)}


def test_the_digests_are_those_of_the_release() -> None:
    """The control is the next test."""
    assert {folder.name: seal(folder) for folder in released(SPEC)} == SEALS


def test_digests_that_are_written_anew_are_seen(root: Path) -> None:
    folder = root / "spec" / "1.0"
    before = seal(folder)
    (folder / "spec.md").write_bytes((folder / "spec.md").read_bytes() + b" ")
    (folder / DIGESTS).unlink()
    freeze(folder)
    assert faults(folder) == []
    assert seal(folder) != before


def test_the_command_says_which_line_to_add(root: Path) -> None:
    script = root / "spec" / "release.py"
    script.write_bytes((SPEC / "release.py").read_bytes())
    said = subprocess.run([sys.executable, script, "1.1"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256((root / "spec" / "1.1" / DIGESTS).read_bytes()).hexdigest()
    assert said.endswith(f'"1.1": "{digest}",\n')


def test_a_file_that_changes_or_comes_or_goes_is_seen(root: Path) -> None:
    folder = root / "spec" / "1.0"
    assert [one.name for one in released(root / "spec")] == ["1.0"]
    assert faults(folder) == []
    before = (folder / "spec.md").read_bytes()
    (folder / "spec.md").write_bytes(before + b" ")
    (folder / "more").mkdir()
    (folder / "more" / "one.json").touch()
    assert faults(folder) == ["more/one.json: has come", "spec.md: has changed"]
    (folder / "spec.md").unlink()
    (folder / "more" / "one.json").unlink()
    assert faults(folder) == ["spec.md: has gone"]
    (folder / "spec.md").write_bytes(before)
    assert faults(folder) == []
    (folder / DIGESTS).unlink()
    assert faults(folder) == [f"{DIGESTS}: is missing"]


def test_a_draft_becomes_a_release_and_everybody_names_it_so(root: Path) -> None:
    changed = release(root, "1.1")
    assert changed == sorted(name for name in FILES if name.startswith((f"spec/{DRAFT}", "tests")))
    folder = root / "spec" / "1.1"
    assert not (root / "spec" / DRAFT).exists()
    assert faults(folder) == faults(root / "spec" / "1.0") == []
    text = (folder / "spec.md").read_text()
    assert text.startswith("# KVTransferParams 1.1\n\nThis folder is released, and never changes again: ")
    assert "- **1.1#1.1** It MUST.\n" in text
    assert (folder / "schema.json").read_text() == '{"$id": "urn:kvparams:1.1:document", "version": "1.1"}'
    assert (folder / "vectors" / "a.json").read_text() == '{"requirements": ["1.1#1.1"]}'
    assert (root / "tests" / "test_a.py").read_text() == 'SPEC = ROOT / "spec" / "1.1"\n\n# 1.1#1.1, spec/1.1/spec.md\n'
    said = subprocess.run(["sha256sum", "-c", DIGESTS], cwd=folder, capture_output=True, text=True, check=False)
    assert said.returncode == 0
    assert said.stdout.count(": OK\n") == 3


def test_what_has_been_released_is_never_written_again(root: Path) -> None:
    before = {path: path.read_bytes() for path in (root / "spec").rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="never written again"):
        release(root, "1.0")
    with pytest.raises(FileExistsError):
        freeze(root / "spec" / "1.0")
    with pytest.raises(ValueError, match=r"no draft of 1\.2"):
        release(root, "1.2")
    (root / "spec" / DRAFT / "new.md").touch()
    with pytest.raises(ValueError, match="not committed"):
        release(root, "1.1")
    (root / "spec" / DRAFT / "new.md").unlink()
    assert {path: path.read_bytes() for path in (root / "spec").rglob("*") if path.is_file()} == before
    release(root, "1.1")
    with pytest.raises(FileExistsError):
        release(root, "1.1")
    with pytest.raises(FileNotFoundError, match="there is no draft"):
        release(root, "1.2")


@pytest.mark.parametrize("words", [[], ["1"], ["1.0", "1.1"], ["../1.0"]])
def test_the_command_wants_a_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "python spec/release.py" in capsys.readouterr().err
