"""`python -m benchmarks.scorecard.telemetry_relay COMMAND...`: reports to LMCache's PD proxy as its engines do.

LMCache's `disagg_prefill_mp/disagg_proxy_server.py` sends no decode leg before LMCache's server has reported to its
telemetry port that the KV of the prefill leg is stored. So this program stands between the proxy and each prefill
engine, passes on every byte, and reports as soon as an engine answers 200. In COMMAND, `RELAY0` and `RELAY1` stand for
its ports, and `TELEMETRY` for the port to report to.
"""

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

_REQUEST_ID: Final = re.compile(rb"\r\nx-request-id: *([^\r\n]+)", re.IGNORECASE)


class _Relay:
    """One connection of the proxy to a prefill engine."""

    def __init__(self, engine_port: int, telemetry_port: int) -> None:
        self._engine_port, self._telemetry_port = engine_port, telemetry_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on what comes, until one side closes."""
        there, back = await asyncio.open_connection("127.0.0.1", self._engine_port)
        asked: list[bytes] = []

        async def ask() -> None:
            while data := await reader.read(65536):
                asked[len(asked) :] = _REQUEST_ID.findall(data)
                back.write(data)
                await back.drain()

        async def answer() -> None:
            while data := await there.read(65536):
                if asked and data.startswith(b"HTTP/1.1 200"):
                    await self._report(asked.pop().decode())
                asked.clear()
                writer.write(data)
                await writer.drain()

        ways = [asyncio.create_task(ask()), asyncio.create_task(answer())]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for task in ways:
            task.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for one in (back, writer):
            one.close()

    async def _report(self, request_id: str) -> None:
        """Reports a request as vLLM names it: `cmpl-ID-0`."""
        body = json.dumps({"event": "request_store_finished", "request_ids_set": [f"cmpl-{request_id}-0"]}).encode()
        head = f"POST /api/v1/telemetry HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._telemetry_port)
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            await reader.read()
            writer.close()


async def main(command: Sequence[str]) -> None:
    """Runs until the proxy ends."""
    telemetry = _free_port()
    words = {"TELEMETRY": str(telemetry)}
    for number in range(2):
        relay = _Relay(int(os.environ[f"KVCONF_PREFILL{number}_PORT"]), telemetry)
        server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        words[f"RELAY{number}"] = str(server.sockets[0].getsockname()[1])
    filled = [re.sub("RELAY[01]|TELEMETRY", lambda found: words[found[0]], one) for one in command]
    process = await asyncio.create_subprocess_exec(*filled)
    sys.exit(await process.wait())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
