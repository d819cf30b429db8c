"""Writes a report as a table for a terminal."""

import shutil
from typing import Final

from kvparams_conformance.reports.model import Report

__all__ = ["write_table"]

_MARKS: Final = {"pass": "ok     ", "fail": "FAIL   ", "choice": "choice ", "skip": "skipped", "error": "ERROR  "}


def write_table(report: Report, *, verbose: bool = False) -> str:
    """Returns the lines of a report: one for each check, with what was seen where the check did not pass."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    names = max((len(line.id) for line in report.lines), default=0)
    lines = [
        f"{report.subject} {report.target}",
        f"profile {', '.join(report.profiles)}, specification {report.version}",
        "",
    ]
    messages = {line.message for line in report.lines}
    if len(messages) == 1 and report.lines and report.lines[0].verdict == "error":  # the program did not start
        return (
            "\n".join([*lines, f"ERROR   {messages.pop()}", "", f"{len(report.lines)} checks could not be judged"])
            + "\n"
        )
    for line in report.lines:
        lines.append(f"{_MARKS[line.verdict]} {line.id:<{names}}  {line.expects}"[:width])
        if line.verdict not in ("pass", "skip"):
            lines.append(f"        {line.message}")
            lines.append(f"        sent: {line.sent[:300]}")
            lines.append(f"        seen: {line.seen[:500]}")
            lines.append(f"        {line.link}")
        elif verbose and line.message:
            lines.append(f"        {line.message}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items() if count)
    lines += ["", f"{counts or 'no checks'}; {report.seconds:.1f} s"]
    return "\n".join(lines) + "\n"
