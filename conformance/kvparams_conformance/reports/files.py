"""Writes a report as files: JSON, JUnit's XML, and one static page of HTML."""

import json
import re
from html import escape
from pathlib import Path
from typing import Final
from xml.sax.saxutils import quoteattr

from kvparams_conformance.reports.model import Line, Report

__all__ = ["write_html", "write_json", "write_junit"]

_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STYLE: Final = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2em;max-width:110em}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
    "code{font-size:12px;overflow-wrap:anywhere}.pass{color:#176b2c}.fail,.error{color:#b00020;font-weight:600}"
    ".choice{color:#8a5a00}.skip{color:#666}details{max-width:60em}"
)


def write_json(report: Report, path: Path) -> None:
    """Writes the report as JSON."""
    path.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=True) + "\n", "utf-8")


def write_junit(report: Report, path: Path) -> None:
    """Writes the report as JUnit's XML, as CI systems read it."""
    counts = report.counts
    head = (
        f'<testsuite name={_attribute(f"kvparams conformance {report.subject}")} tests="{len(report.lines)}" '
        f'failures="{counts["fail"]}" errors="{counts["error"]}" skipped="{counts["skip"]}" '
        f'time="{report.seconds:.3f}">'
    )
    cases = "\n".join(map(_junit_case, report.lines))
    path.write_text(
        f'<?xml version="1.0" encoding="utf-8"?>\n<testsuites>\n{head}\n{cases}\n</testsuite>\n</testsuites>\n', "utf-8"
    )


def _junit_case(line: Line) -> str:
    name = f"<testcase classname={_attribute(f'requirement {line.requirement}')} name={_attribute(line.id)}"
    body = _xml(f"{line.message}\nexpected: {line.expects}\nsent: {line.sent}\nseen: {line.seen}\n{line.link}")
    inside = {
        "fail": f"<failure message={_attribute(line.message)}>{body}</failure>",
        "error": f"<error message={_attribute(line.message)}>{body}</error>",
        "skip": f"<skipped message={_attribute(line.message)}/>",
        "choice": f"<system-out>{body}</system-out>",
        "pass": "",
    }[line.verdict]
    return f'{name} time="{line.seconds:.3f}">{inside}</testcase>'


def write_html(report: Report, path: Path) -> None:
    """Writes the report as one page that fetches nothing and runs no script. Everything that came is escaped."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items() if count)
    title = escape(f"{report.subject} {report.target}")
    rows = "\n".join(map(_html_row, report.lines))
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"<p>Profile {escape(', '.join(report.profiles))}, specification {escape(report.version)}: "
        f"{escape(counts)}; {report.seconds:.1f} s.</p>\n<table><thead><tr><th>requirement</th><th>verdict</th>"
        f"<th>expected</th><th>evidence</th></tr></thead><tbody>\n{rows}\n</tbody></table></body></html>\n",
        "utf-8",
    )


def _html_row(line: Line) -> str:
    evidence = f"<p>{escape(line.message)}</p>" if line.message else ""
    evidence += (
        f"<details><summary>sent and seen</summary><p>sent</p><code>{escape(line.sent)}</code>"
        f"<p>seen</p><code>{escape(line.seen)}</code></details>"
    )
    return (
        f'<tr><td><a href="{escape(line.link)}">{escape(line.id)}</a></td>'
        f'<td class="{line.verdict}">{line.verdict}</td>'
        f"<td>{escape(line.sends)}: {escape(line.expects)}</td><td>{evidence}</td></tr>"
    )


def _xml(text: str) -> str:
    return escape(_NO_XML.sub("\ufffd", text), quote=False)


def _attribute(text: str) -> str:
    return quoteattr(_NO_XML.sub("\ufffd", text))
