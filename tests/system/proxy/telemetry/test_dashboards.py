"""Tests that no panel of the dashboards is empty: a real Prometheus scrapes a proxy and its engines under load."""

import asyncio
import json
import math
import re
import shutil
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from demo.processes import Processes, Server, free_port
from tests.support.waiting import until

FOLDER: Final = Path(__file__).parents[4] / "deploy" / "monitoring"
PANELS: Final = [
    (path.stem, panel)
    for path in sorted((FOLDER / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
]


def configuration(folder: Path, proxy: str, engines: list[str]) -> Path:
    rules: list[str] = []
    for path in sorted((FOLDER / "rules").glob("*.yaml")):
        (folder / path.name).write_text(path.read_text())
        rules.append(str(folder / path.name))
    document = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": rules,
        "scrape_configs": [
            {"job_name": "kvparams-proxy", "static_configs": [{"targets": [proxy.removeprefix("http://")]}]},
            {"job_name": "engines", "static_configs": [{"targets": [one.removeprefix("http://") for one in engines]}]},
        ],
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def start_prometheus(processes: Processes, folder: Path, configuration: Path, *flags: str) -> Server:
    program = shutil.which("prometheus")
    assert program is not None, "there is no prometheus: run tests/install_servers.sh"
    port = free_port()
    return processes.start(
        "prometheus",
        *(program, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *flags),
        port=port,
    )


@asynccontextmanager
async def under_load(proxy: Server) -> AsyncGenerator[Callable[[], None]]:
    """Sends streams and whole requests from four clients, with prompts that have much in common."""

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=30, trust_env=False) as http:
            count = 0
            while True:
                count += 1
                prompt = "What all prompts begin with, and what is therefore cached. " * 20 + f"{number} {count % 3}"
                body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8}
                if count % 2:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    tasks = [asyncio.create_task(client(number)) for number in range(4)]

    def check() -> None:
        """Raises what a client has met."""
        for task in tasks:
            assert not task.done(), task.exception()

    try:
        yield check
        check()
    finally:
        for task in tasks:
            task.cancel()


def concrete(expr: str) -> str:
    return expr.replace("$__rate_interval", "30s").replace("$job", ".*proxy.*")


async def finite(http: httpx.AsyncClient, expr: str) -> bool:
    """Returns whether a query has a result that is a number."""
    answer = (await http.get("/api/v1/query", params={"query": expr})).json()
    assert answer["status"] == "success", (expr, answer)
    result = answer["data"]["result"]
    samples = [one["value"] for one in result] if answer["data"]["resultType"] == "vector" else [result]
    return any(math.isfinite(float(value)) for _, value in samples)


@pytest.mark.slow
async def test_no_panel_is_empty(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    with Processes(logs) as processes:
        store = f"file://{tmp_path}/kv?size=64MiB"
        prefill, decode = processes.engine("p0", "prefill", store), processes.engine("d0", "decode", store)
        flags = ("--policy", "cache_aware", "--tokenizer", "bytes", "--workers", "2", "--log-requests", "off")
        proxy = processes.proxy([prefill], [decode], *flags)
        processes.wait_ready(prefill, decode, proxy, within_s=100.0)
        path = configuration(tmp_path, proxy.url, [prefill.url, decode.url])
        prometheus = start_prometheus(processes, tmp_path, path)
        async with (
            under_load(proxy) as check,
            httpx.AsyncClient(base_url=prometheus.url, timeout=20, trust_env=False) as http,
        ):

            async def is_up() -> bool:
                try:
                    ready = (await http.get("/-/ready")).status_code == 200
                except httpx.TransportError:
                    return False
                return ready and await finite(http, "sum(up) == 3")

            await until(is_up, 60.0, pause_s=0.2)
            empty = [
                (dashboard, panel["title"], concrete(target["expr"]))
                for dashboard, panel in PANELS
                for target in panel["targets"]
            ]
            assert len(empty) > 50

            async def is_full() -> bool:
                nonlocal empty
                check()
                empty = [one for one in empty if not await finite(http, one[2])]
                return not empty

            try:
                await until(is_full, 60.0, pause_s=0.5)
            except TimeoutError:
                pytest.fail("these panels are empty:\n" + "\n".join(map(str, empty)))
            assert not await finite(http, "sum(kvparams_proxy_no_such_metric)"), "the control"
            rules = (await http.get("/api/v1/rules")).json()["data"]["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
            firing = (await http.get("/api/v1/alerts")).json()["data"]["alerts"]
            assert [one["labels"]["alertname"] for one in firing if one["state"] == "firing"] == []
            text = " ".join(target["expr"] for _, panel in PANELS for target in panel["targets"])
            names = set(re.findall(r"kvparams_\w+", text))
            known = set((await http.get("/api/v1/label/__name__/values")).json()["data"])
            may_be_missing = {"kvparams_proxy_leg_failures_total", "kvparams_proxy_handoffs_refused_total"}
            may_be_missing |= {"kvparams_proxy_client_connections_refused_total"}
            assert names - known <= may_be_missing


@pytest.mark.slow
async def test_prometheus_takes_the_exemplars(tmp_path: Path) -> None:
    """They lead from a bucket of a histogram to a trace, also through the metrics of several workers."""
    logs = tmp_path / "logs"
    logs.mkdir()
    trace_id = f"{17:032x}"
    with Processes(logs) as processes:
        store = f"file://{tmp_path}/kv?size=64MiB"
        prefill, decode = processes.engine("p0", "prefill", store), processes.engine("d0", "decode", store)
        flags = ("--trace", "0", "--workers", "2", "--log-requests", "off")
        proxy = processes.proxy([prefill], [decode], *flags)
        processes.wait_ready(prefill, decode, proxy, within_s=100.0)
        path = configuration(tmp_path, proxy.url, [])
        prometheus = start_prometheus(processes, tmp_path, path, "--enable-feature=exemplar-storage")
        async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
            begun_s = time.time()

            async def has_exemplar() -> bool:
                headers = {"traceparent": f"00-{trace_id}-00000000000000aa-01"}
                answer = await http.post(f"{proxy.url}/v1/completions", json={"prompt": "x"}, headers=headers)
                assert answer.status_code == 200, answer.text
                query = {"query": "kvparams_proxy_time_to_first_byte_seconds_bucket", "start": begun_s - 60}
                try:
                    url = f"{prometheus.url}/api/v1/query_exemplars"
                    found = (await http.get(url, params={**query, "end": time.time() + 60})).json()
                except (httpx.TransportError, ValueError):
                    return False
                exemplars = [one for series in found.get("data", []) for one in series["exemplars"]]
                return any(one["labels"] == {"trace_id": trace_id} and float(one["value"]) > 0 for one in exemplars)

            await until(has_exemplar, 60.0, pause_s=0.5)
            plain = (await http.get(f"{proxy.url}/metrics")).text
            assert trace_id not in plain, "only OpenMetrics has exemplars"
