"""Writes the Grafana dashboards: `python deploy/monitoring/generate.py`, or `--check` to compare them.

`$job` is the job of the proxies in Prometheus. A metric's own label `instance`, the id of an engine, is
`exported_instance` there. Engines report what they do with stores, so the panels about stores ask all jobs.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["DASHBOARDS", "Dashboard", "Panel", "main"]

_FOLDER: Final = Path(__file__).resolve().parent / "dashboards"
_WIDTH: Final = 12
_HEIGHT: Final = 8


class Panel(NamedTuple):
    """A graph, or a number if `kind` is `stat`."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    """PromQL, and the text of the legend."""
    kind: str = "timeseries"


class Dashboard(NamedTuple):
    """A dashboard and its panels, two in each row."""

    title: str
    panels: Sequence[Panel]


_J: Final = 'job=~"$job"'


def _rate(name: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{{_J}{more}}}[$__rate_interval]))"


def _quantile(share: float, name: str, by: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share:g}, {_rate(f'{name}_bucket', labels)})"


def _gauge(name: str, by: str, more: str = "", how: str = "sum") -> str:
    return f"{how} by ({by}) ({name}{{{_J}{more}}})"


_ENGINE: Final = "role, exported_instance"
_ENGINE_LEGEND: Final = "{{role}} {{exported_instance}}"

DASHBOARDS: Final[Mapping[str, Dashboard]] = {
    "overview": Dashboard(
        "kvparams: overview",
        (
            Panel("Proxies up", "short", [(f"sum(up{{{_J}}})", "up")], "stat"),
            Panel(
                "Engines ready",
                "short",
                [(_gauge("kvparams_proxy_instances", "role", ',state="ready"', "max"), "{{role}}")],
                "stat",
            ),
            Panel("Requests by outcome", "reqps", [(_rate("kvparams_proxy_requests_total", "outcome"), "{{outcome}}")]),
            Panel(
                "Share of requests that fail",
                "percentunit",
                [(f"kvparams:requests_failed:ratio_rate5m{{{_J}}}", "{{job}}")],
            ),
            Panel(
                "Time to first byte",
                "s",
                [
                    (_quantile(share, "kvparams_proxy_time_to_first_byte_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.95, 0.99)
                ],
            ),
            Panel(
                "Time per output token",
                "s",
                [
                    (_quantile(share, "kvparams_proxy_time_per_output_token_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.99)
                ],
            ),
            Panel(
                "Requests now",
                "short",
                [
                    (f"sum(kvparams_proxy_requests_{state}{{{_J}}})", state)
                    for state in ("pending", "prefilling", "decoding")
                ],
            ),
            Panel(
                "Retries and continuations",
                "ops",
                [
                    (_rate("kvparams_proxy_retries_total", "allowed"), "retry, allowed: {{allowed}}"),
                    (_rate("kvparams_proxy_continuations_total", "job"), "continuation"),
                ],
            ),
        ),
    ),
    "engines": Dashboard(
        "kvparams: engines",
        (
            Panel("Ready", "short", [(_gauge("kvparams_proxy_ready", _ENGINE, how="min"), _ENGINE_LEGEND)]),
            Panel(
                "Breakers (0 closed, 1 half open, 2 open)",
                "short",
                [(_gauge("kvparams_proxy_breaker_state", _ENGINE, how="max"), _ENGINE_LEGEND)],
            ),
            Panel("Legs running", "short", [(_gauge("kvparams_proxy_in_flight", _ENGINE), _ENGINE_LEGEND)]),
            Panel(
                "Prompt tokens in flight",
                "short",
                [(_gauge("kvparams_proxy_tokens_in_flight", _ENGINE), _ENGINE_LEGEND)],
            ),
            Panel("Legs ended", "ops", [(_rate("kvparams_proxy_legs_total", _ENGINE), _ENGINE_LEGEND)]),
            Panel(
                "Failures of legs",
                "ops",
                [(f"{_rate('kvparams_proxy_leg_failures_total', 'role, kind')} or vector(0)", "{{role}} {{kind}}")],
            ),
            Panel(
                "Duration of legs, p95",
                "s",
                [(_quantile(0.95, "kvparams_proxy_leg_seconds", "role"), "{{role}}")],
            ),
            Panel(
                "First token of legs, p95",
                "s",
                [(_quantile(0.95, "kvparams_proxy_leg_time_to_first_token_seconds", "role"), "{{role}}")],
            ),
            Panel("Leases (KV not fetched yet)", "short", [(_gauge("kvparams_proxy_leases", _ENGINE), _ENGINE_LEGEND)]),
            Panel("Connections", "short", [(_gauge("kvparams_proxy_engine_connections", _ENGINE), _ENGINE_LEGEND)]),
        ),
    ),
    "routing": Dashboard(
        "kvparams: routing and cache",
        (
            Panel(
                "Prompt tokens found in prefill's cache",
                "percentunit",
                [(f"kvparams:prefill_cached_tokens:ratio_rate5m{{{_J}}}", "{{job}}")],
            ),
            Panel(
                "Cache hits, expected and found",
                "short",
                [
                    (_rate("kvparams_proxy_prefix_cache_queries_total", "job"), "looked up"),
                    (_rate("kvparams_proxy_prefix_cache_predicted_hits_total", "job"), "expected"),
                    (_rate("kvparams_proxy_prefix_cache_hits_total", "job"), "found"),
                ],
            ),
            Panel(
                "Accuracy of expectations",
                "percentunit",
                [(_gauge("kvparams_proxy_prefix_cache_accuracy", "job", how="avg"), "{{job}}")],
            ),
            Panel(
                "Blocks known", "short", [(_gauge("kvparams_proxy_prefix_cache_blocks", "job", how="max"), "{{job}}")]
            ),
            Panel(
                "Prompts by source of token ids",
                "ops",
                [(_rate("kvparams_proxy_prompts_total", "source"), "{{source}}")],
            ),
            Panel(
                "Length of prompts, p50 and p95",
                "short",
                [(_quantile(share, "kvparams_proxy_prompt_tokens"), f"p{share * 100:g}") for share in (0.5, 0.95)],
            ),
            Panel(
                "Time in each state, mean",
                "s",
                [
                    (
                        f"{_rate('kvparams_proxy_state_seconds_sum', 'state')} / "
                        f"{_rate('kvparams_proxy_state_seconds_count', 'state')}",
                        "{{state}}",
                    )
                ],
            ),
            Panel(
                "Legs to suspected engines",
                "ops",
                [(_rate("kvparams_proxy_panic_legs_total", "role"), "{{role}}")],
            ),
            Panel("Pairs apart", "short", [(_gauge("kvparams_proxy_pairs_apart", "job", how="max"), "{{job}}")]),
            Panel(
                "Handoffs refused",
                "ops",
                [(f"{_rate('kvparams_proxy_handoffs_refused_total', 'reason')} or vector(0)", "{{reason}}")],
            ),
        ),
    ),
    "stores": Dashboard(
        "kvparams: stores",
        (
            Panel(
                "Loaded from stores",
                "Bps",
                [("sum by (job, instance) (kvparams:store_loaded_bytes:rate5m)", "{{instance}}")],
            ),
            Panel(
                "Saved to stores",
                "Bps",
                [("sum by (job, instance) (kvparams:store_saved_bytes:rate5m)", "{{instance}}")],
            ),
            Panel(
                "Pages refused",
                "ops",
                [("sum by (reason) (kvparams:store_pages_refused:rate5m) or vector(0)", "{{reason}}")],
            ),
            Panel(
                "Failures of stores",
                "ops",
                [("sum by (code) (kvparams:store_failures:rate5m) or vector(0)", "{{code}}")],
            ),
            Panel(
                "KV that nobody fetched",
                "ops",
                [
                    (_rate("kvparams_proxy_transfers_released_total", "job"), "freed"),
                    (_rate("kvparams_proxy_transfers_orphaned_total", "job"), "left to its lease"),
                ],
            ),
            Panel("Leases", "short", [(_gauge("kvparams_proxy_leases", "role"), "{{role}}")]),
        ),
    ),
    "capacity": Dashboard(
        "kvparams: capacity",
        (
            Panel("Legs that wait", "short", [(_gauge("kvparams_proxy_waiting", "role"), "{{role}}")]),
            Panel("Wait for an engine, p95", "s", [(f"kvparams:queue_seconds:p95_5m{{{_J}}}", "{{role}}")]),
            Panel("Event loop lag, p99", "s", [(f"kvparams:event_loop_lag_seconds:p99_5m{{{_J}}}", "{{instance}}")]),
            Panel("CPU", "percentunit", [(_rate("process_cpu_seconds_total", "instance"), "{{instance}}")]),
            Panel("Memory", "bytes", [(_gauge("process_resident_memory_bytes", "instance"), "{{instance}}")]),
            Panel(
                "Request bodies",
                "bytes",
                [
                    (_gauge("kvparams_proxy_body_bytes", "instance"), "{{instance}}"),
                    (_gauge("kvparams_proxy_body_bytes_limit", "instance"), "limit of {{instance}}"),
                ],
            ),
            Panel(
                "Client connections",
                "short",
                [
                    (_gauge("kvparams_proxy_client_connections", "instance"), "{{instance}}"),
                    (_gauge("kvparams_proxy_client_connections_limit", "instance"), "limit of {{instance}}"),
                ],
            ),
            Panel("Open files", "short", [(_gauge("process_open_fds", "instance"), "{{instance}}")]),
            Panel(
                "Refused for lack of room",
                "ops",
                [
                    (_rate("kvparams_proxy_bodies_refused_total", "instance"), "bodies, {{instance}}"),
                    (
                        f"{_rate('kvparams_proxy_client_connections_refused_total', 'reason')} or vector(0)",
                        "connections: {{reason}}",
                    ),
                ],
            ),
            Panel(
                "Lines of the log dropped",
                "ops",
                [(_rate("kvparams_proxy_log_lines_dropped_total", "instance"), "{{instance}}")],
            ),
        ),
    ),
}
"""By the name of the file."""


def _panel(number: int, panel: Panel) -> dict[str, object]:
    place = {"h": _HEIGHT, "w": _WIDTH, "x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT}
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {
            "datasource": datasource,
            "editorMode": "code",
            "expr": expr,
            "legendFormat": legend,
            "range": True,
            "refId": ref,
        }
        for ref, (expr, legend) in zip("ABCDEF", panel.queries, strict=False)
    ]
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": datasource,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _document(name: str, dashboard: Dashboard) -> dict[str, object]:
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    job = {
        "name": "job",
        "label": "proxies",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(kvparams_proxy_info, job)", "refId": "job"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": f"kvparams-{name}",
        "title": dashboard.title,
        "tags": ["kvparams"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource, job]},
        "links": [{"type": "dashboards", "tags": ["kvparams"], "title": "kvparams", "asDropdown": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def main(arguments: list[str]) -> int:
    """Writes the files, or with `--check` returns 1 if one is out of date."""
    stale: list[str] = []
    for name, dashboard in DASHBOARDS.items():
        path = _FOLDER / f"{name}.json"
        text = json.dumps(_document(name, dashboard), indent=1) + "\n"
        if "--check" not in arguments:
            path.write_text(text, "utf-8")
        elif not path.is_file() or path.read_text("utf-8") != text:
            stale.append(path.name)
    if stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run python deploy/monitoring/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
