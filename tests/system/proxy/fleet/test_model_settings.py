"""Tests a proxy before engines of three models: two with policy, mode or limits of their own, one as for all models."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvparams.cli import main
from kvparams_proxy.checks.fleet_check import check_fleet
from kvparams_proxy.config.fleet_file import FleetFileProvider
from kvparams_proxy.config.settings import DEFAULT_MODES, Settings, default_spec_rules, known_dialects
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.proxy.acting import Actor
from tests.support.proxy.admin_schema import check_answer
from tests.support.proxy.fixtures import Proxy, running
from tests.support.waiting import until

_ADMIN = {"authorization": "Bearer secret"}
_ROLES = {"p": "prefill", "d": "decode", "x": "aggregated"}
_ENGINES = ("load-p0", "load-p1", "load-d0", "lone-p0", "lone-d0", "lone-x0", "usual-p0", "usual-p1", "usual-d0")
"""Model, role and number."""
_MODELS = """\
models:
  load: {policy: least_load}
  lone: {modes: [{use: aggregated}], aggregated-requests: 1}
"""


class ModelActor(Actor):
    """An actor that serves one model."""

    def __init__(self, id: str) -> None:
        self.model, _, kind = id.partition("-")
        super().__init__(_ROLES[kind[0]])

    def page(self, path: str) -> bytes:
        """See `Actor`."""
        return json.dumps({"object": "list", "data": [{"id": self.model}]}).encode()


class Site:
    """The engines, the fleet file that names them, and the proxy."""

    def __init__(self, path: Path, actors: dict[str, ModelActor]) -> None:
        self.path = path
        self.actors = actors
        self.proxy: Proxy

    def write(self, models: str) -> None:
        """Replaces the file by one with this section."""
        entries = [f'  - {{id: {id}, url: "{actor.url}", role: {actor.role}}}' for id, actor in self.actors.items()]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join([models, "defaults: {connector: store}", "instances:", *entries]))
        new.replace(self.path)

    def provider(self) -> FleetFileProvider:
        """Reads the file."""
        return FleetFileProvider(self.path, default_spec_rules(), every_s=0.02)

    def ask(self, model: str | None, **more: Any) -> "asyncio.Task[Any]":
        """Sends a request."""
        body = {"prompt": "Who is there?", "max_tokens": 4} | ({} if model is None else {"model": model}) | more
        return asyncio.ensure_future(self.proxy.client.post("/v1/completions", json=body))

    async def admin(self, path: str, body: object = None) -> Any:
        """Returns an answer of the admin API."""
        method = "GET" if body is None else "POST"
        got = await self.proxy.client.request(method, f"/admin{path}", headers=_ADMIN, json=body)
        check_answer(method, f"/admin{path}", got)
        return got.json()

    async def models(self) -> dict[str, Any]:
        """Returns what the admin API says of each model."""
        return {each["id"]: each for each in (await self.admin("/models"))["data"]}

    async def waiting(self) -> float:
        """Returns how many legs wait for room."""
        return await self.proxy.metric("kvparams_proxy_waiting")


@pytest.fixture
async def site(tmp_path: Path, request: pytest.FixtureRequest, direct: bool) -> AsyncIterator[Site]:
    """Starts everything; a test may have other `models`."""
    actors = {id: ModelActor(id) for id in _ENGINES}
    for actor in actors.values():
        await actor.begin()
    found = Site(tmp_path / "fleet.yaml", actors)
    found.write(getattr(request, "param", _MODELS))
    provider = found.provider()
    document = provider.document
    settings = Settings(
        (),
        providers=(provider,),
        admin_token=Secret("secret"),
        modes=document.modes or DEFAULT_MODES,
        models=document.models,
        model_aliases={"alone": "lone"},
        slow_start_s=0.0,
        probe_interval_s=0.5,
        expose_route=True,
    )
    async with running(settings, direct) as found.proxy:

        async def is_known() -> bool:
            return all(each["models"] for each in (await found.admin("/instances"))["data"])

        await until(is_known)
        yield found
        for actor in actors.values():
            if actor.held is not None:
                actor.held.set()
    for actor in actors.values():
        actor.end()


async def _spread(site: Site, model: str) -> list[int]:
    """The legs of each prefill engine, where the first one answers nothing and four requests come."""
    first, second = (site.actors[f"{model}-p{number}"] for number in range(2))
    first.held = asyncio.Event()
    tasks = [site.ask(model)]
    await until(lambda: first.open == 1)
    for _ in range(3):
        tasks.append(site.ask(model))
        answered = len(tasks)

        def is_placed(answered: int = answered) -> bool:
            return len(first.bodies) + len(second.bodies) == answered and second.open == 0

        await until(is_placed)
    first.held.set()
    assert {got.status_code for got in await asyncio.gather(*tasks)} == {200}
    return [len(first.bodies), len(second.bodies)]


async def test_each_model_has_its_policy_mode_and_limit_at_once(site: Site) -> None:
    assert await _spread(site, "load") == [1, 3]
    assert await _spread(site, "usual") == [2, 2], "the control: everyone in turn"

    for model, headers in (
        ("lone", {"x-kvparams-aggregated"}),
        ("alone", {"x-kvparams-aggregated"}),
        ("load", {"x-kvparams-prefill", "x-kvparams-decode"}),
        ("usual", {"x-kvparams-prefill", "x-kvparams-decode"}),
    ):
        got = await site.ask(model)
        assert got.status_code == 200
        assert {name for name in got.headers if name.startswith("x-kvparams-")} == headers

    for id in ("lone-x0", "load-d0", "usual-d0"):
        site.actors[id].held = asyncio.Event()
    tasks = [site.ask(model) for model in ("lone", "load", "usual") for _ in range(3)]
    await until(lambda: site.actors["load-d0"].open == site.actors["usual-d0"].open == 3)

    async def two_wait() -> bool:
        return await site.waiting() == 2

    await until(two_wait)
    assert site.actors["lone-x0"].open == 1
    for id in ("lone-x0", "load-d0", "usual-d0"):
        site.actors[id].held.set()  # pyright: ignore[reportOptionalMemberAccess]
    assert {got.status_code for got in await asyncio.gather(*tasks)} == {200}


async def test_what_holds_for_a_model_is_shown(site: Site) -> None:
    found = await site.models()
    assert set(found) == {"load", "lone", "usual"}
    seen = {
        name: (each["entry"], each["policy"], [mode["use"] for mode in each["modes"]]) for name, each in found.items()
    }
    assert seen == {
        "load": ("load", "least_load", ["prefill_then_decode"]),
        "lone": ("lone", "round_robin", ["aggregated"]),
        "usual": (None, "round_robin", ["prefill_then_decode"]),
    }
    assert found["lone"]["aliases"] == ["alone"]
    assert found["lone"]["max_requests"]["aggregated"] == 1
    assert "aggregated" not in found["usual"]["max_requests"]
    assert set(found["lone"]["instances"]) == {"lone-p0", "lone-d0", "lone-x0"}
    limits = {each["id"]: each["max_requests"] for each in (await site.admin("/instances"))["data"]}
    assert {id: limit for id, limit in limits.items() if limit is not None} == {"lone-x0": 1}

    explained = {
        model: await site.admin("/explain-route", {"model": model, "prompt": "x"}) for model in ("load", "alone")
    }
    assert (explained["load"]["policy"], explained["load"]["mode"]) == ("least_load", "prefill_then_decode")
    assert (explained["alone"]["policy"], explained["alone"]["mode"]) == ("round_robin", "aggregated")
    assert [each["max_requests"] for each in explained["alone"]["candidates"]] == [1]
    assert [mode["use"] for mode in (await site.admin("/modes"))["modes"]] == ["prefill_then_decode"]
    listed = (await site.proxy.client.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} == {"load", "lone", "usual", "alone"}
    assert {each["id"] for each in listed if each["root"] == "lone"} == {"lone", "alone"}


async def test_limits_and_modes_follow_the_file_and_policies_do_not(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    lone = site.actors["lone-x0"]
    lone.held = asyncio.Event()
    tasks = [site.ask("lone") for _ in range(3)]

    async def two_wait() -> bool:
        return await site.waiting() == 2

    await until(two_wait)
    site.write("models:\n  load: {policy: round_robin}\n  lone: {modes: [{use: aggregated}], aggregated-requests: 3}\n")
    await until(lambda: lone.open == 3)
    assert "changes of `policy` under `models` take effect at the next start" in caplog.text
    assert (await site.models())["load"]["policy"] == "least_load"
    lone.held.set()
    assert {got.status_code for got in await asyncio.gather(*tasks)} == {200}

    site.write("models:\n  load: {modes: [{use: nobody}]}\n")  # it changes nothing

    async def is_refused() -> bool:
        return any(each["refused"] for each in (await site.admin(""))["sources"])

    await until(is_refused)
    assert "x-kvparams-aggregated" in (await site.ask("lone")).headers

    site.write("models: {lone: {modes: [{use: prefill_then_decode}]}}\n")

    async def is_split() -> bool:
        return "x-kvparams-prefill" in (await site.ask("lone")).headers

    await until(is_split)
    site.write("models: {}\n")

    async def is_as_for_all() -> bool:
        return (await site.models())["lone"]["entry"] is None

    await until(is_as_for_all)
    assert (await site.models())["load"]["policy"] == "least_load"


@pytest.mark.parametrize(
    "site", ["modes: [{use: aggregated}]\nmodels: {load: {modes: [{use: prefill_then_decode}]}}"], indirect=True
)
async def test_requests_without_a_model_or_with_an_unknown_one_are_as_for_all(site: Site) -> None:
    assert "x-kvparams-prefill" in (await site.ask("load")).headers
    assert "x-kvparams-aggregated" in (await site.ask(None)).headers
    unknown = await site.ask("nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    ready = (await site.proxy.client.get("/health")).json()
    assert set(ready["roles"]) == {"prefill", "decode", "aggregated"}


async def test_a_model_without_engines_degrades_the_proxy_and_takes_no_other_with_it(site: Site) -> None:
    """The control: where no model's requests can be served, the proxy is unavailable."""

    async def health() -> tuple[int, str, list[str]]:
        got = await site.proxy.client.get("/health")
        return got.status_code, got.json()["status"], got.json().get("missing_roles", [])

    assert await health() == (200, "ok", [])
    site.actors["lone-x0"].end()

    async def is_degraded() -> bool:
        return await health() == (200, "degraded", ["aggregated"])

    await until(is_degraded)
    assert (await site.ask("usual")).status_code == 200
    assert (await site.ask("lone")).status_code == 503
    for actor in site.actors.values():
        if actor.role == "decode":
            actor.end()

    async def is_unavailable() -> bool:
        return await health() == (503, "unavailable", ["decode", "aggregated"])

    await until(is_unavailable)


async def test_a_request_that_fails_over_keeps_what_holds_for_its_model(site: Site) -> None:
    site.actors["load-p0"].fails("500", 1)
    site.actors["load-p1"].fails("500", 1)
    tasks = [site.ask("load") for _ in range(2)]
    assert {got.status_code for got in await asyncio.gather(*tasks)} == {200}
    assert sum(len(site.actors[id].bodies) for id in ("load-p0", "load-p1")) >= 3, "some were tried again"
    assert not site.actors["usual-p0"].bodies


async def test_the_check_names_models_that_nobody_serves(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write(_MODELS + "  loads: {policy: random}\n")
    document = site.provider().document
    settings = Settings((), models=document.models)
    found = [each async for each in check_fleet(document.entries, known_dialects(), UpstreamLimits(), None, settings)]
    said = {each.who: (each.grade, each.message) for each in found if each.who.startswith("models.")}
    assert {who: grade for who, (grade, _) in said.items()} == {
        "models.load": "ok",
        "models.lone": "ok",
        "models.loads": "warning",
    }
    assert "did you mean load?" in said["models.loads"][1]
    await asyncio.to_thread(main, ["proxy", "--config", str(site.path), "--check"])
    printed = capsys.readouterr().out
    assert "models.loads: no engine that answers serves this model" in printed
    assert "models.lone: is served by lone-p0, lone-d0, lone-x0; policy round_robin, modes aggregated, " in printed
