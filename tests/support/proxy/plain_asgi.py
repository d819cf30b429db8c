"""Runs `kvparams proxy` without its direct path: every answer goes through ASGI, as in another server."""

import argparse
import sys
from dataclasses import replace

from kvparams_proxy.cli.proxy_command import ProxyCommand, load_configuration, run_server


def main() -> int:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser()
    ProxyCommand().add_arguments(parser)
    asked = load_configuration("proxy", parser.parse_args())
    if asked is None:
        return 2
    return run_server("proxy", asked._replace(server=replace(asked.server, direct=False)))


if __name__ == "__main__":
    sys.exit(main())
