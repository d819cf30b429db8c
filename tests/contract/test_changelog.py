"""Checks that the changelog matches the installed version.

`tests/contract/docs` checks what README.md and the pages show.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_changelog_tops_with_the_version_that_is_installed() -> None:
    from kvparams import __version__

    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert found is not None
    assert found.group(1) == __version__
