"""Runs the mutants of requirements: `python -m tests.system.requirements [--only 3.1 4.2] [--skip-control]`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.support.kvparams.requirement_binding import bound_tests
from tests.system.requirements.mutation import apply, copy_sources, nodes_of, read_mutants, run_tests


def main() -> int:
    """Prints a line for each mutant, and returns 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.requirements")
    parser.add_argument("--only", nargs="*", default=(), metavar="N.M", help="requirements, or sections such as 3")
    parser.add_argument("--skip-control", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--verbose", action="store_true", help="show the tests' output for what is not caught")
    options = parser.parse_args()
    bound = bound_tests()
    chosen = [one for one in read_mutants() if _is_chosen(one.requirement, options.only)]
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_sources(Path(folder))
        if not options.skip_control:
            control = run_tests(nodes_of([one.requirement for one in chosen], bound), copy)
            if control.outcome != "survived":
                _say(control.output)
                _say("the tests do not pass without a fault")
                return 2
        escaped = 0
        for number, mutant in enumerate(chosen, 1):
            started = time.monotonic()
            with apply(mutant, copy):
                result = run_tests(bound[mutant.requirement], copy)
            taken = time.monotonic() - started
            noticed = result.failed[0] if result.failed else ""
            _say(f"{number}/{len(chosen)} {result.outcome} {taken:.1f} s {mutant.name} {noticed}")
            if result.outcome != "caught":
                escaped += 1
                if options.verbose:
                    _say(result.output[-3000:])
        _say(f"{len(chosen)} mutants, {escaped} not caught")
        return int(escaped > 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _is_chosen(requirement: str, only: tuple[str, ...]) -> bool:
    number = requirement.partition("#")[2]
    return not only or number in only or number.partition(".")[0] in only


if __name__ == "__main__":
    sys.exit(main())
