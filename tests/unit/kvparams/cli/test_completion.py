"""Tests `kvparams --print-completion`: the shell that reads the script completes commands, options and values."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvparams.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("kvparams", "pr"), {"proxy"}),
        (("kvparams", "proxy", "--prefill-r"), {"--prefill-requests"}),
        (("kvparams", "store", "ben"), {"bench"}),
        (("kvparams", "sidecar", "--role", "pre"), {"prefill"}),
        (("kvparams", "proxy", "--config", "fl"), {"fleet.yaml"}),
        (("kvparams", "proxy", "--policy", "ro"), {"round_robin"}),
        (("kvparams", "proxy", "--connector", "store-"), {"store-drop", "store-meet"}),
        (("kvparams", "sidecar", "--log-requests", "fl"), {"fleet.yaml"}),
        (("kvparams", "nothing-", "x"), set[str]()),
    ],
)
def test_bash_completes_a_word(
    words: tuple[str, ...], wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    (tmp_path / "fleet.yaml").touch()
    ask = f"""
source ./script
COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
_shtab_kvparams kvparams "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert {line.strip() for line in done.stdout.splitlines() if line.strip()} == wanted, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_there_is_a_script_for_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "explain-route" in script(shell, capsys)


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 2
    assert "pip install 'kvparams[completion]'" in capsys.readouterr().err
