"""Tests the admin API's OpenAPI document: it is served, has every route, and describes answers so that faults show."""

from typing import Any

import httpx
import pytest
from starlette.routing import Route

from kvparams.instances import Role
from kvparams.version import __version__
from kvparams_proxy.config.spec_parsing import RemoteInstanceEntry
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.admin_answers import Answer
from kvparams_proxy.server.admin_api import admin_routes
from kvparams_proxy.server.admin_openapi import openapi_document
from kvparams_proxy.server.admin_operations import ADMIN_OPERATIONS
from tests.support.proxy.admin_schema import admin_document, check_answer
from tests.support.stub_engine import StubEngines

HEADERS = {"authorization": "Bearer secret"}


def urls(stub: StubEngines) -> tuple[list[str], list[str]]:
    prefill, decode = ([one.url for one in stub.engines if one.role == role] for role in (Role.PREFILL, Role.DECODE))
    return prefill, decode


def served_routes() -> set[tuple[str, str]]:
    routes: list[Route] = admin_routes(Secret("secret"))
    return {(method, route.path) for route in routes for method in route.methods or () if method != "HEAD"}


def test_every_route_is_in_the_document_and_no_other() -> None:
    document = admin_document()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert served_routes() | {("GET", "/version")} == described
    assert {(each.method, each.path) for each in ADMIN_OPERATIONS} == served_routes()
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(names)) == len(names)


def test_the_file_is_what_the_models_say() -> None:
    assert openapi_document() == admin_document()
    assert (admin_document()["openapi"], admin_document()["info"]["version"]) == ("3.1.0", __version__)


def test_every_answer_has_a_schema_without_unknown_members() -> None:
    schemas = admin_document()["components"]["schemas"]
    for model in Answer.__subclasses__():
        schema = schemas[model.__name__]
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) == set(model.model_fields), "every member is always there"
        assert schema["description"]


def test_what_may_be_sent_is_what_is_read() -> None:
    schemas = admin_document()["components"]["schemas"]
    for name in ("NewInstance", "InstanceChange"):
        assert schemas[name]["properties"].keys() == set(RemoteInstanceEntry.setting_names())
        assert all(one["description"] for one in schemas[name]["properties"].values())


async def test_the_document_the_index_and_the_version_are_served(stub: StubEngines, proxy: Any) -> None:
    running = await proxy(*urls(stub), admin_token=Secret("secret"))
    refused = await running.client.get("/admin/openapi.json")
    assert refused.status_code == 401
    check_answer("GET", "/admin/openapi.json", refused)
    answer = await running.client.get("/admin/openapi.json", headers=HEADERS)
    assert (answer.headers["content-type"], answer.json()) == ("application/json", admin_document())
    index = await running.client.get("/admin", headers=HEADERS)
    check_answer("GET", "/admin", index)
    assert {(one["method"], one["path"]) for one in index.json()["routes"]} == served_routes()
    version = await running.client.get("/version")
    check_answer("GET", "/version", version)
    assert version.json() == {"version": __version__, "protocol": ["1.0"]}


async def test_every_route_answers_as_described(stub: StubEngines, proxy: Any) -> None:
    running = await proxy(*urls(stub), admin_token=Secret("secret"))
    engine = {"id": "x", "url": "http://127.0.0.1:9", "role": "decode", "group": "g", "labels": {"zone": "1"}}
    modes = {"modes": [{"use": "prefill_then_decode", "when": {"max_tokens": 5}}, {"use": "aggregated"}]}
    calls: list[tuple[str, str, object]] = [
        ("GET", "/admin", None),
        ("GET", "/admin/openapi.json", None),
        ("POST", "/admin/instances", engine),
        ("GET", "/admin/instances", None),
        ("GET", "/admin/instances/{id}", None),
        ("PATCH", "/admin/instances/{id}", {"labels": {}}),
        ("POST", "/admin/instances/{id}/drain", None),
        ("POST", "/admin/instances/{id}/undrain", None),
        ("DELETE", "/admin/instances/{id}", None),
        ("POST", "/admin/instances", engine),
        ("POST", "/admin/groups/{group}/drain", None),
        ("POST", "/admin/groups/{group}/undrain", None),
        ("DELETE", "/admin/groups/{group}", None),
        ("POST", "/admin/explain-route", {"model": "stub", "prompt": "x"}),
        ("PUT", "/admin/modes", modes),
        ("GET", "/admin/modes", None),
        ("GET", "/admin/models", None),
        ("GET", "/admin/requests/{id}", None),
    ]
    body: object = {"model": "stub", "prompt": "x", "max_tokens": 1}
    answer = await running.client.post("/v1/completions", json=body, headers={"x-request-id": "x"})
    assert answer.status_code == 200
    assert {(method, path) for method, path, _ in calls} == served_routes()
    for method, path, body in calls:
        place = path.format(id="x", group="g")
        answer = await running.client.request(method, place, headers=HEADERS, json=body)
        assert answer.is_success, f"{method} {place}: {answer.text}"
        check_answer(method, place, answer)


async def test_a_path_under_admin_that_is_not_served_says_what_is(stub: StubEngines, proxy: Any) -> None:
    running = await proxy(*urls(stub), admin_token=Secret("secret"))
    answer = await running.client.get("/admin/engines", headers=HEADERS)
    assert answer.status_code == 404
    assert "/admin/engines is not served here; GET /admin lists the routes" in answer.json()["error"]["message"]
    closed = await proxy(*urls(stub))
    answer = await closed.client.get("/admin")
    assert answer.status_code == 404
    assert "; --admin-token-file turns /admin on" in answer.json()["error"]["message"]
    assert "admin" not in (await closed.client.get("/administration")).json()["error"]["message"].partition(";")[2]


UNDESCRIBED: list[tuple[str, str, int, dict[str, Any]]] = [
    ("GET", "/admin/engines", 200, {}),
    ("GET", "/admin/instances", 418, {}),
    ("GET", "/version", 200, {"version": "1"}),
    ("GET", "/version", 200, {"version": "1", "protocol": ["1.0"], "more": 1}),
    (
        "GET",
        "/admin/modes",
        200,
        {"object": "modes", "modes": [{"use": "x", "when": {}}]},
    ),
]


@pytest.mark.parametrize(("method", "path", "status", "body"), UNDESCRIBED)
def test_the_check_notices_an_answer_that_is_not_described(
    method: str, path: str, status: int, body: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError):
        check_answer(method, path, httpx.Response(status, json=body))
