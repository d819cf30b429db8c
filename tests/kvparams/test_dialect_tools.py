"""`kvparams validate`, `translate` and `explain`, as people use them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvparams.cli import main

ANSWER: dict[str, Any] = {
    "id": "cmpl-7f3c",
    "object": "text_completion",
    "choices": [{"index": 0, "text": " Paris", "finish_reason": "length"}],
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[812, 813]],
        "remote_engine_id": "5b5f",
        "remote_request_id": "cmpl-7f3c-0",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 4,
        "transfer_mode": "pull",
        "x_new": 9223372036854775807,
    },
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(ANSWER))
    return str(path)


def written(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize("command", ["validate", "translate", "explain"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "example:" in said
    assert f"kvparams {command}" in said
    assert "--phase" in said


def test_an_answer_is_validated(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file]) == 0
    said = capsys.readouterr()
    assert said.out == "valid: vLLM NixlConnector / NixlPullConnector, prefill_result\n"
    assert "the dialect is nixl" in said.err
    assert main(["validate", "--engine", "0.14.0", "--dialect", "nixl", file]) == 1
    assert "remote_block_ids" in capsys.readouterr().out


def test_every_problem_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**ANSWER["kv_transfer_params"], "remote_port": 0, "tp_size": 5000}
    path = written(tmp_path / "wrong.json", wrong)
    assert main(["validate", "--dialect", "nixl", "--phase", "decode", path]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["kv_transfer_params.remote_port", "kv_transfer_params.tp_size"]
    assert main(["validate", path]) == 2
    assert "name the dialect" in capsys.readouterr().err


def test_a_document_makes_the_way_there_and_back(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["translate", "--from", "nixl", "--to", "kvparams", "--request-id", "7f3c", file]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["request_id"], document["phase"], document["producer"]) == (
        "7f3c",
        "prefill_result",
        {"id": "5b5f"},
    )
    path = written(tmp_path / "document.json", document)
    for arguments in (["validate", path], ["validate", "--dialect", "kvparams", path], ["explain", path]):
        assert main(arguments) == 0
    assert "computed by 5b5f" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(path).read_bytes())))
    assert main(["translate", "--to", "nixl"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert message == {"request_id": "7f3c", "body": {"kv_transfer_params": ANSWER["kv_transfer_params"]}}
    assert next(iter(message["body"]["kv_transfer_params"])) == "do_remote_decode", "in the order of the table"


def test_what_is_lost_is_named_before_it_is_lost(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["translate", "--to", "mooncake", "--from", "nixl", "--phase", "prefill_result", file]
    assert main(asked) == 1
    said = capsys.readouterr()
    assert not said.out
    assert "mooncake cannot say" in said.err
    assert "producer.id" in said.err
    assert main([*asked, "--lossy"]) == 0
    assert json.loads(capsys.readouterr().out) == {"request_id": "unknown", "body": {}}


def test_an_answer_is_explained(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", file]) == 0
    said = capsys.readouterr().out
    assert "prefill answer" in said
    assert 'remote_engine_id = "5b5f": who holds the KV (our producer.id)' in said
    assert "x_new: not known to this dialect" in said
    assert "Worth knowing" in said


def test_what_is_wrong_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "wrong.json", {"do_remote_prefill": True, "remote_port": 0})
    assert main(["explain", "--dialect", "nixl", "--phase", "decode", path]) == 1
    said = capsys.readouterr().out
    assert "What is wrong:" in said
    assert "remote_engine_id: Field required [missing]" in said
    ours = written(tmp_path / "ours.json", {"kvparams": {"version": "1.0"}})
    assert main(["explain", ours]) == 1
    assert "request_id" in capsys.readouterr().out


def test_a_salt_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "salted.json", {"bootstrap_room": 5, "bootstrap_host": "h", "cache_salt": "hush"})
    assert main(["explain", path, "--phase", "decode"]) == 0
    assert "hush" not in capsys.readouterr().out


def test_every_dialect_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--about"]) == 0
    said = capsys.readouterr().out
    assert "bootstrap_room" in said
    assert "the id is minted by the router: transfer_id" in said


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ("[]", [], "should be an object"),
        ('{"a": 1, "a": 2}', [], "json"),
        ("{}", [], "no registered dialect"),
        ("{}", ["--dialect", "no-such"], "known: kvparams, aibrix"),
        ("{}", ["--dialect", "nixl"], "--phase"),
        ('{"kvparams": 1}', [], "should be an object"),
        ('{"do_remote_decode": true}', [], "can be any of"),
    ],
)
def test_what_cannot_be_judged_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, arguments: list[str], words: str
) -> None:
    path = tmp_path / "given.json"
    path.write_text(content)
    assert main(["validate", *arguments, str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "/no/such/file"]) == 2
    assert "/no/such/file" in capsys.readouterr().err


@pytest.mark.parametrize("carrier", [ANSWER["kv_transfer_params"], {"kvparams": {"version": "1.0"}}])
def test_params_that_are_text_are_read_as_the_object(
    carrier: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some carriers hold them so."""
    said: list[tuple[int, str]] = []
    for value in (carrier, json.dumps(carrier)):
        path = written(tmp_path / "one.json", ANSWER | {"kv_transfer_params": value})
        status = main(["explain", path])
        said.append((status, capsys.readouterr().out))
    assert said[0] == said[1]
    assert "remote_host" in said[0][1] or "transfer" in said[0][1]
