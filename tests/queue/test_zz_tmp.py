import asyncio, itertools
from contextlib import AsyncExitStack
from pathlib import Path
from tests.queue.conftest import Nodes
from tests.queue.rabbitmq import RabbitMQ
from tests.queue.test_way import Chunks, echo, ended, send, until

async def test_leaving(nodes: Nodes) -> None:
    way = nodes.prefill()
    chunks = Chunks()
    async with AsyncExitStack() as own:
        mine = Nodes(nodes.broker, nodes.name, own)
        decode = await mine.decode(chunks)
        _, heard = send(way)
        await chunks.chunks.put(b"one")
        async with asyncio.timeout(20):
            await heard.some.wait()
    other = await nodes.decode(echo)
    loop = asyncio.get_running_loop(); t = loop.time()
    try:
        async with asyncio.timeout(25):
            await heard.done.wait()
        print("ENDED after", loop.time() - t, heard.error, other.consumer.counts)
    except TimeoutError:
        print("NOT ENDED after 25 s", other.consumer.counts, decode.consumer.counts)

async def test_poison(tmp_path: Path, stack: AsyncExitStack) -> None:
    broker = RabbitMQ(tmp_path / "b")
    conf = tmp_path / "b" / "rabbitmq.conf"
    conf.write_text(conf.read_text() + "max_message_size = 65536\n")
    with broker:
        nodes = Nodes(broker, "x", stack)
        way = nodes.prefill()
        decode = await nodes.decode(echo)
        await until(lambda: decode.consumer.connected)
        _, small = send(way, b"{}")
        await ended(small)
        print("before", small.error)
        _, big = send(way, b'"' + b"x" * 100_000 + b'"')
        _, small = send(way, b"{}")
        lost = 0
        try:
            async with asyncio.timeout(12):
                await small.done.wait()
            print("SMALL", small.error, small.body)
        except TimeoutError:
            print("SMALL NOT ANSWERED after 12 s")
        print("BIG", big.done.is_set(), big.error, len(way._outbox), way._link.away_s)
