"""Tests `kvparams validate`, `translate` and `explain`, as people use them."""

import io
import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest

from kvparams.cli import main
from kvparams.dialects.carriers import lift_message, lower_message
from kvparams.dialects.detection import select_native_keys
from kvparams.dialects.message import DialectMessage
from kvparams.dialects.registry import get_table
from tests.support.kvparams.dialect_messages import same
from tests.support.kvparams.spec_folder import DIALECTS, VECTORS

FILES = sorted([*(VECTORS / "dialects").glob("*.json"), *(DIALECTS / "vectors").glob("*.json")])

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
    assert "Examples:" in said
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
    assert [line.split(": ")[:2] for line in said] == [
        [path, "kv_transfer_params.remote_port"],
        [path, "kv_transfer_params.tp_size"],
    ]
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
    assert "x_new: this dialect has no such key" in said
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
    assert "the transfer id comes from the router: transfer_id" in said
    places = re.findall(r"kv_transfer_params may also be in (\S+):", said)
    assert places.count("sampling_params.extra_args.kv_transfer_params") == places.count("kv_transfer_params_json") > 5


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ("{}", [], "no registered dialect"),
        ("{}", ["--dialect", "no-such"], "known: kvparams, aibrix"),
        ("{}", ["--dialect", "nxil"], "did you mean nixl? known: kvparams"),
        ('{"is_mooncake_push": true, "transfer_id": "a", "do_remote_decode": 3}', [], "no registered dialect"),
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


@pytest.mark.parametrize("command", ["validate", "explain"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_keys_of_several_dialects_are_taken_for_the_most_common_one(
    command: str, phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members: dict[str, dict[str, object]] = {
        "prefill": {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None},
        "decode": {
            "do_remote_prefill": True,
            "remote_engine_id": "e",
            "remote_block_ids": [1],
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
        },
    }
    path = written(tmp_path / "given.json", members[phase])
    assert main([command, path]) == 0
    said = capsys.readouterr()
    assert "vLLM NixlConnector" in said.out
    found = re.search(
        r"the dialect is probably nixl, the most common one; the keys also fit (.*);", said.out + said.err
    )
    assert found is not None
    assert "nixl-push" in found[1]
    assert "set another one with --dialect" in said.out + said.err
    assert f"the phase is {phase}" in said.out + said.err
    assert main([command, "--dialect", "nixl", path]) == 0
    said = capsys.readouterr()
    assert "probably" not in said.out + said.err, "what is said is not guessed"


def test_a_translation_is_not_based_on_a_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "given.json", {"do_remote_decode": True})
    assert main(["translate", "--to", "kvparams", path]) == 2
    assert "can be any of moriio-read, moriio-write, nixl, nixl-push; say which" in capsys.readouterr().err


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_valid_message_comes_back_as_it_was(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of each leg, release and carrier: the tests of the vectors have all."""
    content = json.loads(path.read_bytes())
    kinds = {
        (case["phase"], case.get("engine"), case.get("carrier")): case for case in content["cases"] if case["valid"]
    }
    for case in kinds.values():
        engine = ["--engine", case["engine"]] if "engine" in case else []
        source = written(tmp_path / "message.json", case["message"])
        there = ["translate", "--from", content["dialect"], "--to", "kvparams", "--phase", case["phase"], source]
        assert main(there) == 0, case["name"]
        document = json.loads(capsys.readouterr().out)
        carrier = ["--carrier", case["carrier"]] if "carrier" in case else []
        back = ["--from", "kvparams", "--to", content["dialect"], *engine, *carrier]
        assert main(["translate", *back, written(tmp_path / "document.json", document)]) == 0, case["name"]
        said = capsys.readouterr()
        assert same(json.loads(said.out), of_the_dialect(content["dialect"], case["message"])), case["name"]
        assert not said.err


def of_the_dialect(name: str, told: dict[str, Any]) -> dict[str, Any]:
    """The message without what is the client's own."""
    message, carrier = lift_message(DialectMessage(told["request_id"], told["body"], told.get("headers", {})))
    return lower_message(select_native_keys(get_table(name), message), carrier).to_json()


DOCUMENT = {
    "version": "1.0",
    "request_id": "r",
    "phase": "prefill",
    "mode": "store",
    "transfer": {"id": "t", "attempt": 1},
}


def test_another_mode_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "stored.json", DOCUMENT)
    main(["translate", "--to", "nixl", "--lossy", path])
    assert "the mode changes from store to pull, the only one of nixl" in capsys.readouterr().err
    main(["translate", "--to", "nixl", "--lossy", written(tmp_path / "pulled.json", {**DOCUMENT, "mode": "pull"})])
    assert "the mode" not in capsys.readouterr().err


def alone(native: object) -> object:
    return native


def in_a_body(native: object) -> object:
    return {"kv_transfer_params": native, "prompt": "x"}


def in_a_message(native: object) -> object:
    return {"request_id": "r", "body": {"kv_transfer_params": json.dumps(native)}}


@pytest.mark.parametrize("wrapped", [alone, in_a_body, in_a_message])
def test_native_keys_beside_a_document_are_told(
    wrapped: Callable[[object], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = {"kvparams": DOCUMENT, "do_remote_decode": True, "remote_port": 0, "\x1b[31m": 1}
    path = written(tmp_path / "both.json", wrapped(beside))
    for command, option in ((["validate"], "--dialect"), (["translate", "--to", "kvparams"], "--from")):
        assert main([*command, path]) == 0
        said = capsys.readouterr().err
        assert 'do_remote_decode, remote_port, "\\u001b[31m"' in said
        assert f"add {option} NAME: " in said
        assert main([*command, written(tmp_path / "alone.json", wrapped({"kvparams": DOCUMENT}))]) == 0
        assert not capsys.readouterr().err
    assert main(["explain", path]) == 0
    assert "do_remote_decode, remote_port" in capsys.readouterr().out


def test_a_broken_dialect_of_somebody_else_is_left_out_and_told(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [("acme", "acme_nowhere:TABLE"), ("acme-late", "kvparams.version:NO_SUCH_TABLE")]
    broken += [("acme-misnamed", "kvparams.dialects.trio:TRIO_TABLE"), ("acme-text", "kvparams.version:__version__")]
    added = [EntryPoint(name, value, "kvparams.dialects") for name, value in broken]
    points = EntryPoints([*entry_points(group="kvparams.dialects"), *added])
    commands = entry_points(group="kvparams.commands")

    def registered(group: str, name: str | None = None) -> EntryPoints:
        found = points if group == "kvparams.dialects" else commands
        return found if name is None else found.select(name=name)

    monkeypatch.setattr("kvparams.plugins.entry_points", registered)
    assert main(["validate", "--dialect", "nixl", file]) == 0
    assert "acme" not in capsys.readouterr().err
    for command in (["validate"], ["explain"], ["translate", "--to", "nixl"]):
        assert main([*command, file]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]
        assert [line.split()[2] for line in lines] == [repr(name) for name, _ in broken]
    assert main(["validate", "--dialect", "acme", file]) == 2
    assert "pip install" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["version", "transfer", "mode"])
def test_a_document_that_lacks_a_member_is_one_of_ours(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "lacking.json", {name: value for name, value in DOCUMENT.items() if name != missing})
    assert main(["validate", path]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: {missing}: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "should be an object"),
        (b'{"a": 1, "a": 2}', "[json]"),
        (b'{"a": "\xff"}', "[json]"),
        (b"[" * 1000, "[json]"),
        (b'{"kvparams": 1}', "should be an object"),
    ],
)
def test_what_the_protocol_refuses_is_invalid(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(content)
    for command in ("validate", "explain"):
        assert main([command, str(path)]) == 1
        assert words in capsys.readouterr().out
    assert main(["translate", "--to", "nixl", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_a_document_that_is_not_valid_is_not_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "wrong.json", {**DOCUMENT, "phase": "x"})
    assert main(["translate", "--to", "nixl", path]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: phase: ")


def test_a_member_that_nobody_knows_is_valid_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "typo.json", {**DOCUMENT, "requestid": "r", "extensions": {"org.example": {"x": 1}}})
    assert main(["validate", path]) == 0
    said = capsys.readouterr().err
    assert "requestid" in said
    assert "org.example" in said


@pytest.mark.parametrize(
    ("members", "phase"),
    [
        ({}, "prefill"),
        ({"do_remote_prefill": True, "remote_port": 0}, "decode"),
        ({"do_remote_decode": True, "remote_engine_id": 7}, "prefill"),
    ],
)
def test_a_named_dialect_needs_no_phase(
    members: dict[str, object], phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no leg is valid, what is wrong is said of the one on which least is."""
    path = written(tmp_path / "wrong.json", members)
    assert main(["validate", "--dialect", "nixl", path]) == 1
    said = capsys.readouterr()
    assert f"the phase is probably {phase}, which has the fewest problems" in said.err
    assert all(line.startswith(f"{path}: kv_transfer_params.") for line in said.out.splitlines())
    assert main(["explain", "--dialect", "nixl", path]) == 1
    assert "What is wrong:" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["validate"], ["explain"], ["translate", "--to", "nixl"]])
def test_a_release_that_is_none_is_wrong_use(
    command: list[str], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (file, written(tmp_path / "wrong.json", {})):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--engine", "banana", path])
        assert ended.value.code == 2
        assert "'banana' is not a version; write for example 0.32.0" in capsys.readouterr().err


def test_options_without_effect_are_told(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = written(tmp_path / "ours.json", DOCUMENT)
    options = ["--phase", "decode", "--engine", "0.32.0", "--request-id", "x"]
    for command in ("validate", "explain"):
        assert main([command, *options, ours]) == 0
        assert (
            "--phase, --engine, --request-id have no effect: a kvparams document has this information itself"
            in capsys.readouterr().err
        )
        assert main([command, *options, file]) in (0, 1)
        assert "no effect" not in capsys.readouterr().err
    assert main(["explain", "--about", "--dialect", "nixl", "--phase", "decode"]) == 0
    assert "--phase has no effect: --about does not read a file" in capsys.readouterr().err
    asked = ["translate", "--from", "nixl", "--to", "kvparams"]
    assert main([*asked, "--lossy", "--carrier", "grpc", file]) == 0
    assert "--lossy, --carrier have no effect" in capsys.readouterr().err
    assert main(["translate", "--to", "sglang", "--lossy", "--request-id", "x", ours]) == 0
    assert "--request-id has no effect" in capsys.readouterr().err


def test_native_keys_in_another_place_are_found_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native = ANSWER["kv_transfer_params"] | {"remote_port": 0}
    body = {"token_ids": [1], "sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": native}}}
    path = written(tmp_path / "generate.json", body)
    assert main(["validate", path, "--dialect", "nixl", "--phase", "decode"]) == 1
    where = "sampling_params.extra_args.kv_transfer_params"
    said = capsys.readouterr()
    assert f"{where}.remote_port: " in said.out
    assert f"the native keys are in {where}" in said.err
    assert main(["explain", path, "--dialect", "nixl", "--phase", "decode"]) == 1
    assert f'{where}.remote_host = "10.0.0.7"' in capsys.readouterr().out
    native["remote_port"] = 1
    asked = ["translate", "--from", "nixl", "--to", "nixl", "--phase", "decode"]
    path = written(tmp_path / "generate.json", body)
    assert main([*asked, path]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["body"]["sampling_params"]["extra_args"]["kv_transfer_params"] == native, "where it stood"
    assert main([*asked, "--carrier", "grpc", path]) == 0
    out = json.loads(capsys.readouterr().out)
    assert json.loads(out["body"]["kv_transfer_params_json"]) == native
    assert main([*asked, "--carrier", "kv_transfer_params", path]) == 0
    assert json.loads(capsys.readouterr().out)["body"]["kv_transfer_params"] == native
    ours = {"sampling_params": {"extra_args": {"kv_transfer_params": {"kvparams": DOCUMENT}}}}
    assert main(["validate", written(tmp_path / "ours.json", ours)]) == 0
    assert "a kvparams document" in capsys.readouterr().out


def test_a_file_that_is_too_long_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.json"
    path.write_bytes(b" " * ((16 << 20) + 5))
    assert main(["validate", str(path)]) == 1
    assert "the text is longer than 16777216 bytes" in capsys.readouterr().out


def test_keys_beside_those_of_the_engine_are_explained_in_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native = ANSWER["kv_transfer_params"]
    body = {"kv_hint": {"message_id": "m"}, "prefill_result": {"disaggregated_params": {"kv_transfer_params": native}}}
    asked = ["explain", "--dialect", "dynamo-vllm", "--phase", "decode"]
    assert main([*asked, written(tmp_path / "hint.json", body)]) == 0
    said = capsys.readouterr().out
    assert 'kv_hint.message_id = "m"' in said
    assert "x_new: this dialect has no such key" in said
    assert "remote_host: this dialect" not in said
