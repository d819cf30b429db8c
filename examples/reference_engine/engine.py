"""The engine's loop: continuous batching in one thread.

Each step takes one token of every sequence that is decoding and, within a budget, the next pieces of prompts. A
sequence gets all the blocks it can ever need when it is admitted, so that nothing is ever preempted, and gives them
back exactly once, in `_end`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_engine.cache import BlockPool, PagedCache, chain
from reference_engine.metrics import Metrics
from reference_engine.model import Model, Span
from reference_engine.sampling import choose
from reference_engine.sequence import Event, Sequence

__all__ = ["Engine", "EngineSettings"]

_POLL_S = 0.0005
"""How often jobs are looked at when there is nothing to compute meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of an engine.

    Raises:
        ValueError: the longest request does not fit into the blocks: it would wait for ever.
    """

    blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    """Prompt and answer together, in tokens."""
    max_sequences: int = 64
    """Sequences that are computed at the same time; more wait."""
    step_tokens: int = 512
    """Tokens computed in one step; longer prompts take several."""
    step_s: float = 0.0
    """A step takes at least so long, as with a larger model: streams last, and the machine stays free for others."""
    token_s: float = 0.0
    """... and so much longer for each token that it computes: long prompts take their time without the processor's."""

    def __post_init__(self) -> None:
        if self.max_model_len > self.blocks * self.block_size:
            raise ValueError(
                f"{self.blocks} blocks of {self.block_size} tokens cannot hold {self.max_model_len} tokens"
            )


class Engine:
    """Owns the cache and the thread. `submit` and `abort` may be called from any thread."""

    def __init__(self, model: Model, cache: PagedCache, settings: EngineSettings, metrics: Metrics) -> None:
        self._model, self._cache, self._settings, self._metrics = model, cache, settings, metrics
        self._pool = BlockPool(settings.blocks)
        self._wake = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._leaving: list[Sequence] = []
        self._closing = False
        self._waiting: deque[Sequence] = deque()
        self._loading: list[Sequence] = []
        self._running: list[Sequence] = []
        self._saving: list[Sequence] = []
        self._present: set[Sequence] = set()
        self._outbox: list[Event] = []
        self._post: Callable[[list[Event]], None] = _deliver
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        metrics.watch(
            in_flight=lambda: len(self._present),
            waiting=lambda: len(self._waiting) + len(self._inbox),
            blocks_in_use=lambda: self._pool.in_use,
            blocks_cached=lambda: self._pool.cached,
        )

    @property
    def alive(self) -> bool:
        """Returns True while the loop runs."""
        return self._thread.is_alive() and not self._closing

    def start(self, post: Callable[[list[Event]], None]) -> None:
        """Start the loop; `post` is called in its thread with the events of each step."""
        self._post = post
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its events go to `sequence.deliver`, the last one with `finish` set."""
        with self._wake:
            self._present.add(sequence)
            self._inbox.append(sequence)
            self._wake.notify()

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; no further events. Nothing happens when it has ended already."""
        with self._wake:
            self._leaving.append(sequence)
            self._wake.notify()

    def close(self) -> None:
        """End the loop after the step that is being computed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        # A tenth of a millisecond of matrices gains nothing from a second thread, and one thread is one order of sums.
        torch.set_num_threads(1)
        try:
            while not self._closing:
                self._take_in()
                self._poll_loads()
                self._poll_saves()
                self._admit()
                self._step()
                self._flush()
        finally:  # also when a step raised: nobody may be left waiting for an answer
            self._closing = True
            for sequence in list(self._present):
                self._end(sequence, Event(sequence, "", None, "error", "the engine has stopped"))
            self._flush()

    def _take_in(self) -> None:
        with self._wake:
            polling = bool(self._loading or self._saving)
            if not (self._inbox or self._leaving or self._running or self._closing or (self._waiting and not polling)):
                self._wake.wait(_POLL_S if polling else None)
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence not in self._present:
                continue
            sequence.aborted = True
            if sequence not in self._loading:  # else its blocks are still being written to: `_poll_loads` ends it
                self._end(sequence, None)

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._loading) < self._settings.max_sequences:
            sequence = self._waiting[0]
            size, prompt = self._settings.block_size, sequence.prompt
            # The last prompt token is always computed: its logits choose the first token of the answer.
            names = chain(sequence.cache_root, prompt[: len(prompt) - 1], size)
            needed = -(-(len(prompt) + sequence.limits.max_tokens) // size)
            allocated = self._pool.allocate(names, needed)
            if allocated is None:
                return  # in order of arrival: a long request is not overtaken for ever
            self._waiting.popleft()
            sequence.blocks, held = allocated
            sequence.names = names[:held]
            sequence.computed = sequence.cached_tokens = held * size
            self._metrics.prompt_tokens.labels("local_cache").inc(held * size)
            if sequence.kv is None:
                self._running.append(sequence)
            else:
                sequence.kv.begin(sequence.blocks, sequence.computed)
                self._loading.append(sequence)

    def _poll_loads(self) -> None:
        for sequence in self._loading:
            if sequence.aborted and sequence.kv is not None:
                sequence.kv.meet_nobody()
        for sequence in [waiting for waiting in self._loading if waiting.kv is not None and waiting.kv.loaded()]:
            self._loading.remove(sequence)
            assert sequence.kv is not None
            if sequence.aborted:
                self._end(sequence, None)
                continue
            if sequence.kv.failure is not None:
                self._end(sequence, Event(sequence, "", None, "error", sequence.kv.failure))
                continue
            self._metrics.prompt_tokens.labels("external_kv").inc(sequence.kv.loaded_to - sequence.computed)
            sequence.computed = sequence.cached_tokens = sequence.kv.loaded_to
            self._running.append(sequence)

    def _poll_saves(self) -> None:
        for sequence in [done for done in self._saving if done.kv is not None and done.kv.saved()]:
            self._saving.remove(sequence)
            self._end(sequence, sequence.last)

    def _step(self) -> None:
        budget = self._settings.step_tokens
        chosen: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running, key=lambda one: len(one.tokens) - one.computed > 1):
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count > 0:
                chosen.append((sequence, count))
                budget -= count
        if not chosen:
            return
        computed = self._settings.step_tokens - budget
        until_s = time.monotonic() + self._settings.step_s + self._settings.token_s * computed
        spans = [
            Span(
                tokens=sequence.tokens[sequence.computed : sequence.computed + count],
                start=sequence.computed,
                blocks=sequence.blocks,
                want_logits=sequence.computed + count == len(sequence.tokens),
            )
            for sequence, count in chosen
        ]
        logits = iter(self._model.forward(spans, self._cache).numpy())
        for (sequence, count), span in zip(chosen, spans, strict=True):
            prompt_tokens = min(count, max(len(sequence.prompt) - sequence.computed, 0))
            self._metrics.prompt_tokens.labels("computed").inc(prompt_tokens)
            sequence.computed += count
            self._share(sequence)
            if span.want_logits:
                choice = choose(
                    next(logits), sequence.sampling, sequence.tokens, len(sequence.prompt), sequence.allowed()
                )
                self._metrics.generated_tokens.inc()
                self._advance(sequence, sequence.append(choice))
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _advance(self, sequence: Sequence, event: Event) -> None:
        if event.finish is None:
            self._outbox.append(event)
        elif sequence.kv is not None and not sequence.kv.saved():
            sequence.last = event
            self._running.remove(sequence)
            self._saving.append(sequence)
        else:
            self._end(sequence, event)

    def _share(self, sequence: Sequence) -> None:
        """Let others use what is computed: full blocks in this process, full pages through the store."""
        size, known = self._settings.block_size, len(sequence.names)
        full = sequence.computed // size
        if full > known:
            root = sequence.names[-1] if known else sequence.cache_root
            sequence.names += chain(root, sequence.tokens[known * size : full * size], size)
            for block, name in zip(sequence.blocks[known:full], sequence.names[known:full], strict=True):
                self._pool.name(block, name)
        if sequence.kv is not None:
            sequence.kv.advance(sequence.tokens, sequence.computed)

    def _end(self, sequence: Sequence, event: Event | None) -> None:
        for place in (self._waiting, self._loading, self._running, self._saving):
            if sequence in place:
                place.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.ended = True
        with self._wake:
            self._present.discard(sequence)
        self._metrics.requests.labels("abort" if event is None else event.finish or "error").inc()
        if event is not None:
            self._outbox.append(event)

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._post(events)


def _deliver(events: list[Event]) -> None:
    for event in events:
        event.sequence.deliver(event)
