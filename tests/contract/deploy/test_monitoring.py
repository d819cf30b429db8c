"""Tests the rules and dashboards in `deploy/monitoring`: they are well formed, and ask for metrics that exist."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / "deploy" / "monitoring"
RULES: Final = FOLDER / "rules"
ALERTS: Final = [
    rule for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
RECORDED: Final = [
    rule for group in yaml.safe_load((RULES / "recording.yaml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARDS: Final = sorted((FOLDER / "dashboards").glob("*.json"))
_NAME: Final = re.compile(r"\b(?:kvparams|vllm|reference_engine|process)[a-z_]*(?::[a-z0-9_]+)*")


def promtool(*argv: str) -> "subprocess.CompletedProcess[str]":
    program = shutil.which("promtool")
    assert program is not None, "there is no promtool: run tests/install_servers.sh"
    return subprocess.run([program, *argv], capture_output=True, text=True, timeout=60)


def queries() -> list[tuple[str, str]]:
    """Every query of a panel, with its dashboard and title."""
    found: list[tuple[str, str]] = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def test_prometheus_accepts_the_rules() -> None:
    done = promtool("check", "rules", str(RULES / "recording.yaml"), str(RULES / "alerts.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def run_tests(folder: Path, change: tuple[str, str] = ("", "")) -> "subprocess.CompletedProcess[str]":
    """Runs the unit tests of the rules, with one piece of text of the rules changed."""
    for path in RULES.glob("*.yaml"):
        (folder / path.name).write_text(path.read_text().replace(*change) if change[0] else path.read_text())
    tests = folder / "alert_tests.yaml"
    tests.write_text(Path(__file__).with_name("alert_tests.yaml").read_text())
    return promtool("test", "rules", str(tests))


def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    done = run_tests(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("change", [("> 0.05", "> 0.5"), ("> 0.05", "> 0.005"), ('=~"failed|midway"', '="ok"')])
def test_a_wrong_rule_is_noticed(tmp_path: Path, change: tuple[str, str]) -> None:
    """The control."""
    assert run_tests(tmp_path, change).returncode != 0


def test_the_dashboards_are_what_the_script_writes() -> None:
    done = subprocess.run([sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_panels_do_not_overlap_and_ask_the_chosen_source() -> None:
    assert len(DASHBOARDS) == 5
    uids = set[str]()
    for path in DASHBOARDS:
        document: dict[str, Any] = json.loads(path.read_text())
        uids.add(document["uid"])
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]]
        assert len(set(places)) == len(places) > 5
        assert {panel["datasource"]["uid"] for panel in document["panels"]} == {"${datasource}"}
        assert {each["name"] for each in document["templating"]["list"]} == {"datasource", "job"}
    assert len(uids) == 5


def test_every_metric_exists() -> None:
    """Those of the proxy are in METRICS.md, which tests hold against the code; recorded ones in the rules."""
    documented = set(re.findall(r"`(kvparams_proxy_[a-z_]+)`", (ROOT / "proxy" / "METRICS.md").read_text()))
    sources = "".join(
        path.read_text()
        for path in (
            ROOT / "connectors/kvparams_connectors/engines/vllm/counters.py",
            ROOT / "connectors/kvparams_connectors/engines/vllm/connector_stats.py",
            ROOT / "connectors/kvparams_connectors/engines/vllm_tier/tier_stats.py",
            ROOT / "examples/reference_engine/metrics.py",
        )
    )
    recorded = {rule["record"] for rule in RECORDED}
    asked = [*(expr for _, expr in queries()), *(rule["expr"] for rule in (*ALERTS, *RECORDED))]
    names = {name for text in asked for name in _NAME.findall(re.sub(r'job=~"[^"]*"', "", text))}
    unknown: list[str] = []
    for name in sorted(names):
        if name.startswith("kvparams_proxy_"):
            known = name in documented or re.sub(r"_(bucket|sum|count)$", "", name) in documented
        elif name.startswith("kvparams:"):
            known = name in recorded
        elif name.startswith("process_"):
            known = True
        else:
            short = re.sub(r"^(vllm:kvparams_tier_|vllm:kvparams_|reference_engine:)", "", name)
            known = short.removesuffix("_total") in sources
        if not known:
            unknown.append(name)
    assert not unknown
    assert len(names) > 40, "or none is looked at"


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    entries = dict(re.findall(r"^### (KVParams\w+)\n\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(entries) == {rule["alert"] for rule in ALERTS}
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        for what in ("symptom", "cause", "command"):
            assert f"| {what} | " in entries[rule["alert"]], rule["alert"]
