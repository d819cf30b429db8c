"""`python -m kvparams`."""

import sys

from kvparams.cli import main

sys.exit(main())
