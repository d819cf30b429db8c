"""Releases the draft of the protocol: `python spec/release.py 1.0` makes `draft/` the folder `1.0/`, for good.

Requirements are then called `1.0#6.1`, in the folder and wherever this repository names them, and `DIGESTS` holds the
SHA-256 of every file, as `sha256sum -c DIGESTS` reads it. A released file is never written again.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["DIGESTS", "DRAFT", "digests", "faults", "freeze", "main", "release", "released", "seal"]

DRAFT: Final = "draft"
DIGESTS: Final = "DIGESTS"


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its path in there; that of `DIGESTS` apart."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != DIGESTS}


def freeze(folder: Path) -> None:
    """Write down what is in a folder.

    Raises:
        FileExistsError: that was done before.
    """
    lines = [f"{digest}  {name}\n" for name, digest in digests(folder).items()]
    with (folder / DIGESTS).open("x", encoding="utf-8") as file:
        file.writelines(lines)


def faults(folder: Path) -> list[str]:
    """Returns the changes in a released folder, one line each."""
    if not (folder / DIGESTS).is_file():
        return [f"{DIGESTS}: is missing"]
    lines = (folder / DIGESTS).read_text("utf-8").splitlines()
    then = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    now = digests(folder)
    found = [f"{name}: has gone" for name in then.keys() - now.keys()]
    found += [f"{name}: has come" for name in now.keys() - then.keys()]
    return sorted(found + [f"{name}: has changed" for name in then.keys() & now.keys() if then[name] != now[name]])


def seal(folder: Path) -> str:
    """The SHA-256 of a released folder's `DIGESTS`: who rewrites both a file and its line there changes this.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    return hashlib.sha256((folder / DIGESTS).read_bytes()).hexdigest()


def released(spec: Path) -> list[Path]:
    """The folders that never change."""
    return [path for path in sorted(spec.iterdir()) if re.fullmatch(r"[0-9]+\.[0-9]+", path.name)]


def release(root: Path, version: str) -> list[str]:
    """Release the draft of a repository: the files that were changed. Nothing is committed.

    Raises:
        FileExistsError: that version has been released.
        FileNotFoundError: there is no draft.
        ValueError: the draft is one of another version, or not committed.
    """
    draft, folder = root / "spec" / DRAFT, root / "spec" / version
    if folder.exists():
        raise FileExistsError(f"{folder} is released, and never written again")
    if not (draft / "spec.md").is_file():
        raise FileNotFoundError(f"there is no draft in {draft}")
    if f" {version} ({DRAFT})\n" not in (draft / "spec.md").read_text("utf-8"):
        raise ValueError(f"{draft} is no draft of {version}")
    if _git(root, "status", "--porcelain", "--", str(draft)):
        raise ValueError(f"{draft} has changes that are not committed")
    frozen = released(root / "spec")
    files = [root / name for name in _git(root, "ls-files", "-z").split("\0") if name]
    changed = [
        path.relative_to(root).as_posix()
        for path in files
        if not any(one in path.parents for one in frozen) and _rename(path, version)
    ]
    draft.rename(folder)
    freeze(folder)
    return changed


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout


def _rename(path: Path, version: str) -> bool:
    """Say in a file the new name of what has been the draft; whether it had said the old one."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    new = text
    for before, after in (
        (f"{DRAFT}#", f"{version}#"),
        (f"spec/{DRAFT}", f"spec/{version}"),
        (f'"spec" / "{DRAFT}"', f'"spec" / "{version}"'),
        (f"urn:kvparams:{DRAFT}:", f"urn:kvparams:{version}:"),
        (f" {version} ({DRAFT})", f" {version}"),
        (f'"{version}-{DRAFT}"', f'"{version}"'),
        (_BEFORE.format(version), _AFTER),
    ):
        new = new.replace(before, after)
    if new != text:
        path.write_bytes(new.encode())
    return new != text


_BEFORE: Final = "This is a draft: it may change until it is released as `spec/{}`."
_AFTER: Final = f"This folder is released, and never changes again: `{DIGESTS}` has the SHA-256 of every file in it."


def main(words: list[str]) -> int:
    """The command."""
    if len(words) != 1 or re.fullmatch(r"[0-9]+\.[0-9]+", words[0]) is None:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        root = Path(__file__).parents[1]
        changed = release(root, words[0])
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"nothing is released: {error}", file=sys.stderr)
        return 1
    print(f"spec/{words[0]} is released; {len(changed)} files name it now. Look, test, and commit.")
    print(f'Add to SEALS in tests/contract/test_spec_released.py: "{words[0]}": "{seal(root / "spec" / words[0])}",')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
