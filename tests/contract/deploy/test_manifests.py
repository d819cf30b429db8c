"""Tests the manifests in `deploy/`: they render, are what Kubernetes' schemas allow, and start what exists."""

import argparse
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from kvparams_proxy.cli.proxy_command import ProxyCommand
from kvparams_proxy.cli.sidecar_command import SidecarCommand
from kvparams_proxy.config.discovery_url import parse_discovery_url

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "deploy"
FOLDERS: Final = sorted(
    path.parent.relative_to(DEPLOY / "kubernetes").as_posix()
    for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml")
)
COMMANDS: Final = {"proxy": ProxyCommand(), "sidecar": SidecarCommand()}
VERSIONS: Final = ("1.29", "1.37")
"""Of Kubernetes: an old one, and the newest whose schemas are there."""


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """Returns the objects that `kubectl apply -k` would send."""
    kubectl = shutil.which("kubectl")
    assert kubectl is not None, "kubectl is not installed: make servers"
    command = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def containers(folder: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields each pod's specification and each of its containers."""
    for found in rendered(folder):
        if found["kind"] == "Deployment":
            pod = found["spec"]["template"]["spec"]
            for container in pod["containers"]:
                yield pod, container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_is_what_the_schemas_allow(folder: str, version: str) -> None:
    for found in rendered(folder):
        kubernetes_validate.validate(found, version, strict=True)


def test_the_schemas_notice_a_name_that_does_not_exist() -> None:
    found = yaml.safe_load((DEPLOY / "kubernetes/base/service.yaml").read_text())
    found["spec"]["selektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_our_containers_start_with_options_that_exist(folder: str) -> None:
    for _, container in containers(folder):
        if container["image"].startswith("registry.example/kvparams-proxy"):
            parser = argparse.ArgumentParser()
            COMMANDS[container.get("command", ["proxy"])[-1]].add_arguments(parser)
            given = parser.parse_args(container["args"])
            assert [parse_discovery_url(url) for url in given.discover]


@pytest.mark.parametrize("folder", FOLDERS)
def test_our_containers_have_no_rights_that_they_do_not_need(folder: str) -> None:
    for pod, container in containers(folder):
        if "vllm" in container["image"]:
            continue
        context = pod.get("securityContext", {}) | container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_service_account_may_only_list_and_watch() -> None:
    (role,) = (found for found in rendered("rights") if found["kind"] == "Role")
    for rule in role["rules"]:
        assert set(rule["verbs"]) == {"list", "watch"}
        assert set(rule["resources"]) <= {"pods", "endpointslices", "inferencepools", "inferenceobjectives"}


def test_a_proxy_has_the_time_to_end_that_its_options_ask_for() -> None:
    ((pod, container), *_) = [each for each in containers("base") if each[1]["name"] == "proxy"]
    given = dict(argument.lstrip("-").split("=", 1) for argument in container["args"])
    assert pod["terminationGracePeriodSeconds"] >= int(given["drain-delay"]) + int(given["grace"]) + 5
    assert int(given["drain-delay"]) > 2 * container["readinessProbe"]["periodSeconds"]


def test_the_image_installs_extras_that_exist() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert list(ROOT.glob(name)), name
