"""Tests how further names of models are read, and that a start prints them as it read them."""

from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams_proxy.config.model_aliases import parse_model_aliases


def test_aliases_are_read_from_a_flag_and_from_a_file() -> None:
    assert parse_model_aliases("a=m, b=org/m:1") == {"a": "m", "b": "org/m:1"}
    assert parse_model_aliases({"a": "m"}) == {"a": "m"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a", "must be ALIAS=MODEL"),
        ("a=", "must be ALIAS=MODEL"),
        ("=m", "must be ALIAS=MODEL"),
        (7, "must be ALIAS=MODEL"),
        ({"a": 7}, "must be ALIAS=MODEL"),
        ("a=m,a=n", "twice"),
        ("a=b,b=m", "stands for another alias"),
        ("a=a", "stands for another alias"),
    ],
)
def test_what_is_no_alias_is_refused_in_words(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_model_aliases(value)


def test_the_printed_configuration_has_the_aliases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = ("proxy", "--prefill", "http://p:1", "--decode", "http://d:1")
    assert main([*engines, "--model-alias", "a=m,b=n", "--print-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(text)
    assert main(["proxy", "--config", str(tmp_path / "again.yaml"), "--print-config"]) == 0
    again = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.strip().startswith("model-alias:"))
    assert '"a": "m"' in line or "a: m" in line or 'a: "m"' in line
    assert any(line.split("#")[0].strip() in one for one in again.splitlines())
