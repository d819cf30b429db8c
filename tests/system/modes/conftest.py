"""Provides a proxy before two actors of each role, in one mode after another."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvparams import plugins
from kvparams.instances import Role
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.settings import Settings
from tests.support.proxy.acting import Actor
from tests.support.proxy.fixtures import instance, pytest_asyncio_loop_factories, running
from tests.support.proxy.stage import Stage

__all__ = ["pytest_asyncio_loop_factories"]

NEVER = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)
DOCUMENT = Path(plugins.__file__).with_name("routing") / "managers" / "README.md"


@dataclass(frozen=True)
class Way:
    """One mode, as it is tried."""

    mode: str
    dialect: str = "store"
    roles: Sequence[Role] = (Role.PREFILL, Role.DECODE)
    """Whose engines take part, in order."""

    def __str__(self) -> str:
        return f"{self.mode} {self.dialect}"


class ModeStage(Stage):
    """With aggregated engines besides."""

    def __init__(self, proxy: Any, actors: dict[str, list[Actor]]) -> None:
        super().__init__(proxy, actors["prefill"], actors["decode"])
        self.of = actors


StartMode = Callable[..., Awaitable[ModeStage]]


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> type:
    """The mode that the document writes, registered as if it were installed."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(block.splitlines()) < 100
    found: dict[str, Any] = {}
    exec(compile(block, str(DOCUMENT), "exec"), found)
    load = plugins.load_plugin

    def loads(kind: str, name: str) -> object:
        return found["Recompute"] if name == "recompute" else load(kind, name)

    monkeypatch.setattr(plugins, "load_plugin", loads)
    return found["Recompute"]


@pytest.fixture
async def staged(documented: type) -> AsyncIterator[StartMode]:
    """Start one; its breakers never open."""
    async with AsyncExitStack() as stack:

        async def start(
            way: Way, apart: str | None = None, names: Sequence[str | None] = ("g0", "g1"), **changes: Any
        ) -> ModeStage:
            """`apart`: what sets engines apart, a `group` or `compatibility`; `names`: one for each of a role."""
            actors = {role.value: [Actor(role) for _ in names] for role in Role if role is not Role.ENCODE}
            for each in actors.values():
                for actor in each:
                    await actor.begin()
                    stack.callback(actor.end)
            instances = tuple(
                replace(instance(Role(role), actor.url, way.dialect, number), **({apart: name} if apart else {}))
                for role, each in actors.items()
                for number, (name, actor) in enumerate(zip(names, each, strict=True))
            )
            made = Settings(instances, modes=(parse_mode_flag(way.mode),), breaker=NEVER, expose_route=True)
            made = replace(made, **changes)
            return ModeStage(await stack.enter_async_context(running(made, direct=True)), actors)

        yield start
