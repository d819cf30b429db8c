"""The proxy as `kvparams proxy` starts it, with breakers that never open: cases fail the same engines over and over."""

import argparse
import sys
from dataclasses import replace

from kvparams.breaker import BreakerLimits
from kvparams_proxy.command import ProxyCommand, asked_for, start

NEVER = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)


def main() -> int:
    """Serves until told to stop."""
    command, parser = ProxyCommand(), argparse.ArgumentParser()
    command.add_arguments(parser)
    asked = asked_for("proxy", parser.parse_args())
    if asked is None:
        return 2
    return start("proxy", asked._replace(settings=replace(asked.settings, breaker=NEVER)))


if __name__ == "__main__":
    sys.exit(main())
