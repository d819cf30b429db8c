"""Creates mutants of the proxy, each with one release taken out, which the simulation must notice.

A release is a call, found by its name, or an assignment that empties a record. New releases in the source become
mutants by themselves. A mutant that no test can notice stands in `EQUIVALENT`, with the reason.
"""

# ruff: noqa: E501  the keys of `EQUIVALENT` are statements, which stay whole

import ast
import importlib
import inspect
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, cast

__all__ = [
    "EQUIVALENT",
    "MODULES",
    "RELEASES",
    "Mutant",
    "check_control",
    "code_in",
    "first_wrong",
    "function_in",
    "in_time",
    "mutants",
    "noticed",
]

MODULES = (
    "kvparams.routing.admission",
    "kvparams.routing.breaker",
    "kvparams.routing.fair_queue",
    "kvparams.routing.request_lifecycle",
    "kvparams.routing.managers.aggregated",
    "kvparams.routing.managers.attempt_state",
    "kvparams.routing.managers.concurrent_legs",
    "kvparams.routing.managers.conditional",
    "kvparams.routing.managers.leg_documents",
    "kvparams.routing.managers.prefill_handoff",
    "kvparams.routing.managers.concurrent_attempt",
    "kvparams.routing.managers.prefill_then_decode",
    "kvparams.routing.retries",
    "kvparams_proxy.server.lifespan",
    "kvparams_proxy.fleet.failure_attribution",
    "kvparams_proxy.fleet.breakers",
    "kvparams_proxy.upstream.connection",
    "kvparams_proxy.upstream.exchange",
    "kvparams_proxy.server.asgi_exchange",
    "kvparams_proxy.requests.body",
    "kvparams_proxy.server.connections",
    "kvparams_proxy.server.direct_path",
    "kvparams_proxy.server.http_parser",
    "kvparams_proxy.server.http_protocol",
    "kvparams_proxy.server.pipelined_input",
    "kvparams_proxy.server.response_writer",
    "kvparams_proxy.fleet.candidates",
    "kvparams_proxy.fleet.dispatcher",
    "kvparams_proxy.requests.downstream",
    "kvparams_proxy.fleet.retired_instances",
    "kvparams_proxy.execution.plan_context",
    "kvparams_proxy.execution.executor",
    "kvparams_proxy.fleet.fleet",
    "kvparams_proxy.fleet.fleet_members",
    "kvparams_proxy.execution.stream_continuation",
    "kvparams_proxy.execution.response_corrector",
    "kvparams_proxy.execution.leg_outcomes",
    "kvparams_proxy.execution.leg_requests",
    "kvparams_proxy.execution.leg_runner",
    "kvparams_proxy.execution.leg_settlement",
    "kvparams_proxy.execution.running_leg",
    "kvparams_proxy.execution.client_response",
    "kvparams_proxy.execution.engine_addresses",
    "kvparams_proxy.execution.response_privacy",
    "kvparams_proxy.server.request_handler",
    "kvparams_proxy.fleet.member",
    "kvparams_proxy.fleet.pair_failures",
    "kvparams_proxy.telemetry.request_log",
    "kvparams_proxy.telemetry.record_dispatcher",
    "kvparams_proxy.telemetry.metrics",
    "kvparams_proxy.upstream.connection_pool",
    "kvparams_proxy.fleet.upstream_pools",
    "kvparams_proxy.fleet.probes",
    "kvparams_proxy.execution.stream_relay",
    "kvparams_proxy.execution.kv_releaser",
    "kvparams_proxy.server.http_server",
    "kvparams_proxy.fleet.slow_start",
    "kvparams_proxy.fleet.leg_queue",
    "kvparams_proxy.event_loop.deadlines",
)
_RESETS = (
    "kvparams.routing.managers.",
    "kvparams_proxy.event_loop.deadlines",
    "kvparams_proxy.execution.",
    "kvparams_proxy.fleet.",
    "kvparams_proxy.upstream.",
)
"""Where what is remembered of a request or an engine is emptied by assignment, too."""
RELEASES = frozenset(
    [
        "abandon_kv",
        "abort",
        "abort_for_shutdown",
        "add_done_callback",
        "callback",
        "cancel",
        "cancel_wait",
        "clear",
        "client_gone",
        "client_ready",
        "close",
        "close_after_response",
        "close_idle",
        "discard",
        "drop",
        "end",
        "end_trial",
        "ended",
        "fail_incomplete_request",
        "fail_incomplete_requests",
        "finish",
        "forget",
        "freed",
        "leave",
        "left",
        "leg_released",
        "mark_resumed",
        "on_done",
        "on_release_end",
        "pop",
        "popleft",
        "push_async_callback",
        "put_back",
        "record_leg_end",
        "record_answer",
        "release",
        "release_abandoned",
        "release_decode",
        "release_instance",
        "release_prefill",
        "released",
        "remove",
        "remove_listener",
        "response_complete",
        "resume",
        "resume_reading",
        "resume_writing",
        "shed",
        "start_release",
        "stop",
    ]
)
"""Names of what gives something back, without underscores before them."""
_CACHE = "only bounds a cache: what was forgotten is made again"
_FAULT = "only where the proxy itself has a fault; nothing that engines and clients do leads there"
_SERVER = "uvicorn ends the task as soon as the answer is complete or the client has left; for servers that do not"
_TURN_LATER = "the end of the connection says the same a turn later"
_ABORTED = "nothing is received behind an abort, and the exchange has let go of its sink"
_LOST = "nothing follows the loss of a connection"
_TRIAL = "the leg has been released, so its trial ends a turn later"
_LIMIT = "a limit of the simulation, not an equivalence: "
_MEETING = "no connector whose engines meet leaves anything to be dropped by a prefill that broke off"
_UNLIMITED = "a limit of the simulation: no request has a time-out of its own"
_FREED = "a limit of the simulation: it is memory that only the collector frees; tests/system/proxy/execution/test_released.py holds it"
_START = "only where the start is cancelled, or nobody waits for it any more"
EQUIVALENT: dict[str, str] = {
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode.legs: state.release_prefill()": f"{_LIMIT}nobody asks "
    "for several answers; tests/unit/kvparams/routing/test_prefill_then_decode.py holds it",
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: release_abandoned(context, speech, prefill, transfer, attempt)": (
        _MEETING
    ),
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode.legs: state.release_decode()": (
        f"{_LIMIT}nobody asks for several answers, as above"
    ),
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode._choose: state.release_decode()": (
        f"{_LIMIT}nobody waits in a group that goes; tests/unit/kvparams/routing/test_unpaired_instances.py holds it"
    ),
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: state.release_prefill()": f"{_LIMIT}as the last",
    "kvparams.routing.managers.attempt_state:AttemptState.release_prefill: self.context.release_instance(self.prefill)": (
        f"{_LIMIT}as the last"
    ),
    "kvparams.routing.managers.attempt_state:AttemptState.release_prefill: self.prefill = None": f"{_LIMIT}as the last",
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: release_abandoned(context, speech, prefill, transfer, attempt) #1": (
        _MEETING
    ),
    "leg_runner:LegRunner.start: context.abandon_kv(gone=False)": f"{_LIMIT}only with a broker prefill may break "
    "off, and decode does it all",
    "leg_settlement:LegSettlement._settle_failure: context.abandon_kv(gone=False)": f"{_LIMIT}only where its client leaves "
    "during the next prefill, two seeds of 100,000; tests/system/proxy/telemetry/test_metrics.py notices it",
    "leg_runner:LegRunner._release_decode: running.abort(wrong)": "what is wrong with an event is found when it is held",
    "kvparams.routing.managers.leg_documents:LegDocuments.leg_changes: self._templates.clear()": _CACHE,
    "candidates:Candidates._find: self._candidates.clear()": _CACHE,
    "dispatcher:Dispatcher._choose: self._candidates.clear()": "no release: it lets a trial be the only one",
    "dispatcher:Dispatcher.released: self._room.record_leg_end()": "it only measures, for Retry-After",
    "kvparams.routing.fair_queue:FairQueue._head: del self._lanes[lane]": "an empty heap is like none, and dropped in time",
    "kvparams.routing.fair_queue:FairQueue._compact: del flow.lanes[lane]": f"{_LIMIT}fewer than 64 give up",
    "lifespan:_open_telemetry: stack.push_async_callback(spans.close)": f"{_LIMIT}there are no traces",
    "lifespan:_open_token_service: stack.callback(tokens.close)": f"{_LIMIT}there is no tokenizer",
    "lifespan:_open_event_consumer: stack.callback(events.close)": f"{_LIMIT}no engine tells of its cache",
    "lifespan:_open_parts: stack.callback(LoopLag(loop, metrics.loop_lag).close)": "it is not made at all without it",
    "lifespan:_open_parts: stack.callback(trimmer.close)": f"{_LIMIT}bodies are too small to be trimmed",
    "http_server:_until_signal: server.stop()": f"{_LIMIT}there are no signals; tests/system/proxy/config/test_shutdown.py holds it",
    "http_server:_until_signal: started.cancel()": f"{_LIMIT}there are no signals, and no start that fails",
    "http_server:ProxyServer.run: listener.close()": "the listener is closed already, unless the start fails",
    "http_server:ProxyServer._serve: accepting.close()": "it is closed already, unless the server itself is cancelled",
    "http_server:ProxyServer._drain: connections.close_idle()": f"{_LIMIT}no connection is idle for more than a moment; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "http_server:ProxyServer.run: connections.fail_incomplete_requests()": f"{_LIMIT}nobody's body is awaited as the proxy stops; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "connections:ClientConnections.fail_incomplete_requests: connection.fail_incomplete_request()": f"{_LIMIT}as the last",
    "http_server:ProxyServer.run: connections.close()": f"{_LIMIT}whatever is left is aborted two seconds later",
    "lifespan:_reload_on_change: task.cancel()": f"{_LIMIT}there is no file of client keys",
    "exchange:UpstreamExchange.half_close: self._retry = False": f"{_LIMIT}it takes a kept connection that is closed just "
    "when a client leaves; tests/system/proxy/upstream/test_connection_pool.py holds it",
    "breakers:Breakers.restarted: self.forget(member)": "a timer that finds nothing to do",
    "direct_path:DirectDownstream.end_body: self.drop()": _FAULT,
    "direct_path:DirectDownstream.refuse: self._body.release()": "its end releases it too; a little later",
    "asgi_exchange:ASGIExchange.refuse: self._transport.abort()": f"{_LIMIT}nobody sends a body that goes wrong behind the "
    "first byte of its answer",
    "asgi_exchange:ASGIExchange.refuse: self.end()": "whoever refuses a request ends its connection next, unless the app has a "
    "fault",
    "asgi_exchange:ASGIExchange.client_slow: self._flow.clear()": f"{_LIMIT}nobody counts what waits in a transport; "
    "tests/system/proxy/server/test_leaving.py holds it",
    "asgi_exchange:ASGIExchange.serve: self._transport.abort()": _FAULT,
    "body:BodyBudget.release: self._freed(size)": f"{_LIMIT}bodies are too small to be trimmed; "
    "tests/system/proxy/requests/test_client_memory.py holds it",
    "connections:ClientConnections.close_idle: connection.shed()": f"{_LIMIT}no connection is idle for more than a moment; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "connections:ClientConnections.close: connection.close()": "whatever is left is aborted two seconds later",
    "connections:ClientConnections._sweep: connection.abort()": f"{_LIMIT}its sockets do not say how TCP stands; "
    "tests/system/proxy/server/test_pipelining.py holds it",
    "pipelined_input:PipelinedInput._account: self._kept_bytes -= more": f"{_LIMIT}no budget is used up; "
    "tests/system/proxy/server/test_pipelining.py holds it",
    "pipelined_input:PipelinedInput.resume_reading: self.transport.resume_reading()": f"{_LIMIT}nobody sends so much ahead; "
    "tests/system/proxy/server/test_leaving.py holds it",
    "asgi_exchange:ASGIExchange.receive: self.owner.resume_reading()": f"{_LIMIT}no body is larger than what is kept of it",
    "pipelined_input:PipelinedInput._go_on: self.resume_reading()": f"{_LIMIT}nobody sends so much ahead, as above",
    "http_protocol:HTTPProtocol.response_complete: self.resume_reading()": f"{_LIMIT}as the last",
    "http_protocol:HTTPProtocol._end: self.resume_reading()": f"{_LIMIT}as the last",
    "connections:ClientConnections._refuse: del self._refused[oldest]": f"{_LIMIT}few are refused at a time; "
    "tests/system/proxy/server/test_client_connections.py holds it",
    "connections:ClientConnections._refuse: oldest.abort()": f"{_LIMIT}as the last",
    "connections:ClientConnections._make_room: self.remove(connection)": f"{_LIMIT}as above, of idle ones; "
    "tests/system/proxy/server/test_client_connections.py holds it",
    "connections:ClientConnections._make_room: connection.shed()": f"{_LIMIT}as the last",
    "http_protocol:HTTPProtocol.shed: self.transport.close()": f"{_LIMIT}as the last",
    "http_protocol:HTTPProtocol._fail: self._end(linger=True)": "the end of the refusal has ended the connection already",
    "connections:ClientConnections.close: task.cancel()": "its connection is aborted next, which ends it",
    "http_protocol:HTTPProtocol.close: self.transport.close()": "whatever is left is aborted two seconds later",
    "direct_path:DirectDownstream.watch: self.client_gone()": _TURN_LATER,
    "direct_path:DirectDownstream.drop: self.client_gone()": _TURN_LATER,
    "downstream:ASGIDownstream.watch: watcher.client_gone()": "it is made and watched in one turn",
    "downstream:ASGIDownstream.close: self._writer.cancel()": _SERVER,
    "downstream:ASGIDownstream.close: self._reader.cancel()": _SERVER,
    "request_handler:ASGIRequestHandler._answer: downstream.close()": _SERVER,
    "request_handler:ASGIRequestHandler._answer: downstream.drop()": "only where the server cancels its tasks",
    "metrics:Metrics.retain_instances: del self._legs_of[id]": "only bounds the memory for names of instances that have left",
    "connection_pool:UpstreamConnectionPool._connect: self.put_back(connection)": "whoever gives up cancels the task",
    "downstream:ASGIDownstream.drop: self._writer.cancel()": "the timer of the connection ends it a minute later",
    "probes:Prober.__aenter__: self._close()": _START,
    "probes:_MemberProbe.end: self._first.cancel()": _START,
    "probes:_MemberProbe._ask: self._first.cancel()": _START,
    "probes:Prober._close: self._probes.clear()": "the prober itself is let go",
    "deadlines:Deadlines._sweep: self.stop(what)": "whatever expires ends, and stops it",
    "slow_start:SlowStart.startup_complete: self._since.clear()": "those who are there at the start are slow for a moment",
    "breakers:Breakers.failed: member.trial = None": _TRIAL,
    "breakers:Breakers.trial_answered: member.trial = None": "the next trial takes its place, and the end of this leg finds "
    "nothing to do",
    "fleet:Fleet.record_failure: self._blame.forget(instance)": f"{_LIMIT}nobody minds that a pair is avoided for longer; "
    "tests/system/proxy/test_failure_attribution.py holds it",
    "pair_failures:PairFailures._record: del self._records[next(iter(self._records))]": _CACHE,
    "pair_failures:PairFailures._record: del records[next(iter(records))]": _CACHE,
    "pair_failures:PairFailures.record_failure: record.trial = False": f"{_LIMIT}as the last; tests/unit/proxy/fleet/test_pair_failures.py holds it",
    "breakers:Breakers.trial_answered: member.breaker.end_trial()": f"{_LIMIT}seen in one of 6,000 seeds",
    "engine_addresses:EngineAddresses._changed: self._pattern = None": f"{_LIMIT}whoever comes was there before, and is hidden still",
    "exchange:UpstreamExchange.finish: self._connection = None": "it is over, or begins anew because that is lost",
    "exchange:UpstreamExchange.finish: self._retry = False": "a new connection is never one that waited",
    "exchange:UpstreamExchange.resume: self._paused = False": f"{_LIMIT}no client is slow before there is a connection",
    "connection:UpstreamConnection._reset: self._keep_alive = False": "it is said anew by each answer that is complete",
    "connection:UpstreamConnection.close: self._exchange = None": _ABORTED,
    "connection:UpstreamConnection.close: self._sink = None": _ABORTED,
    "connection:UpstreamConnection.connection_lost: self._exchange = None": _LOST,
    "connection:UpstreamConnection.connection_lost: self._sink = None": _LOST,
    "connection:UpstreamConnection._go_on: self._later = b''": f"{_LIMIT}no read brings more than is taken in one turn; "
    "tests/system/proxy/execution/test_long_answers.py holds it",
    "connection:UpstreamConnection._go_on: self.transport.resume_reading()": f"{_LIMIT}as the last",
    "connection:UpstreamConnection.connection_lost: del self._parser": f"{_LIMIT}what only the collector frees is not looked "
    "for; tests/system/proxy/execution/test_released.py holds it",
    "connection:UpstreamConnection._end: self._exchange = None": "one that is over hears no more, until the next is there",
    "connection:UpstreamConnection._end: self._sink = None": "what an engine says unasked closes its connection",
    "connection:UpstreamConnection._fail: self._exchange = None": _ABORTED,
    "connection:UpstreamConnection._fail: self._sink = None": _ABORTED,
    "executor:Execution.refused: self._resources.deadlines.stop(self)": f"{_LIMIT}nobody waits then with useless KV; "
    "tests/system/modes/test_group_failover.py holds it",
    "executor:Execution.refused: self._waiting = None": "whoever does not wait may give up again",
    "running_leg:RunningLeg.end: self.relay = None": _FREED,
    "running_leg:RunningLeg.discard: self.exchange = None": _FREED,
    "executor:Execution._finish: self._context.record_answer(self._route)": f"{_LIMIT}it says what decode engines may have "
    "cached; tests/system/modes/test_real_engines.py holds it",
    "kvparams.routing.managers.conditional:Conditional._near: context.release_instance(instance)": f"{_LIMIT}nobody's cache is "
    "known; tests/system/modes/test_choice.py holds it",
    "executor:Execution.resume_plan: failure.__traceback__ = None": f"{_LIMIT}it is memory alone; tests/system/proxy/execution/test_released.py "
    "holds it",
    "running_leg:RunningLeg._cancel_parse: self._parse.cancel()": "it saves work: nobody looks at what is read then",
    "running_leg:RunningLeg._cancel_parse: self._parse = None": _FREED,
    "executor:Execution.on_request_timeout: self._downstream.drop()": _UNLIMITED,
    "executor:Execution._finish: resources.deadlines.stop(self._deadline)": _UNLIMITED,
    "executor:Execution._finish: self._deadline = None": _UNLIMITED,
    "running_leg:RunningLeg.end: self.exchange = None": _FREED,
    "running_leg:RunningLeg.discard: self.relay = None": _FREED,
    "leg_runner:LegRunner.close: self._running = None": _FREED,
    "leg_runner:LegRunner.close: del self._owner": _FREED,
    "executor:Execution.expire: self._waiting = None": f"{_LIMIT}a later time-out has wrong words; no leak",
    "stream_continuation:StreamRecorder._read: self._unread_bytes = 0": "no release: a stream is looked into more often without it",
    "stream_continuation:StreamRecorder.undo_last: del self._answer[answered:]": f"{_LIMIT}no stream breaks twice, once by an event that "
    "is garbled behind good ones; tests/unit/proxy/execution/test_stream_recorder.py holds it",
    "stream_continuation:StreamRecorder.mark_resumed: self._unsaid.clear()": f"{_LIMIT}no stream breaks twice, once behind half a letter",
    "probes:_MemberProbe._placed: self._exchange = None": f"{_LIMIT}engines have no bootstrap servers beside them",
    "probes:_MemberProbe.end: self._bootstrap.close()": f"{_LIMIT}engines have no bootstrap servers beside them",
    "probes:_MemberProbe._over: self._apart_s = 0.0": f"{_LIMIT}nobody minds that probes come later than they should",
    "plan_context:PlanContext.hold_lease: self.kv_claimed = False": f"{_LIMIT}no client leaves just when KV is computed anew; "
    "tests/system/proxy/server/test_leaving.py holds it",
    "stream_relay:StreamRelay._send: self._held.clear()": "nothing is held or looked for in it once the stream has begun",
    "kv_releaser:KVReleaser._tell: self._settled.clear()": f"{_LIMIT}a release that is cut off counts as orphaned; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "kv_releaser:_RunningRelease.ended: self.exchange = None": "the release itself is let go in the same turn",
    "slow_start:SlowStart.close: self._timer = None": "it is closed once, and begins nothing afterwards",
}
"""Mutants that change nothing one could see, and why; or what the simulation cannot see, and why not."""
_LONGEST_S = 5.0
"""Of the processor, for one seed; a mutant may well go round in circles."""


class _TooLong(KeyboardInterrupt):
    """The only kind that neither asyncio nor the proxy holds up."""


class Mutant(NamedTuple):
    """One statement of one function taken out."""

    module: str
    function: str
    statement: str
    number: int
    """Of the mutants in this function with the same statement."""

    @property
    def name(self) -> str:
        """As in `EQUIVALENT`."""
        number = f" #{self.number}" if self.number else ""
        module = self.module
        if module.startswith("kvparams_proxy."):
            module = module.rpartition(".")[2]
        return f"{module}:{self.function}: {self.statement}{number}"


def mutants() -> list[Mutant]:
    """All of them."""
    return [mutant for module in MODULES for mutant in _find(module)]


def noticed(mutant: Mutant, seeds: range) -> tuple[int, str] | None:
    """The first seed in which the mutant is noticed, and how; None if in none. Other modes are not tried."""
    from .scenario import SPLIT

    with _mutated(mutant):
        found = first_wrong(seeds, SPLIT)
    check_control(found, SPLIT)
    return found


def first_wrong(seeds: range, modes: Mapping[str, int]) -> tuple[int, str] | None:
    """Returns the first seed in whose run something is wrong, and what; None if in none."""
    for seed in seeds:
        if wrong := in_time(seed, modes):
            return seed, wrong[0]
    return None


def check_control(found: tuple[int, str] | None, modes: Mapping[str, int]) -> None:
    """Checks that the seed is well without the mutant: otherwise the mutant was not what was noticed.

    Raises:
        AssertionError: it is not.
    """
    if found is not None and (wrong := in_time(found[0], modes)):
        raise AssertionError(f"seed {found[0]} fails without any mutant: {wrong[0]}")


def in_time(seed: int, modes: Mapping[str, int]) -> list[str]:
    """What is wrong in the run of a seed with a mutant, which may well go round in circles."""
    from .world import run

    try:
        with _alarm():
            return run(seed, modes).wrong
    except (Exception, _TooLong) as error:  # noqa: BLE001  it is a mutant
        return [repr(error)]


class _Found(NamedTuple):
    """One release in the source."""

    function: str
    """The outermost one that it is in."""
    statement: ast.stmt
    target: ast.expr | None
    """What it empties, where it is an assignment."""

    @property
    def text(self) -> str:
        """The statement; of an assignment to several things, as if this one were assigned alone."""
        if self.target is None:
            return ast.unparse(self.statement)
        value = next(value for target, value in _assigned(cast("ast.Assign", self.statement)) if target is self.target)
        return f"{ast.unparse(self.target)} = {ast.unparse(value)}"


def _find(module: str) -> Iterator[Mutant]:
    seen: dict[tuple[str, str], int] = {}
    for found in _releases(module, _tree(module)):
        key = found.function, found.text
        number = seen[key] = seen.get(key, -1) + 1
        yield Mutant(module, *key, number)


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _releases(module: str, tree: ast.Module) -> Iterator[_Found]:
    for function, statement in _statements(tree):
        if _is_release(statement):
            yield _Found(function, statement, None)
        elif isinstance(statement, ast.Assign) and module.startswith(_RESETS) and not function.endswith(".__init__"):
            for target, value in _assigned(statement):
                if isinstance(target, ast.Attribute | ast.Subscript) and _is_empty(value):
                    yield _Found(function, statement, target)


def _statements(tree: ast.AST, inside: tuple[str, ...] = (), depth: int = 0) -> Iterator[tuple[str, ast.stmt]]:
    """Every statement of a function, with the outermost function that it is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_function = not isinstance(node, ast.ClassDef)
            path = inside if depth else (*inside, node.name)
            yield from _statements(node, path, depth + 1 if is_function else depth)
            continue
        if depth and isinstance(node, ast.stmt):
            yield ".".join(inside), node
        yield from _statements(node, inside, depth)


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned, one by one."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return not value.value
    if isinstance(value, ast.Call):  # as new
        name = getattr(value.func, "id", "x")
        return not value.args and not value.keywords and (name[0].isupper() or name in ("set", "deque"))
    return (isinstance(value, ast.Tuple | ast.List) and not value.elts) or (
        isinstance(value, ast.Dict) and not value.keys
    )


def _is_release(node: ast.stmt) -> bool:
    if isinstance(node, ast.Delete):
        return True
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Sub) and isinstance(node.target, ast.Attribute | ast.Subscript)
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    if isinstance(node, ast.Assign):  # what is taken out is looked at and stays
        return name == "pop"
    return name.lstrip("_") in RELEASES


class _Remove(ast.NodeTransformer):
    """Takes the statement out, or of an assignment one thing."""

    def __init__(self, found: _Found) -> None:
        self._found = found

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self._found.statement:
            return self.generic_visit(node)
        if isinstance(node, ast.Assign) and self._found.target is None:
            call = cast("Any", node.value)
            if len(call.args) == 2:
                call.func.attr = "get"
            else:
                index = call.args[0] if call.args else ast.Constant(-1)
                node.value = ast.copy_location(ast.Subscript(call.func.value, index, ast.Load()), call)
            return node
        if isinstance(node, ast.Assign) and len(
            kept := [one for one in _assigned(node) if one[0] is not self._found.target]
        ):
            targets, values = [one for one, _ in kept], [one for _, one in kept]
            if isinstance(node.value, ast.Tuple):
                node.targets, node.value = [ast.Tuple(targets, ast.Store())], ast.Tuple(values, ast.Load())
            else:
                node.targets = targets
            return node
        never = ast.If(ast.Constant(False), [cast("ast.stmt", node)], [])  # its names stay known: so closures fit
        return ast.copy_location(never, node)


@contextmanager
def _mutated(mutant: Mutant) -> Generator[None]:
    tree = _tree(mutant.module)
    alike = [
        one for one in _releases(mutant.module, tree) if (one.function, one.text) == (mutant.function, mutant.statement)
    ]
    _Remove(alike[mutant.number]).visit(tree)
    function = function_in(mutant.module, mutant.function)
    compiled = compile(ast.fix_missing_locations(tree), f"<mutant of {mutant.module}>", "exec")
    code = code_in(compiled, mutant.function.split("."))
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def function_in(module: str, path: str) -> FunctionType:
    """That function of a module, `Class.name` where it is a method."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(getattr(found, "__func__", found))


def code_in(code: CodeType, path: list[str]) -> CodeType:
    """Its code, in that of a module."""
    for name in path:
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return code


@contextmanager
def _alarm() -> Generator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
