"""`python -m data_prep.bench`."""

import sys

from data_prep.bench import main

if __name__ == "__main__":
    sys.exit(main())
