"""`python -m data_prep` is `protperf prepare`."""

import sys

from data_prep.prepare import main

if __name__ == "__main__":
    sys.exit(main())
