"""Creates mutants of the proxy, each with one release taken out, which the simulation must notice.

A release is a call, found by its name, or an assignment that empties a record. New releases in the source become
mutants by themselves. One that the simulation cannot notice stands in `equivalent_mutants.py`, with the reason.
"""

import ast
import importlib
import inspect
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, cast

__all__ = [
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
    "kvparams_proxy.server.lifespan_helpers",
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
    "kvparams_proxy.server.asgi_request_handler",
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
        """As in `equivalent_mutants.py`."""
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
