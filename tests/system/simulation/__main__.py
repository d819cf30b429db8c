"""Runs the simulation from the command line, in processes that do nothing else.

python -m tests.system.simulation replay SEED              one seed, with its trace
python -m tests.system.simulation seeds FIRST COUNT STEP   many seeds; their results as one line of JSON
python -m tests.system.simulation traces FIRST COUNT       a digest of each trace: the same in every process
python -m tests.system.simulation mutants PART OF COUNT    every OF-th mutant, each against so many seeds
python -m tests.system.simulation queue PART OF COUNT      the same with those of the queue
"""

import gc
import hashlib
import json
import sys
from collections import Counter

from tests.system.simulation import queue_mutants
from tests.system.simulation.equivalent_mutants import EQUIVALENT
from tests.system.simulation.mutants import mutants, noticed
from tests.system.simulation.replaced import prepare
from tests.system.simulation.world import run

_REPORTED = 5


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _seeds(first: int, count: int, step: int) -> None:
    counts: Counter[str] = Counter()
    bad: list[int] = []
    reports: list[str] = []
    for seed in range(first, first + count, step):
        result = run(seed)
        counts.update(result.counts)
        counts["seeds"] += 1
        if result.wrong:
            bad.append(seed)
            if len(reports) < _REPORTED:
                reports.append(result.report())
    _say(json.dumps({"bad": bad, "reports": reports, "counts": counts}))


def _traces(first: int, count: int) -> None:
    digests: list[str] = []
    for seed in range(first, first + count):
        digests.append(hashlib.sha256(repr(run(seed).trace).encode()).hexdigest())
    _say(json.dumps(digests))


def _mutants(part: int, of: int, count: int) -> None:
    found: dict[str, object] = {}
    for mutant in mutants()[part::of]:
        found[mutant.name] = noticed(mutant, range(count // 20 if mutant.name in EQUIVALENT else count))
    _say(json.dumps(found))


def _queue(part: int, of: int, count: int) -> None:
    wrongs = queue_mutants.WRONGS[part::of]
    _say(json.dumps({wrong.what: queue_mutants.noticed(wrong, range(count)) for wrong in wrongs}))


def _main(arguments: list[str]) -> int:
    prepare()
    gc.freeze()
    numbers = [int(argument) for argument in arguments[1:]]
    if arguments[0] == "replay":
        result = run(numbers[0])
        _say(result.report())
        return 1 if result.wrong else 0
    {"seeds": _seeds, "traces": _traces, "mutants": _mutants, "queue": _queue}[arguments[0]](*numbers)
    return 0


sys.exit(_main(sys.argv[1:]))
