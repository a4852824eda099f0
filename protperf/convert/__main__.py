"""Run `protperf convert`."""

from __future__ import annotations

import sys

from protperf.convert.program import main

if __name__ == "__main__":
    sys.exit(main())
