"""Runs the proxy as `kvparams proxy` starts it, except that breakers never open: cases fail the same engines often.

`--plain-asgi` has every answer go through ASGI, as in another server.
"""

import argparse
import sys
from dataclasses import replace

from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.cli.proxy_command import ProxyCommand, load_configuration, run_server
from kvparams_proxy.cli.sidecar_command import SidecarCommand

NEVER = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)


def main() -> int:
    """Serves until told to stop. As a `sidecar` it is beside the first decode engine that is given."""
    words, parser = sys.argv[1:], argparse.ArgumentParser()
    if words[:1] == ["sidecar"]:
        decode = [word for word in words if word.startswith("--decode=")]
        others = [word for word in words[1:] if word not in decode]
        sidecar = SidecarCommand()
        sidecar.add_arguments(parser)
        engine = f"--engine={decode[0].removeprefix('--decode=')}"
        return sidecar.run(parser.parse_args(["--role", "decode", engine, *others]))
    ProxyCommand().add_arguments(parser)
    parser.add_argument("--plain-asgi", action="store_true")
    given = parser.parse_args(words)
    asked = load_configuration("proxy", given)
    if asked is None:
        return 2
    server = replace(asked.server, direct=not given.plain_asgi)
    return run_server("proxy", asked._replace(settings=replace(asked.settings, breaker=NEVER), server=server))


if __name__ == "__main__":
    sys.exit(main())
