"""Tests that a proxy which hangs, crashes or floods ends in a clear verdict, with nothing left running."""

import sys
import time
from pathlib import Path

import pytest

from kvparams_conformance.program import descendants
from kvparams_conformance.site import Under
from tests.system.conformance.bad_runs import judged

LISTEN = "import socket, sys, time, os; s = socket.create_server(('127.0.0.1', int(sys.argv[1])), backlog=64)\n"
HEAD = r"b'HTTP/1.1 200 OK\r\ncontent-length: 10737418240\r\n\r\n'"
ANSWER = r"b'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}'"
PROGRAMS = {
    "does not listen": "import time; time.sleep(600)",
    "hangs": LISTEN + "time.sleep(600)",
    "ends at once": "import sys; print('no such option'); sys.exit(3)",
    "closes every connection": LISTEN + "while True: s.accept()[0].close()",
    "answers 10 GB": LISTEN
    + f"import threading\ndef f(c):\n  try:\n    c.sendall({HEAD})\n    while True: c.sendall(b' ' * 65536)\n"
    + "  except OSError: pass\nwhile True: threading.Thread(target=f, args=(s.accept()[0],), daemon=True).start()",
    **{
        name: LISTEN + f"while True:\n  c = s.accept()[0]; c.sendall({answer}); time.sleep(0.1)"
        for name, answer in {
            "answers a negative chunk": rb"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\nX",
            "answers a length that is no number": "HTTP/1.1 200 OK\r\ncontent-length: ²\r\n\r\n".encode("latin-1"),
            "answers a length of many digits": b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        }.items()
    },
    "answers no HTTP": LISTEN + "while True:\n  c = s.accept()[0]; c.sendall(b'\\x00' * 100); c.close()",
    "floods its output": LISTEN
    + f"while True:\n  c = s.accept()[0]; c.sendall({ANSWER}); c.close(); print('x' * 10_000_000)",
    "has children that ignore SIGTERM": LISTEN
    + "import signal, subprocess\n"
    + "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
    + "p = subprocess.Popen([sys.executable, '-c', code, sys.argv[0]])\n"
    + "signal.signal(15, signal.SIG_IGN); time.sleep(600)",
}
WORDS = {
    "does not listen": "did not answer within",
    "hangs": "did not answer within",
    "ends at once": "ended with status 3",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_in_a_verdict(name: str, tmp_path: Path) -> None:
    program = tmp_path / "proxy.py"
    program.write_text(PROGRAMS[name])
    begun = time.monotonic()
    before = descendants(1) | {0}
    results = judged(Under("document", command=f"{sys.executable} {program} {{port}}", start_s=2.0), ("2.1", "17.2"))
    assert {result.verdict for result in results} <= {"fail", "error"}
    assert all(result.message for result in results)
    assert WORDS.get(name, "") in results[0].message
    assert time.monotonic() - begun < 60
    left = [pid for pid in descendants(1) - before if str(program) in command_line(pid)]
    assert left == []


def command_line(pid: int) -> str:
    """Returns the command line of a process, or nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_a_proxy_that_ends_in_the_middle_fails_the_check_and_is_started_anew(tmp_path: Path) -> None:
    program = tmp_path / "proxy.py"
    program.write_text(LISTEN + f"for n in range(2):\n  c = s.accept()[0]; c.sendall({ANSWER}); c.close()\nsys.exit(7)")
    results = judged(Under("document", command=f"{sys.executable} {program} {{port}}", start_s=1.0), ("2.1",))
    assert [result.verdict for result in results] == ["error"]
    assert "ended with status 7" in results[0].message
