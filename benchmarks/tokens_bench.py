"""Measures the cost of knowing a prompt's token ids in the proxy, beside its other work.

Every figure has its yardstick in the same round: the bare tokenizer on the whole text, and the proxy without
`--tokenizer` on the same requests.

    python -m benchmarks.tokens_bench [--tokenizer FOLDER] [--rounds 5]

CPU milliseconds per chat request of about 200, 8,000 and 128,000 tokens, median over the rounds, threads included:

- `read` the body parsed and checked, as for every request; `bare` the tokenizer on the whole rendered text
- `cold` rendered, cut and encoded, nothing known; `turn` the same with 200 further tokens, all before them known
- `again` everything known; `bytes` pseudo tokens
- `loop` the longest that the event loop was held up while such a cold request went through the service: wall time

Then the proxy as a process, before stub engines, prefill and decode: `off` without, `bytes` and `turn` with
`--tokenizer bytes` and `--tokenizer FOLDER`, where each request has another last message.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, cast

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from benchmarks.load_process import Ask, closed
from kvparams.jsontext.document import DEFAULT_LIMITS
from kvparams_proxy.requests.intake import ParsedRequest, parse_request_in_steps
from kvparams_proxy.tokenization.engine_tokenizer import EngineTokenizer
from kvparams_proxy.tokenization.local_tokenizer import LocalTokenizer
from kvparams_proxy.tokenization.pseudo_tokens import pseudo_tokens
from kvparams_proxy.tokenization.service import RoutingTokens, TokenService
from kvparams_proxy.tokenization.tokenizer_files import load_local_tokenizer
from tests.support import stub_engine
from tests.support.processes import Processes, free_ports, tree_usage

__all__ = ["main"]

_SIZES: Final = {200: 4000, 8_000: 1500, 128_000: 80}
"""Tokens, and requests of one round of the proxy."""
_MESSAGE_TOKENS: Final = 400
_TURN_TOKENS: Final = 200
_CONCURRENCY: Final = 16
_LIMIT_S: Final = 60.0
_MOST: Final = 8 << 20
_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ROOT: Final = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a model's; by default one made on the spot")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.tokenizer or _make(Path(made))
        print(
            f"{'tokens':>8} {'read':>8} {'bare':>8} {'cold':>8} {'turn':>8} {'again':>8} {'bytes':>8} {'loop':>8}   ms"
        )
        for size in _SIZES:
            costs = _alone(load_local_tokenizer(folder), folder, size, arguments.rounds)
            held_ms = statistics.median(asyncio.run(_held(folder, size, n)) for n in range(arguments.rounds))
            print(f"{size:>8} " + " ".join(f"{cost:>8.3f}" for cost in [*costs, held_ms]), flush=True)
        print(f"\n{'tokens':>8} {'off':>8} {'bytes':>8} {'turn':>8}   ms of CPU per request in the proxy")
        for size, costs in _in_the_proxy(folder, Path(made), arguments.rounds).items():
            print(f"{size:>8} " + " ".join(f"{cost:>8.3f}" for cost in costs), flush=True)
    return 0


def _make(folder: Path) -> Path:
    """A byte-level BPE of 8,000 tokens and a template in ChatML's form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.read_text() for file in sorted(_ROOT.rglob("*.md"))), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _words(tokens: int, seed: object) -> str:
    """About so many tokens of English about this project."""
    words = (_ROOT / "ARCHITECTURE.md").read_text().split()
    return " ".join(Random(f"{seed}").choices(words, k=max(1, tokens * 2 // 5)))


def _chat(tokens: int, seed: object) -> list[dict[str, str]]:
    count = max(1, tokens // _MESSAGE_TOKENS)
    each = tokens // count
    return [
        {"role": "user" if number % 2 == 0 else "assistant", "content": _words(each, (seed, number))}
        for number in range(count)
    ]


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "stub", "messages": messages, "max_tokens": 16, "temperature": 0.0}).encode()


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1e6


def _bare(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _ids(local: LocalTokenizer, inbound: ParsedRequest) -> object:
    return local.encode_chat(cast("Mapping[str, object]", inbound.document), _MOST).encode()


def _alone(local: LocalTokenizer, folder: Path, size: int, rounds: int) -> list[float]:
    """The columns of one row, but for the last."""
    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seen: dict[str, list[float]] = {name: [] for name in ("read", "bare", "cold", "turn", "again", "bytes")}
    repeats = max(1, 2_000 // size)  # the clock is coarse beside 200 tokens
    for number in range(rounds + 1):
        costs = dict.fromkeys(seen, 0.0)
        for repeat in range(repeats):
            said = _chat(size, (number, repeat))
            body = _body(said)
            costs["read"] += _cpu_ms(partial(_read, body))
            first = _read(body)
            text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in said)
            costs["bare"] += _cpu_ms(partial(_bare, bare, text))
            costs["cold"] += _cpu_ms(partial(_ids, local, first))
            further = _read(_body([*said, *_chat(_TURN_TOKENS, ("turn", number, repeat))]))
            costs["turn"] += _cpu_ms(partial(_ids, local, further))
            costs["again"] += _cpu_ms(partial(_ids, local, further))
            costs["bytes"] += _cpu_ms(partial(pseudo_tokens, "chat", further.body, further.member_spans))
        if number:  # the first round warms up
            for name, cost in costs.items():
                seen[name].append(cost / repeats)
    return [statistics.median(costs) for costs in seen.values()]


def _read(body: bytes) -> ParsedRequest:
    steps = parse_request_in_steps("chat", body, "request", "transfer", DEFAULT_LIMITS, keep_document=True)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


async def _held(folder: Path, size: int, seed: int) -> float:
    """The longest time between two turns of the event loop while a cold request is looked at, in ms."""
    loop = asyncio.get_running_loop()
    nobody = cast("EngineTokenizer", None)
    service = TokenService(loop, {None: load_local_tokenizer(folder)}, nobody)
    inbound = _read(_body(_chat(size, ("held", seed))))
    told: asyncio.Future[RoutingTokens | None] = loop.create_future()
    worst = 0.0
    last = time.perf_counter()
    service.find("chat", inbound, told.set_result)
    while True:
        await asyncio.sleep(0)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
        if told.done():
            break
    service.close()
    return worst * 1e3


def _in_the_proxy(folder: Path, scratch: Path, rounds: int) -> dict[int, list[float]]:
    ports = free_ports(5)
    logs = scratch / "logs"
    logs.mkdir()
    with Processes(logs) as processes:
        url = "http://127.0.0.1:{}".format
        prefill, decode = ports[:1], ports[1:2]
        roles = ["--prefill", str(prefill[0]), "--decode", str(decode[0])]
        processes.start("stub", [sys.executable, stub_engine.__file__, *roles], ready=[url(prefill[0]) + "/health"])
        kvparams = str(Path(sys.executable).with_name("kvparams"))
        engines = ["--prefill", url(prefill[0]), "--decode", url(decode[0]), "--log-requests", "off"]
        pids: dict[int, int] = {}
        for port, more in zip(ports[2:], ([], ["--tokenizer", "bytes"], ["--tokenizer", str(folder)]), strict=True):
            command = [kvparams, "proxy", "--port", str(port), *engines, *more]
            pids[port] = processes.start(f"proxy-{port}", command, ready=[url(port) + "/health"])
        found: dict[int, list[float]] = {}
        for size, requests in _SIZES.items():
            body = scratch / f"{size}.json"
            body.write_bytes(_body([*_chat(size, "proxy"), {"role": "user", "content": f"{_words(20, 0)} @@@@@@@@"}]))
            ask = Ask(body, path="/v1/chat/completions")
            costs: dict[int, list[float]] = {port: [] for port in pids}
            for number in range(rounds + 1):
                for port, pid in pids.items():
                    before = tree_usage(pid)
                    closed(port, ask, concurrency=_CONCURRENCY, requests=requests // rounds, limit_s=_LIMIT_S)
                    used_s = tree_usage(pid).cpu_s - before.cpu_s
                    if number:
                        costs[port].append(used_s / (requests // rounds) * 1e3)
            found[size] = [statistics.mean(each) for each in costs.values()]
    return found


if __name__ == "__main__":
    sys.exit(main())
