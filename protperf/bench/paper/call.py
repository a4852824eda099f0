"""One call of a function of this package as a process: `python -m protperf.bench.paper.call MODULE FUNCTION ARGUMENTS RESULT`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from protperf.bench.report import plain
from protperf.formats.commit import commit_bytes


def main() -> int:
    """Call the function with the arguments (a JSON object) and write what it returns; return the exit status."""
    module, function, arguments, out = sys.argv[1:]
    try:
        result = getattr(import_module(module), function)(**json.loads(arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    commit_bytes(Path(out), (json.dumps(plain(result), allow_nan=False) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
