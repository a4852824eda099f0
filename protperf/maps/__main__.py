"""`protperf maps` by itself: one module a map."""

from __future__ import annotations

import sys
from importlib import import_module

from protperf.maps.arguments import parse


def main(argv: list[str] | None = None) -> int:
    """Draw the map that was named; return the exit status."""
    options = parse(argv)
    module = import_module(f"protperf.maps.{options.map}")
    try:
        status: int = module.run(options)
    except (RuntimeError, MemoryError) as error:
        from protperf.batches import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"{options.device}: out of memory; choose shorter proteins or fewer rows, or --device cpu where there is more"
        ) from error
    return status


if __name__ == "__main__":
    sys.exit(main())
