"""Tests the engine's loop: a batch does not change a request's tokens, and requests that leave hold nothing."""

import queue
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from reference_engine.cache import PagedCache
from reference_engine.engine import Engine, EngineSettings
from reference_engine.metrics import Metrics
from reference_engine.model import Model
from reference_engine.sampling import Sampling
from reference_engine.sequence import Event, Limits
from reference_engine.sequence import Sequence as Running

WAIT_S = 60.0
GREEDY = Sampling(temperature=0)

Events = queue.Queue[Event]


class Engines:
    """Makes engines in this process, and closes them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._made: list[Local] = []

    def make(
        self,
        *,
        blocks: int = 1024,
        max_model_len: int = 4096,
        max_sequences: int = 64,
        step_tokens: int = 512,
        step_s: float = 0.0,
        token_s: float = 0.0,
    ) -> "Local":
        most = min(max_model_len, 16 * blocks)
        settings = EngineSettings(blocks, 16, most, max_sequences, step_tokens, step_s, token_s)
        self._made.append(Local(self._model, settings))
        return self._made[-1]

    def close(self) -> None:
        for local in self._made:
            local.engine.close()


class Local:
    """An engine and its metrics."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        shape = model.shape
        self.metrics = Metrics()
        cache = PagedCache(shape.layers, settings.blocks, settings.block_size, shape.kv_heads, shape.head_dim)
        self.engine = Engine(model, cache, settings, self.metrics)
        self.engine.start(deliver)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, cache_root: bytes = b""
    ) -> tuple[Running, Events]:
        events: Events = queue.Queue()
        sequence = Running(
            list(prompt), 0, events.put, sampling, Limits(max_tokens, ignore_eos=True), cache_root=cache_root
        )
        self.engine.submit(sequence)
        return sequence, events

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling = GREEDY) -> list[str]:
        """The answers to prompts that run at the same time."""
        running = [self.submit(prompt, max_tokens, sampling) for prompt in prompts]
        return [answer(events) for _, events in running]

    def sample(self, name: str) -> float:
        lines = (line.rpartition(" ") for line in self.metrics.render().decode().splitlines())
        return next(float(value) for found, _, value in lines if found == f"reference_engine:{name}")

    def idle(self) -> bool:
        return not any(self.sample(name) for name in ("requests_in_flight", "requests_waiting", "kv_blocks_in_use"))


def deliver(events: list[Event]) -> None:
    for event in events:
        event.sequence.deliver(event)


def answer(events: Events) -> str:
    """The text of a sequence, once it has ended."""
    text = ""
    while True:
        event = events.get(timeout=WAIT_S)
        assert event.finish != "error", event.reason
        text += event.text
        if event.finish is not None:
            return text


def random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(256) for _ in range(length)]


@pytest.fixture
def engines(model: Model) -> Iterator[Engines]:
    found = Engines(model)
    yield found
    found.close()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_p=0.9, top_k=40, seed=b"s")])
def test_answers_do_not_depend_on_company_chunks_or_reused_prefixes(engines: Engines, sampling: Sampling) -> None:
    draw = random.Random(11)
    shared = random_prompt(draw, 100)
    lengths = [1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 300]
    prompts = [random_prompt(draw, length) for length in lengths]
    prompts += [shared[:cut] + random_prompt(draw, 30) for cut in (16, 47, 48, 96, 100)]
    alone = [engines.make().generate([prompt], 12, sampling)[0] for prompt in prompts]

    together, narrow = engines.make(), engines.make(step_tokens=24, max_sequences=5)

    assert together.generate(prompts, 12, sampling) == alone
    assert narrow.generate(prompts, 12, sampling) == alone
    computed = together.sample('prompt_tokens_total{source="computed"}')
    assert together.generate(prompts, 12, sampling) == alone
    again = together.sample('prompt_tokens_total{source="computed"}') - computed
    assert again < 17 * len(prompts), "the second time, only the ends of the prompts are computed"


def test_a_prefix_is_not_shared_with_another_cache_root(engines: Engines) -> None:
    local = engines.make()
    prompt = random_prompt(random.Random(1), 64)
    for root, cached in ((b"one", 0), (b"two", 0), (b"one", 48)):
        sequence, events = local.submit(prompt, 1, cache_root=root)
        answer(events)
        assert sequence.cached_tokens == cached


def test_more_than_fits_waits_its_turn(engines: Engines) -> None:
    local = engines.make(blocks=16)
    prompts = [random_prompt(random.Random(seed), 100) for seed in range(12)]

    running = [local.submit(prompt, 20) for prompt in prompts]
    most = 0.0
    for _, events in running:
        answer(events)
        most = max(most, local.sample("kv_blocks_in_use"))

    assert 0 < most <= 16
    assert local.idle()


def test_whoever_leaves_holds_nothing(engines: Engines) -> None:
    """100 aborts at random moments; the loop must be the one to say that everything is given back."""
    local = engines.make()
    draw = random.Random(3)
    open_: list[tuple[Running, Events]] = []
    for number in range(100):
        open_.append(local.submit(random_prompt(draw, draw.randrange(1, 700)), 2_000))
        if draw.random() < 0.5:
            open_[0][1].get(timeout=WAIT_S)  # let the oldest come as far as a token
        if number % 3 == 0:
            local.engine.abort(open_.pop(draw.randrange(len(open_)))[0])
    for sequence, _ in open_:
        local.engine.abort(sequence)
    prompt = random_prompt(draw, 40)

    last = local.generate([prompt], 5)  # behind all aborts: when it ends, they have been dealt with

    assert last == engines.make().generate([prompt], 5)
    assert local.idle()
    assert local.sample('requests_total{finish="abort"}') == 100
    assert local.sample("kv_blocks_cached") > 0


def test_an_abort_after_the_end_does_nothing(engines: Engines) -> None:
    local = engines.make()
    sequence, events = local.submit([1, 2, 3], 2)
    answer(events)
    local.engine.abort(sequence)

    assert len(local.generate([[1, 2, 3]], 2)) == 1
    assert local.idle()


def test_closing_tells_those_who_still_wait(engines: Engines) -> None:
    local = engines.make()
    _, events = local.submit([1, 2, 3], 4000)
    events.get(timeout=WAIT_S)

    local.engine.close()

    while (event := events.get(timeout=WAIT_S)).finish is None:
        pass
    assert event.finish == "error"
    assert not local.engine.alive
    assert local.idle()


def test_a_step_can_be_given_the_time_of_a_larger_model(engines: Engines) -> None:
    slow, fast = engines.make(step_s=0.03), engines.make()
    began_s = time.monotonic()
    answers = slow.generate([[1, 2, 3], [4, 5]], 8)
    assert time.monotonic() - began_s >= 8 * 0.03  # the sequences share their steps
    assert answers == fast.generate([[1, 2, 3], [4, 5]], 8)


def test_a_prompt_takes_the_time_of_what_of_it_is_computed_without_the_processor_s(engines: Engines) -> None:
    """Of the second prompt, which begins like the first, 608 of 640 tokens are cached."""
    slow, fast = engines.make(token_s=0.001, step_tokens=256), engines.make()
    prompt = random_prompt(random.Random(7), 640)
    answers: list[str] = []
    for least_s, asked in ((0.64, prompt), (0.032, prompt[:608] + prompt[:32])):
        began_s, used_s = time.monotonic(), time.process_time()
        answers += slow.generate([asked], 1)
        taken_s = time.monotonic() - began_s
        assert taken_s >= least_s
        assert time.process_time() - used_s < 0.5 * max(0.2, taken_s)
    assert taken_s < 0.32  # the half of what the first one took at least
    assert answers == fast.generate([prompt], 1) + fast.generate([prompt[:608] + prompt[:32]], 1)
