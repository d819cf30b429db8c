"""Tests that a reader in JavaScript, written from the spec's folder alone, agrees with every vector.

The reader is tests/contract/javascript/check.mjs.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

from kvparams import InvalidParams, parse
from tests.contract.test_schema import documents
from tests.support.kvparams.spec_folder import ROOT, SPEC

CHECK = ROOT / "tests" / "contract" / "javascript" / "check.mjs"
Case = dict[str, Any]


def check(*folders: Path) -> subprocess.CompletedProcess[str]:
    node = shutil.which("node")
    assert node is not None, "Node is missing, 18 or later: run `make servers`, or install the package nodejs"
    return subprocess.run([node, CHECK, *folders], capture_output=True, text=True, timeout=60, check=False)


def test_it_agrees_with_every_vector() -> None:
    """Spec-mandated, 1.0#1.1: none is left out, and each file is counted."""
    ran = check(SPEC)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counted = {
        name: (int(of), int(all_))
        for name, of, all_ in re.findall(r"^(\S+): (\d+) of (\d+) ", ran.stdout, re.MULTILINE)
    }
    there = {
        path.relative_to(SPEC / "vectors").as_posix(): len(json.loads(path.read_bytes())["cases"])
        for path in (SPEC / "vectors").rglob("*.json")
    }
    assert counted == {name: (size, size) for name, size in there.items()}


def _first(content: Case, change: Callable[[Case], object], wanted: Callable[[Case], object]) -> str:
    case = next(case for case in content["cases"] if wanted(case))
    change(case)
    return case["name"]


def _flipped(text: str, at: int = -1) -> str:
    digits = list(text)
    digits[at] = "0" if digits[at] != "0" else "1"
    return "".join(digits)


def _change(member: str, value: Callable[[Any], object]) -> Callable[[Case], object]:
    return lambda case: case.update({member: value(case[member])})


def _valid(case: Case) -> bool:
    return case["valid"]


def _invalid(case: Case) -> bool:
    return not case["valid"]


CHANGES: dict[str, tuple[Callable[[Case], object], Callable[[Case], object]]] = {
    "bounds.json": (_change("problems", lambda found: [{**found[0], "kind": "missing"}]), _invalid),
    "document.json": (_change("problems", lambda found: [{**found[0], "path": ["else"]}]), _invalid),
    "unknown.json": (lambda case: case.pop("beyond_schema"), lambda case: "beyond_schema" in case),
    "text.json": (lambda case: case.update(valid=True), lambda case: case["name"] == "a key twice"),
    "carrier.json": (_change("document", lambda found: {**found, "mode": "pull"}), lambda case: case.get("document")),
    "trio.json": (_change("documents", lambda found: [*found, found[0]]), _valid),
    "keys.json": (_change("chains", lambda found: [_flipped(found[0]), *found[1:]]), lambda case: case["chains"]),
    "pages.json": (_change("stored", _flipped), lambda case: case["refused"] is None),
    "chain.json": (_change("hashes", lambda found: [*found[:-1], _flipped(found[-1])]), lambda case: case["hashes"]),
    "minor.json": (_change("lost", lambda found: found[1:]), lambda case: "lost" in case),
    "signatures.json": (_change("canonical", lambda found: found + " "), lambda case: "canonical" in case),
    "events.json": (_change("batches", lambda found: []), _valid),
    "dialects/nixl.json": (_change("document", lambda found: {**found, "extensions": {}}), _valid),
    "dialects/sglang.json": (_change("problems", lambda _: []), _invalid),
}
"""In each file one case, changed in one place."""


def test_it_names_the_vectors_that_were_changed_and_no_other(tmp_path: Path) -> None:
    """Negative control."""
    folder = tmp_path / "spec"
    shutil.copytree(SPEC, folder)
    changed = ["strange.json: nobody here knows vectors of the kind strange"]
    for name, (change, wanted) in CHANGES.items():
        path = folder / "vectors" / name
        content = json.loads(path.read_bytes())
        changed.append(f"{name}: {_first(content, change, wanted)}: ")
        path.write_text(json.dumps(content))
    (folder / "vectors" / "strange.json").write_text('{"kind": "strange", "cases": []}')
    ran = check(folder)
    assert ran.returncode == 1
    said = re.findall("^DISAGREES (.+)", ran.stdout, re.MULTILINE)
    assert len(said) == len(changed)
    for start in changed:
        assert any(line.startswith(start) for line in said), start


def test_it_reads_the_schema_and_the_tables_that_stand_there(tmp_path: Path) -> None:
    """Negative control: a bound that was moved, and a native key that is no member any more."""
    (tmp_path / "vectors" / "dialects").mkdir(parents=True)
    for name in ("bounds.json", "dialects/trtllm.json"):
        shutil.copy(SPEC / "vectors" / name, tmp_path / "vectors" / name)
    schema = json.loads((SPEC / "schema.json").read_bytes())
    schema["$defs"]["visible"]["maxLength"] = 255
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    tables = json.loads((SPEC / "dialects.json").read_bytes())
    for key in tables["trtllm"]["keys"]:
        key.pop("member_in", None)
    (tmp_path / "dialects.json").write_text(json.dumps(tables))
    ran = check(tmp_path)
    assert ran.returncode == 1
    assert "DISAGREES bounds.json: request id of 256: " in ran.stdout
    assert "DISAGREES dialects/trtllm.json: context request: " in ran.stdout


def test_it_agrees_on_documents_that_nobody_has_written(tmp_path: Path) -> None:
    """On every problem, its path and its kind: what two readers make of the text must be the same."""
    made: list[Case] = []

    @settings(max_examples=150, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(documents())
    def collect(document: dict[str, Any]) -> None:
        made.append({"name": str(len(made)), "text": json.dumps(document), **_verdict(document)})

    collect()
    assert {case["valid"] for case in made} == {True, False}
    (tmp_path / "vectors").mkdir()
    for name in ("schema.json", "dialects.json"):
        shutil.copy(SPEC / name, tmp_path)
    (tmp_path / "vectors" / "made.json").write_text(json.dumps({"kind": "document", "cases": made}))
    ran = check(tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert f"made.json: {len(made)} of {len(made)} document" in ran.stdout


def _verdict(document: dict[str, Any]) -> Case:
    try:
        parse(document)
    except InvalidParams as error:
        found = [{"path": list(problem.path), "kind": problem.kind} for problem in error.problems]
        return {"valid": False, "problems": found}
    return {"valid": True}


def test_no_vectors_are_no_agreement(tmp_path: Path) -> None:
    (tmp_path / "vectors").mkdir()
    for name in ("schema.json", "dialects.json"):
        shutil.copy(SPEC / name, tmp_path)
    ran = check(tmp_path)
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (1, f"DISAGREES no vectors in {tmp_path}")


def test_what_only_a_parsed_object_can_hold_has_no_canonical_form_there_either() -> None:
    """Spec-mandated, 1.0#13.2: no vector can say it."""
    node = shutil.which("node")
    assert node is not None
    code = """
        const { canonicalNative, NotCanonical } = await import(process.argv[1]);
        for (const value of [NaN, -Infinity, "\\ud800", { "\\udc00": 1n }, "\\ud83d\\ude00"]) {
          try { console.log(canonicalNative({ kvparams: 1n, x: [value] })); }
          catch (error) { console.log(error instanceof NotCanonical); }
        }"""
    signatures = CHECK.with_name("signatures.mjs").as_uri()
    ran = subprocess.run(
        [node, "--input-type=module", "-e", code, signatures], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines() == ["true"] * 4 + ['{"x":["\U0001f600"]}']


def test_it_shares_no_code_with_anything_else() -> None:
    """It imports its own files and Node's library; so it proves what can be built from the spec."""
    imported = {
        found
        for path in CHECK.parent.glob("*.mjs")
        for found in re.findall(r'^(?:import|export) .* from "([^"]+)";$', path.read_text(), re.MULTILINE)
    }
    own = {f"./{path.name}" for path in CHECK.parent.glob("*.mjs")}
    assert imported <= own | {"node:crypto", "node:fs", "node:path"}
    assert len(imported) > 5
