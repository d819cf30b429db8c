"""Tests the command line of `kvparams conformance`."""

import pytest

from kvparams.cli import main


def test_a_requirement_is_explained_with_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "proxy", "--explain", "12.1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("12.1  A proxy MUST remove the `kv_transfer_params` that a client sent")
    assert "spec/draft/spec.md#12-security-considerations" in said
    assert "profiles: store-proxy, nixl-proxy, bootstrap-proxy" in said
    assert "12.1/nested (store-proxy)" in said


@pytest.mark.parametrize(("subject", "number"), [("translator", "15.4"), ("events-reader", "14.12")])
def test_requirements_of_readers_are_explained(subject: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", subject, "--explain", number]) == 0
    said = capsys.readouterr().out
    assert f"profiles: {subject}\n" in said
    assert f"{number}/" in said
    assert main(["conformance", subject, "--list", "--only", number]) == 0
    assert capsys.readouterr().out.startswith(f"{number}/")


def test_the_checks_of_a_profile_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "proxy", "--profile", "signed", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 9
    assert all(line.startswith("13.") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["proxy"], "give either --start COMMAND or --url URL"),
        (["proxy", "--start", "x", "--url", "http://x"], "give either --start COMMAND or --url URL"),
        (["proxy", "--url", "http://x"], "--url needs --engine-ports with four numbers"),
        (["proxy", "--url", "http://x", "--engine-ports", "1,a"], "--engine-ports must be four numbers"),
        (["proxy", "--start", "x", "--only", "99.9"], "no check has this profile and this --only"),
        (["proxy", "--profile", "none", "--start", "x"], "there is no profile 'none' for proxy"),
        (["proxy", "--profile", "engine", "--start", "x"], "there is no profile 'engine' for proxy"),
        (["proxy", "--profile", "nixl-proxy", "--profile", "signed", "--start", "x"], "need a run each"),
        (["proxy", "--explain", "99.9"], "there is no requirement 99.9"),
        (["engine"], "give the URL of the engine"),
        (["engine", "http://127.0.0.1:9"], "is the engine up?"),
        (["store"], "give the URL of the store"),
        (["translator"], "give --start COMMAND"),
        (["events-reader", "--start", "x", "--only", "15.1"], "no check has this profile and this --only"),
        (["translator", "--profile", "events-reader", "--start", "x"], "there is no profile 'events-reader' for trans"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_command_that_does_not_exist_is_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "proxy", "--start", "/no/such/program", "--only", "2.1"]) == 2
    assert "the command cannot be started" in capsys.readouterr().out
