"""Run `protperf score`: parse, read what is small, load the model, score."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from protperf.arguments import check_outputs
from protperf.formats.skipped import SOME_LEFT_OUT, skipped_path
from protperf.formats.streams import check_inputs
from protperf.score.arguments import parse
from protperf.score.output import STDOUT, say, tell
from protperf.score.proteins import score_records
from protperf.score.variants import read_table, score_variants


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    start = time.monotonic()
    options = parse(argv)
    if options.inputs:
        check_inputs(options.inputs)
    from protperf.checkpoint import load_model, model_files

    if options.out != STDOUT:
        read = [*(options.inputs or [options.mutations, options.wild_type]), *model_files(options.checkpoint)]
        also = [skipped_path(options.out)] if options.inputs else []
        check_outputs([Path(options.out), *also], read, force=options.force)
    variants = read_table(options) if options.mutations else None
    from protperf.devices import choose_device

    device = choose_device(options.device, precision=options.precision)
    trained = load_model(options.checkpoint)
    trained.model.to(device)
    say(f"{trained.path} (step {trained.step:,}, {trained.objective.kind}) on {device}")
    if variants is None:
        unit, outcome = "protein", score_records(trained.model, options)
    else:
        unit, outcome = "row", score_variants(trained.model, variants, options)
    place = "<stdout>" if options.out == STDOUT else options.out
    scored = f"{outcome.scored:,} {unit}{'s' * (outcome.scored != 1)} scored"
    seconds = f"{time.monotonic() - start:.1f} seconds"
    tell(f"{place}: {scored}, {outcome.left_out:,} without a score, {seconds}", options.out)
    return SOME_LEFT_OUT if outcome.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
