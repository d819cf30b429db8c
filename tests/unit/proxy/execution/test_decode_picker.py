"""Tests that a request goes on without its external picker, whatever becomes of the question."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.execution.decode_picker import DecodeQuestion, ExternalDecodePicker
from kvparams_proxy.ext_proc.client import PickerFailed

DECODES = [Instance(f"d{n}", "1", Role.DECODE, f"http://10.0.0.{n}:80", "nixl") for n in (1, 2)]


async def ask(outcome: list[str] | Exception) -> tuple[Instance | None, dict[str, int]]:
    """Returns the choice for a request, and what was counted."""

    async def answer(question: Any) -> list[str]:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close() -> None:
        pass

    def endpoint(instance: Instance) -> str:
        return instance.url.removeprefix("http://")

    client, endpoints = SimpleNamespace(ask=answer, close=close), SimpleNamespace(endpoint=endpoint)
    loop = asyncio.get_running_loop()
    picker = ExternalDecodePicker(loop, client, cast("Any", endpoints))
    answered: asyncio.Future[Instance | None] = loop.create_future()
    picker.ask(DecodeQuestion("/v1/completions", "r1", b"{}", DECODES), answered.set_result)
    chosen = await asyncio.wait_for(answered, 5)
    await picker.close()
    return chosen, {str(name): count for name, count in picker.results.items()}


async def test_the_engine_that_is_named_is_chosen() -> None:
    assert await ask(["10.0.0.9:80", "10.0.0.2:80"]) == (DECODES[1], {"followed": 1})


@pytest.mark.parametrize(
    ("outcome", "result"),
    [
        (["10.0.0.9:80"], "unlisted"),
        (PickerFailed("timeout"), "timeout"),
        (RuntimeError("nobody has foreseen this"), "unreachable"),
    ],
)
async def test_without_an_answer_that_can_be_used_the_choice_is_free(
    outcome: list[str] | Exception, result: str
) -> None:
    assert await ask(outcome) == (None, {result: 1})
