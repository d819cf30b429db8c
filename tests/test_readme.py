"""The code in README.md runs, and the commands it names exist."""

import re
from pathlib import Path

from kvparams import plugins

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_make_targets_and_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "proxy" in plugins.plugin_names("commands")


def test_the_changelog_tops_with_the_version_that_is_installed() -> None:
    from kvparams import __version__

    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert found is not None
    assert found.group(1) == __version__
