"""Checks what `import kvparams` promises."""

import inspect
import subprocess
import sys

import kvparams


def test_the_public_names_are_there_once() -> None:
    assert len(set(kvparams.__all__)) == len(kvparams.__all__)
    assert all(hasattr(kvparams, name) for name in kvparams.__all__)


def test_every_public_thing_is_documented() -> None:
    for name in kvparams.__all__:
        thing: object = getattr(kvparams, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name


def test_importing_opens_nothing_heavy() -> None:
    """Ours: an engine pays for pydantic and for nothing else."""
    code = (
        "import sys, kvparams;"
        "heavy = {'torch', 'numpy', 'starlette', 'uvicorn', 'httpx', 'asyncio', 'xxhash', 'msgspec',"
        " 'kvparams_proxy', 'kvparams_connectors'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_document_makes_the_round_trip_through_the_public_door() -> None:
    params = kvparams.KVTransferParams(
        version=kvparams.PROTOCOL_VERSION,
        request_id="r",
        transfer=kvparams.Transfer(id="t", attempt=1),
        phase="prefill",
        mode="store",
        prefix=kvparams.TokenPrefix.by_digest([1, 2, 3]),
    )
    assert kvparams.parse(kvparams.dump_json(params)) == params
    assert kvparams.read_request(kvparams.write(params)) == params
