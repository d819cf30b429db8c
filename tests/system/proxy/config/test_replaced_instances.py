"""Tests that a leg goes to the engine that was chosen, even if its name has passed to another engine meanwhile."""

import asyncio
from contextlib import AsyncExitStack

from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.secret import Secret
from tests.support.proxy.acting import Actor
from tests.support.proxy.stage import StartStage, text_of
from tests.support.waiting import until

TOKEN = "admin-token-of-this-test"


async def test_a_leg_goes_to_the_engine_that_was_chosen_and_not_to_whoever_has_its_name(
    stage: StartStage, stack: AsyncExitStack
) -> None:
    """Room for the answer was taken first; while prefill runs the name is given to a prefill engine."""
    modes = (parse_mode_flag("prefill_then_decode,decode_first=true"),)
    staged = await stage("nixl", engines=1, modes=modes, admin_token=Secret(TOKEN))
    chosen, other = Actor("decode"), Actor("prefill")
    for actor in (chosen, other):
        await actor.begin()
        stack.callback(actor.end)
    admin, headers = staged.running.client, {"authorization": f"Bearer {TOKEN}"}

    async def named(actor: Actor) -> None:
        entry = {"id": "a-name", "role": actor.role, "url": actor.url, "connector": "nixl"}
        got = await admin.post("/admin/instances", headers=headers, json=entry)
        assert got.is_success, got.text

    await named(chosen)
    assert (await admin.post("/admin/instances/decode-0/drain", headers=headers)).is_success
    goes_on = staged.prefill[0].held = asyncio.Event()
    asking = asyncio.create_task(staged.ask())

    async def prefilling() -> bool:
        return bool(staged.prefill[0].open)

    await until(prefilling)
    assert (await admin.delete("/admin/instances/a-name", headers=headers)).is_success
    await named(other)
    goes_on.set()
    assert text_of(await asking, False) == "NOPQRSTU"
    assert (len(chosen.bodies), len(other.bodies)) == (1, 0)
    await until(staged.settled)
