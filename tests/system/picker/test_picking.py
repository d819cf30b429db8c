"""Tests what engines get through Envoy and the picker, and what clients are told."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.gateway import filters
from tests.support.recording_engine import RecordingEngine
from tests.support.waiting import until
from tests.system.picker.conftest import Site, StartSite

LONG = "The quick brown fox jumps over the lazy dog. " * 200
PRIMARY = 'kvparams_picker_served_total{endpoint="primary"}'
FALLBACK = 'kvparams_picker_served_total{endpoint="fallback"}'


def buffered(config: dict[str, Any]) -> None:
    """Has Envoy keep bodies itself."""
    filters(config)[0]["typed_config"]["processing_mode"].update(
        {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"}
    )


def subset(*endpoints: str) -> Any:
    """Returns a change that has Envoy restrict the choice to these endpoints."""

    def change(config: dict[str, Any]) -> None:
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        value = {"x-gateway-destination-endpoint-subset": list(endpoints)}
        metadata = [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]
        named = {"name": "subset", "typed_config": {"@type": kind, "metadata": metadata}}
        filters(config).insert(0, named)

    return change


async def test_the_picked_engine_gets_the_clients_bytes(site: Site) -> None:
    body = json.dumps({"model": "m", "prompt": "é" * 300_000, "max_tokens": 1}, ensure_ascii=False).encode()
    answer = await site.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json", "x-request-id": "abc"}
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "abc"
    (got,) = [each for engine in site.engines for each in engine.requests]
    assert got.body == body
    assert got.headers["x-request-id"] == "abc"
    assert await site.metric(PRIMARY) == 1
    await until(lambda: _is_idle(site))


async def test_a_picture_goes_to_an_engine_that_answers_and_to_no_encode_engine(start_site: StartSite) -> None:
    """Who is picked may be a sidecar, which runs the encode leg."""
    async with RecordingEngine() as encode:
        site = await start_site("--encode", encode.url)

        async def knows_it() -> bool:
            health = await site.client.get(f"{site.picker.url}/health/encode")
            return health.json()["roles"]["encode"]["ready"] == 1

        await until(knows_it)
        content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo"}}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        await site.client.post("/v1/chat/completions", json=body)
        assert [len(each.requests) for each in (*site.engines, encode)] in ([1, 0, 0], [0, 1, 0])
        await until(lambda: _is_idle(site))


async def test_a_prompt_returns_to_the_engine_that_has_its_prefix(site: Site) -> None:
    for number in range(6):
        assert (await site.complete(f"{LONG}{number}")).status_code == 200
    assert sorted(len(engine.requests) for engine in site.engines) == [0, 6]
    # Control: prompts that share nothing are spread.
    for number in range(6):
        assert (await site.complete(f"{number}{LONG}")).status_code == 200
    assert min(len(engine.requests) for engine in site.engines) > 0


async def test_a_client_cannot_say_what_only_a_proxy_may(site: Site) -> None:
    steering = {
        "x-gateway-destination-endpoint": "127.0.0.1:1",
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-kvparams-prefill-partner": "forged",
        "x-data-parallel-rank": "1",
    }
    answer = await site.complete(kv_transfer_params={"do_remote_prefill": True}, headers={**steering, "x-kept": "1"})
    assert answer.status_code == 200
    (got,) = [each for engine in site.engines for each in engine.requests]
    assert "kv_transfer_params" not in json.loads(got.body)
    assert not steering.keys() - {"x-gateway-destination-endpoint"} & got.headers.keys()
    assert got.headers["x-gateway-destination-endpoint"].split(",")[0] in {each.endpoint for each in site.engines}
    assert got.headers["x-kept"] == "1"  # control: other headers pass


async def test_refusals_are_answered_by_the_data_plane(site: Site) -> None:
    unknown = await site.complete(model="nope")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert (await site.client.post("/v1/completions", content=b"{}")).status_code == 415
    assert (await site.client.get("/server_info")).status_code == 404
    assert (await site.client.get("/v1/models")).json()["data"][0]["id"] == "m"
    broken = await site.client.post("/v1/completions", content=b'{"a"', headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    await until(lambda: _is_idle(site))


async def test_bodies_are_bounded(start_site: StartSite) -> None:
    site = await start_site("--max-body-bytes", "100000")
    assert (await site.complete("x" * 200_000)).status_code == 413
    assert (await site.complete("x" * 90_000)).status_code == 200  # control
    assert sum(len(engine.requests) for engine in site.engines) == 1


async def test_the_data_plane_may_keep_bodies_itself(start_site: StartSite) -> None:
    site = await start_site(change=buffered)
    body = json.dumps({"model": "m", "prompt": "y" * 100_000, "max_tokens": 1}).encode()
    answer = await site.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert (await site.complete(kv_transfer_params={"a": 1})).status_code == 200
    first, second = [each for engine in site.engines for each in engine.requests]
    assert body in (first.body, second.body)
    assert b"kv_transfer_params" not in first.body + second.body
    await until(lambda: _is_idle(site))


async def test_bodies_that_are_not_shown_are_refused(start_site: StartSite) -> None:
    def hidden(config: dict[str, Any]) -> None:
        filters(config)[0]["typed_config"]["processing_mode"]["request_body_mode"] = "NONE"

    site = await start_site(change=hidden)
    answer = await site.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "body_not_shown")


async def test_client_keys_and_tenants(start_site: StartSite, tmp_path: Path) -> None:
    made = await asyncio.create_subprocess_exec(
        *("kvparams", "keys", "create", str(tmp_path / "keys.json"), "--tenant", "t1"),
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": str(Path(sys.executable).parent)},
    )
    key = (await made.communicate())[0].decode().split()[-1]
    site = await start_site("--client-keys", str(tmp_path / "keys.json"))
    assert (await site.complete()).status_code == 401
    assert (await site.client.get("/v1/models")).status_code == 401
    answer = await site.complete(headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    (got,) = [each for engine in site.engines for each in engine.requests]
    assert "authorization" not in got.headers
    assert json.loads(got.body)["cache_salt"]


async def test_full_engines_are_a_503_that_says_when_to_ask_again(start_site: StartSite) -> None:
    site = await start_site("--aggregated-requests", "1", "--queue", "1")
    for engine in site.engines:
        engine.go_on.clear()
    running = [asyncio.ensure_future(site.complete(f"{number}{LONG}")) for number in range(3)]
    await until(lambda: sum(engine.running for engine in site.engines) == 2)
    await until(lambda: _waiting(site, 1))
    refused = await site.complete()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    for engine in site.engines:
        engine.go_on.set()
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
    await until(lambda: _is_idle(site))


async def test_requests_of_a_negative_objective_do_not_wait(start_site: StartSite) -> None:
    site = await start_site("--aggregated-requests", "1", "--objective", "batch=-1", "--objective", "chat=5")
    batch, chat = ({"x-gateway-inference-objective": name} for name in ("batch", "chat"))
    assert (await site.complete(headers=batch)).status_code == 200  # control: there is room
    for engine in site.engines:
        engine.go_on.clear()
    running = [asyncio.ensure_future(site.complete(f"{number}{LONG}")) for number in range(3)]
    await until(lambda: sum(engine.running for engine in site.engines) == 2)
    await until(lambda: _waiting(site, 1))
    shed = await site.complete(headers=batch)
    assert (shed.status_code, shed.json()["error"]["code"]) == (429, "shed")
    assert shed.headers["retry-after"]
    first = asyncio.ensure_future(site.complete("chat", headers=chat))
    await until(lambda: _waiting(site, 2))
    for engine in site.engines:
        engine.go_on.set()
    assert [answer.status_code for answer in await asyncio.gather(*running, first)] == [200] * 4
    order = [json.loads(each.body)["prompt"] for engine in site.engines for each in engine.requests]
    assert "chat" in order
    await until(lambda: _is_idle(site))


async def test_a_client_that_leaves_gives_back_its_load(start_site: StartSite) -> None:
    site = await start_site("--aggregated-requests", "1")
    for engine in site.engines:
        engine.go_on.clear()
    running = [asyncio.ensure_future(site.complete(f"{number}{LONG}")) for number in range(3)]
    await until(lambda: sum(engine.running for engine in site.engines) == 2)
    await until(lambda: _waiting(site, 1))
    for each in running:
        each.cancel()
    await until(lambda: _is_idle(site))
    await until(lambda: _waiting(site, 0))
    for engine in site.engines:
        engine.go_on.set()
    assert (await site.complete()).status_code == 200


async def test_without_a_subset_all_engines_are_picked(start_site: StartSite) -> None:
    site = await start_site("--policy", "round_robin")
    for _ in range(4):
        await site.complete()
    assert [len(engine.requests) for engine in site.engines] == [2, 2]


async def test_the_subset_is_kept(start_site: StartSite, engines: Any) -> None:
    site = await start_site("--policy", "round_robin", change=subset(engines[1].endpoint, "127.0.0.1:1"))
    for _ in range(4):
        assert (await site.complete()).status_code == 200
    assert [len(engine.requests) for engine in site.engines] == [0, 4]
    assert await site.metric("kvparams_picker_subsets_total") == 4


async def test_a_subset_without_engines_is_a_503(start_site: StartSite) -> None:
    site = await start_site(change=subset("127.0.0.1:1"))
    answer = await site.complete()
    assert answer.status_code == 503
    assert not any(engine.requests for engine in site.engines)


async def test_a_fallback_answers_for_an_engine_that_has_gone(start_site: StartSite) -> None:
    site = await start_site("--probe", "300")
    assert (await site.complete(LONG)).status_code == 200
    first = next(engine for engine in site.engines if engine.requests)
    await first.close()
    answer = await site.complete(LONG)
    assert answer.status_code == 200
    other = next(engine for engine in site.engines if engine is not first)
    assert len(other.requests) == 1
    assert await site.metric(FALLBACK) == 1
    await until(lambda: _is_idle(site))


async def test_an_engine_that_fails_is_avoided(start_site: StartSite) -> None:
    site = await start_site()
    assert (await site.complete(LONG)).status_code == 200
    first = next(engine for engine in site.engines if engine.requests)
    first.status = 500
    statuses = [(await site.complete(LONG)).status_code for _ in range(12)]
    assert statuses[-1] == 200
    assert 500 in statuses
    assert await site.metric('kvparams_proxy_requests_total{outcome="failed"}') == statuses.count(500)


async def _is_idle(site: Site) -> bool:
    return await site.in_flight() == 0 and await site.metric("kvparams_picker_streams") == 0


async def _waiting(site: Site, count: int) -> bool:
    health = (await site.client.get(f"{site.picker.url}/health")).json()
    return health["roles"]["aggregated"]["waiting"] == count
