"""Provides models and folders for real vLLM engines, and leaves only the core tests where vLLM is not installed.

`make test-vllm` installs it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import ENVIRONMENT, READY_S, start_engine
from tests.interop.vllm.fork_server import SOCKET, running_fork_server
from tests.interop.vllm.own_connectors import Alone
from tests.interop.vllm.traffic import answers, mixed
from tests.interop.vllm.version import is_earlier

if not find_spec("vllm"):
    collect_ignore_glob = ["test_vllm_*.py"]
elif is_earlier():  # `test_vllm_contract.py` has what the tier says to that
    collect_ignore_glob = ["test_vllm_offloading_*.py"]

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session", autouse=True)
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts what engines are forked from; the first one that is started waits for it."""
    if not find_spec("vllm"):
        yield
        return
    folder = tmp_path_factory.mktemp("fork-server")
    with running_fork_server(folder, ENVIRONMENT) as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET, path)
        yield


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tiny(seed=0, dtype="float32")`: the folder of a tiny model, made once; of an adapter: dtype `adapter`."""
    made: dict[tuple[int, str], Path] = {}

    def make(seed: int = 0, dtype: str = "float32") -> Path:
        if (seed, dtype) not in made:
            folder = tmp_path_factory.mktemp("model") / "tiny"
            command = [sys.executable, "-m", "tests.interop.vllm.tiny_model", str(folder), str(seed), dtype]
            subprocess.run(command, check=True, cwd=_ROOT, capture_output=True, timeout=300)
            made[seed, dtype] = folder
        return made[seed, dtype]

    return make


@pytest.fixture(scope="session")
def model(make_tiny: Callable[..., Path]) -> Path:
    """The model that most tests use."""
    return make_tiny()


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers of full attention and layers with a window."""
    folder = tmp_path_factory.mktemp("hybrid") / "tiny"
    command = [sys.executable, "-m", "tests.interop.vllm.hybrid_model", str(folder), "0"]
    subprocess.run(command, check=True, cwd=_ROOT, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def bare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM without a connector, for all tests: what it answers is right."""
    with Processes(tmp_path_factory.mktemp("bare")) as processes:
        engine = start_engine(processes, "bare", model)
        processes.wait_ready(engine, within_s=READY_S)
        yield engine


@pytest.fixture(scope="session")
def alone(bare: Server, request: pytest.FixtureRequest) -> Alone:
    """Requests, and what one engine alone answers; 200 of them in a soak run."""
    asks = mixed(200 if request.config.getoption("--soak") else 60)
    return Alone(asks, answers(bare.url, asks))


@contextmanager
def _in_memory() -> Generator[Path]:
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="kvparams-test-") as folder:
        yield Path(folder)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in memory for a store's file, where there is one."""
    with _in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def modules_memory() -> Iterator[Path]:
    """The same for all tests of a module."""
    with _in_memory() as folder:
        yield folder
