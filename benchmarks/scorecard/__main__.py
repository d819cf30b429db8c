"""`python -m benchmarks.scorecard`: runs the kit on every proxy that is installed, and writes docs/scorecard.md."""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.scorecard.page import scorecard_page
from benchmarks.scorecard.peers import ROOT, Peer, find_peers
from kvparams_conformance.checks import select_checks
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.proxy_runs import carrier_of, write_signing_keys
from kvparams_conformance.reports.model import make_report
from kvparams_conformance.requirements import load_specification
from kvparams_conformance.runner import run_proxy_checks
from kvparams_conformance.site import Under

_RESULTS: Final = ROOT / "benchmarks" / "scorecard.json"
_PAGE: Final = ROOT / "docs" / "scorecard.md"


def score(peer: Peer) -> dict[str, Any]:
    """Returns the report on one proxy, without paths of this machine."""
    checks = select_checks(proxy_checks(), (peer.profile,), ())
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        keys = write_signing_keys(Path(folder) / "keys.json")
        under = Under(carrier_of(peer.profile), command=peer.command, keys=keys, start_s=60.0)
        results = asyncio.run(run_proxy_checks(checks, under))
    made = make_report(
        "proxy", peer.shown, (peer.profile,), results, load_specification(), time.monotonic() - begun
    ).as_json()
    kept = ("id", "requirement", "verdict", "message", "sends", "expects")
    made["checks"] = [{name: check[name] for name in kept} for check in made["checks"]]
    return {"name": peer.name, "proxy_version": peer.version, "origin": peer.origin, **made}


def main() -> int:
    """Scores every proxy, and writes both files."""
    reports: list[dict[str, Any]] = []
    for peer in find_peers():
        reports.append(score(peer))
        print(f"{peer.name} {peer.version} {peer.profile}: {reports[-1]['counts']}", flush=True)
    _RESULTS.write_text(json.dumps(reports, indent=1) + "\n", "utf-8")
    _PAGE.write_text(scorecard_page(reports), "utf-8")
    print(f"wrote {_PAGE.relative_to(ROOT)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
