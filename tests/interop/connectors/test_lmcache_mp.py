"""Tests LMCache's multi-process server as a store: its parts here, the rest in LMCache's own environment.

That environment runs the whole conformance suite (`lmcache_mp_suite.py`), the server's traps, each with a control
(`lmcache_mp_faults.py`), and a server that is stopped for long (`lmcache_mp_stops.py`).
"""

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.lmcache.mp_client import LMCacheMPLibrary, pseudo_token_ids
from kvparams_connectors.stores.lmcache.mp_shared_memory import HEAD_BYTES, SharedPoolMemory
from kvparams_connectors.stores.lmcache.mp_store import open_url
from tests.support.connectors.lmcache_env import ROOT, environment, python


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tests", ["lmcache_mp_suite.py", "lmcache_mp_faults.py"])
def test_in_lmcaches_own_environment(tests: str) -> None:
    pass_there(tests)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_in_lmcaches_own_environment_with_a_server_that_is_stopped_for_long(effort: Callable[[int, int], int]) -> None:
    pass_there("lmcache_mp_stops.py", *["--soak"] * effort(0, 1))


def pass_there(tests: str, *options: str) -> None:
    command = [python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *options]
    done = subprocess.run(
        [*command, f"tests/interop/connectors/{tests}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


def test_without_lmcache_it_is_said_what_to_install() -> None:
    """The environment of this project has none: LMCache pins old versions of what it uses."""
    assert importlib.util.find_spec("lmcache") is None
    with pytest.raises(StoreError, match=r"pip install 'kvparams\[lmcache\]'"):
        LMCacheMPLibrary()
    with pytest.raises(StoreError, match="size: is not known here"):
        open_url(StoreURL.parse("lmcache-mp://127.0.0.1:5555?size=1GiB"))


@given(st.text(st.characters(codec="ascii"), max_size=128), st.text(st.characters(codec="ascii"), max_size=128))
def test_keys_have_tokens_of_their_own(one: str, other: str) -> None:
    tokens = pseudo_token_ids(one, 256)
    assert len(tokens) == 256
    assert all(0 <= token < 1 << 31 for token in tokens)
    assert tokens == pseudo_token_ids(one, 256)
    assert (tokens == pseudo_token_ids(other, 256)) is (one == other)


# ---- memory


@pytest.fixture
def name() -> Iterator[str]:
    path = Path(f"/dev/shm/kvparams-test-{os.getpid()}")
    path.write_bytes(bytes(1 << 16))
    yield path.name
    path.unlink(missing_ok=True)


def slot_at(offset: int, length: int) -> dict[str, object]:
    return {"slots": [{"offset": offset, "length": length}]}


def test_a_value_comes_back_and_only_under_its_key(name: str) -> None:
    memory = SharedPoolMemory(f"/{name}", 1 << 16)
    slot = (4096, 4096)
    assert memory.slot(slot_at(*slot)) == slot
    memory.write(slot, "key", [memoryview(b"ab"), memoryview(b""), memoryview(b"cde")], 5)
    assert (memory.size(slot, "key"), memory.size(slot, "other")) == (5, None)
    target = bytearray(7)
    memory.read(slot, [memoryview(target)[:3], memoryview(target)[3:]], 5)
    assert bytes(target) == b"abcde\0\0"
    memory.write(slot, "empty", [], 0)
    assert memory.size(slot, "empty") == 0
    memory.read(slot, [], 0)
    with pytest.raises(ValueError, match="do not fit"):
        memory.write(slot, "key", [memoryview(bytes(4096))], 4096)
    memory.close()


def test_a_length_that_cannot_be_is_no_value(name: str) -> None:
    memory = SharedPoolMemory(name, 1 << 16)
    memory.write((0, 4096), "key", [memoryview(b"x")], 1)
    with Path(f"/dev/shm/{name}").open("r+b") as file:
        file.write((4096 - HEAD_BYTES + 1).to_bytes(8, "little"))
    assert memory.size((0, 4096), "key") is None
    memory.close()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"slots": []},
        {"slots": [{"offset": 0, "length": 64}] * 2},
        slot_at(-1, 64),
        slot_at(0, HEAD_BYTES - 1),
        slot_at((1 << 16) - 63, 64),
        slot_at(1 << 40, 64),
    ],
)
def test_an_answer_that_leads_out_of_the_pool_is_none(name: str, answer: object) -> None:
    memory = SharedPoolMemory(name, 1 << 16)
    assert memory.slot(answer) is None
    memory.close()


def test_memory_of_a_server_that_was_started_anew_is_not_current(name: str) -> None:
    path = Path(f"/dev/shm/{name}")
    memory = SharedPoolMemory(name, 1 << 16)
    assert memory.current
    kept = path.with_name(f"{name}-kept")
    path.rename(kept)  # so that the new file cannot get the number of the old one
    assert not memory.current
    path.write_bytes(bytes(1 << 16))
    assert not memory.current
    memory.close()
    kept.unlink()


@pytest.mark.parametrize("wrong", ["", "../etc/passwd", "no-such-memory", "a b"])
def test_memory_that_is_not_there_is_said_in_words(wrong: str) -> None:
    with pytest.raises(StoreError, match=r"shares no memory|cannot be mapped"):
        SharedPoolMemory(wrong, 4096)
