"""Tests the reports: what they hold, that everything is escaped, and what the exit status is."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvparams_conformance.checks import Check, CheckResult, Verdict
from kvparams_conformance.reports.files import write_html, write_json, write_junit
from kvparams_conformance.reports.model import Report, make_report
from kvparams_conformance.reports.table import write_table
from kvparams_conformance.requirements import load_specification

EVIL = "<script>alert(1)</script>\"'&\x00\x1b[31m\ud800]]>"


async def nothing(_: Any) -> None:
    """Stands for a check."""


def report(*verdicts: Verdict, message: str = "seen", sent: str = "s") -> Report:
    results = [
        CheckResult(
            Check("12.1" if at else "2.1", f"c{at}", "sends", "expects", ("store-proxy",), nothing, False, False),
            verdict,
            "" if verdict == "pass" else message,
            sent,
            sent,
            0.5,
        )
        for at, verdict in enumerate(verdicts)
    ]
    return make_report("proxy", f"run {message}", ("store-proxy",), results, load_specification(), 1.5)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (("pass", "skip", "choice"), 0),
        (("pass", "fail"), 1),
        (("fail", "error"), 1),
        (("pass", "error"), 2),
        (("skip",), 2),
        ((), 2),
    ],
)
def test_the_exit_status_says_whether_it_conforms(verdicts: tuple[Verdict, ...], status: int) -> None:
    made = report(*verdicts)
    assert made.exit_status == status
    assert made.as_json()["conforms"] is (status == 0)


def test_what_came_is_escaped_in_html(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(report("fail", "pass", message=EVIL.replace("\ud800", ""), sent=EVIL.replace("\ud800", "")), path)
    text = path.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;" in text
    assert "http" not in text


def test_junit_is_xml_whatever_came(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    write_junit(report("fail", "error", "skip", "choice", "pass", message=EVIL, sent=EVIL), path)
    suite = ElementTree.parse(path).getroot()[0]
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    assert [len(case) for case in suite] == [1, 1, 1, 1, 0]
    assert suite[0].get("classname") == "requirement 2.1"


def test_json_has_requirement_verdict_evidence_and_link(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(report("pass", "fail", message=EVIL), path)
    content = json.loads(path.read_text())
    assert content["counts"] == {"pass": 1, "fail": 1, "choice": 0, "skip": 0, "error": 0}
    line = content["checks"][1]
    assert (line["requirement"], line["verdict"], line["sent"]) == ("12.1", "fail", "s")
    assert line["link"] == "spec/draft/spec.md#12-security-considerations"


def test_the_table_shows_what_was_seen_of_what_did_not_pass() -> None:
    text = write_table(report("pass", "fail"))
    assert "ok      2.1/c0" in text
    assert "FAIL    12.1/c1" in text
    assert text.count("sent: s") == 1
    assert text.endswith("1 pass, 1 fail; 1.5 s\n")


def test_a_program_that_does_not_start_is_said_once() -> None:
    text = write_table(report("error", "error", message="the proxy ended with status 3"))
    assert text.count("ended with status 3") == 2  # the target has it, too
    assert "2 checks could not be judged" in text
