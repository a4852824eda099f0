"""`python -m protperf` is the command `protperf`."""

import sys

from protperf.cli import main

sys.exit(main())
