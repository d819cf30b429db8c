"""Starts several processes behind one port, as a single program.

    python -m tests.system.conformance.several PORT FILE

FILE is a list of commands in JSON. The words in them are those of `kvparams conformance proxy --start`, except that
`{port}` is a port of the process's own, and so is `{aside}`; `{site}` is PORT. Connections to PORT go in turn to the
processes with a `{port}`.
"""

import asyncio
import itertools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.processes import free_ports
from tests.support.waiting import until

__all__ = ["command_of"]

_START_S: Final = 60.0
_WORDS: Final = "KVCONF_"


def command_of(folder: Path, *commands: str) -> str:
    """Returns the command that starts these commands behind one port. `folder` takes their list."""
    path = folder / "commands.json"
    path.write_text(json.dumps(commands))
    return f"{sys.executable} -m {__name__} {{port}} {path}"


async def main(port: int, commands: Sequence[str]) -> None:
    """Runs until one of the processes ends, or it is ended with them."""
    words = {name.removeprefix(_WORDS).lower(): value for name, value in os.environ.items() if name.startswith(_WORDS)}
    running, ports = list[asyncio.subprocess.Process](), list[int]()
    for own, command in zip(free_ports(len(commands)), commands, strict=True):
        ports += [own] if "{port}" in command else []
        for name, value in {**words, "site": str(port), "port": str(own), "aside": str(own)}.items():
            command = command.replace(f"{{{name}}}", value)
        running.append(await asyncio.create_subprocess_exec(*shlex.split(command)))
    waits = [asyncio.create_task(one.wait()) for one in running]
    for own in ports:
        await until(lambda own=own: any(one.done() for one in waits) or _answers(own), _START_S)
    turns = itertools.cycle(ports)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", next(turns))
        ways = [asyncio.create_task(_copy(*way)) for way in ((reader, back), (there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for task in ways:
            task.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for one in (back, writer):
            one.close()

    async with await asyncio.start_server(relay, "127.0.0.1", port, backlog=256):
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    sys.exit("a process has ended")


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()


async def _answers(port: int) -> bool:
    """Returns whether a proxy has engines: 200 at /health."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in status


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
