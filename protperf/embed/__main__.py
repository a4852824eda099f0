"""Run `protperf embed`."""

from __future__ import annotations

import sys

from protperf.embed.options import parse
from protperf.formats.streams import check_inputs


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse(argv)
    if options.merge:
        from protperf.embed.merging import merge_shards

        return merge_shards(options.out, force=options.force)
    check_inputs(options.inputs)
    from protperf.embed.job import embed

    return embed(options)


if __name__ == "__main__":
    sys.exit(main())
