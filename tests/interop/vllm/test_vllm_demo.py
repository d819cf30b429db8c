"""Tests `make demo ENGINE=vllm` as a user runs it: it proves its claims and leaves no process running.

A budgeted run uses a store only. `test_vllm_proxy_nixl.py` covers NIXL.
"""

import re
import signal
import subprocess
import sys
import time
from typing import Final

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_COMMAND: Final = [sys.executable, "-u", "-m", "demo", "--engine", "vllm", "--each", "1"]
_URL: Final = re.compile(r"is ready at (http://\S+)")
_WITHIN_S: Final = 900.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        metafunc.parametrize("store", ["file", "nixl"] if metafunc.config.getoption("--soak") else ["file"])


def test_the_demo_proves_its_point_and_ends(store: str) -> None:
    command = [*_COMMAND, "--turns", "2", "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  yes\n") == 6
    assert done.stdout.count("ok: ") == (3 if store == "nixl" else 7)
    assert "WRONG" not in done.stdout
    assert "6 of 6 answers have the tokens of one engine" in done.stdout
    assert "6 of 6 prompts were handed to decode" in done.stdout
    urls = _URL.findall(done.stdout)
    assert len(urls) >= 4
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)


def test_ctrl_c_ends_it_at_once_and_everything_with_it() -> None:
    demo = subprocess.Popen([*_COMMAND, "--store", "nixl"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert demo.stdout is not None
        output = ""
        for line in demo.stdout:
            output += line
            if _URL.search(line):
                break
        demo.send_signal(signal.SIGINT)
        began = time.monotonic()
        output += demo.communicate(timeout=300)[0]
    finally:
        demo.kill()
        demo.wait()
    assert (demo.returncode, "stopped" in output) == (130, True), output
    assert time.monotonic() - began < 60
    for url in _URL.findall(output):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)
