"""Tests that docs/ works: Python runs, commands parse, fleet files and JSON are valid, and links resolve."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from kvparams import plugins
from kvparams.cli import main
from kvparams_proxy.config.fleet_document import parse_fleet_document
from kvparams_proxy.config.settings import default_spec_rules

ROOT = Path(__file__).parents[3]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
BLOCK = re.compile(r"^( *)```([a-z]+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def found_blocks(*languages: str) -> Iterator[tuple[str, int, str]]:
    """Yields every block of these languages with the name of its page and its line."""
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            if block[2] in languages:
                line = text.count("\n", 0, block.start()) + 1
                yield page.name, line, "\n".join(one.removeprefix(block[1]) for one in block[3].split("\n"))


def blocks(*languages: str) -> list[ParameterSet]:
    """Returns every block of these languages as a parameter whose id is its place."""
    found = [pytest.param(code, id=f"{page}:{line}") for page, line, code in found_blocks(*languages)]
    assert found, languages
    return found


def commands(block: str) -> list[list[str]]:
    """The words of each command of a block, without comments."""
    lines = block.replace("\\\n", " ").split("\n")
    joined: list[str] = []
    for line in lines:
        if joined and joined[-1].count("'") % 2:
            joined[-1] += "\n" + line
        else:
            joined.append(line)
    return [words for one in joined if (words := shlex.split(one.removeprefix("$ "), comments=True))]


def check_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Checks a command of ours: it is registered, and its help names each of its options."""
    assert words[1] in plugins.plugin_names("commands"), words[1]
    asked = [word for word in words[1:3] if re.fullmatch(r"[a-z][a-z-]*", word)]
    helped = ""
    for tried in (asked, asked[:1]):
        with pytest.raises(SystemExit):
            main([*tried, "--help"])
        helped += capsys.readouterr().out
    for option in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", helped), f"{words[1]} {option}"


RUN_EACH = """
import json, sys
for place, code in json.load(sys.stdin).items():
    exec(compile(code, place, "exec"), {"__name__": "__main__"})
"""


def run_blocks(found: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Runs blocks of one page, each with names of its own; a traceback names the block."""
    run = [sys.executable, "-c", RUN_EACH]
    return subprocess.run(run, input=json.dumps(found), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("page", sorted({page for page, _, _ in found_blocks("python")}))
def test_python_runs_as_it_stands(page: str) -> None:
    done = run_blocks({f"{page}:{line}": code for of, line, code in found_blocks("python") if of == page})
    assert done.returncode == 0, done.stderr


def test_a_block_that_uses_the_names_of_another_is_noticed() -> None:
    done = run_blocks({"page.md:1": "import json\nx = 1", "page.md:9": "print(x)"})
    assert done.returncode == 1
    assert 'File "page.md:9", line 1' in done.stderr
    assert "NameError" in done.stderr


@pytest.mark.parametrize("code", blocks("console", "sh"))
def test_commands_and_their_options_exist(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(code):
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word and not word.startswith("-")):
                assert re.search(rf"^(?:[a-z- ]* )?{target}(?: [a-z- ]*)?:", makefile, re.MULTILINE), target
        if words[0] == "kvparams" and len(words) > 1 and not words[1].startswith("-"):
            check_command(words, capsys)
        for word in words:
            if word.startswith(("{", "[")) and word.endswith(("}", "]")):
                json.loads(word)


@pytest.mark.parametrize("command", ["kvparams proxy --no-such-option", "kvparams no-such-command --help"])
def test_the_check_notices_what_does_not_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        check_command(command.split(), capsys)


FLEET_FILES = [each for each in blocks("yaml") if not str(each.values[0]).startswith("static_resources:")]
"""`tests/system/picker` runs the configuration of Envoy, in docs/gateway.md."""


@pytest.mark.parametrize("code", FLEET_FILES)
def test_fleet_files_are_valid(code: str) -> None:
    assert parse_fleet_document(code, default_spec_rules())


@pytest.mark.parametrize("code", blocks("json"))
def test_json_is_json(code: str) -> None:
    assert json.loads(code) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


def test_the_generated_pages_are_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "_generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_shows_the_page_of_make_serve_near_its_top() -> None:
    """`tests/system/proxy/ui/test_walk.py` makes the picture."""
    top = "\n".join((ROOT / "README.md").read_text().splitlines()[:10])
    assert "make serve" in top
    (picture,) = re.findall(r"!\[[^\]]+\]\((docs/images/[^)]+)\)", top)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
    assert (ROOT / picture).stat().st_size > 20_000


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
