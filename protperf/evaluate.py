"""`protperf evaluate`: perplexity and accuracy on held-out windows, beside what counting n-grams and another model get."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protperf.arguments import CHECKPOINT_HELP, add_model_arguments, check_model_arguments, check_outputs
from protperf.figures import COLOURS, FIGURE_SUFFIXES, new_panels, save_figure
from protperf.formats.scores import (
    AGAINST,
    FLOORS,
    MODEL,
    OTHER,
    TRAINING_SPLIT,
    Scores,
    floors_of,
    write_scores,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from protperf.checkpoint import TrainedModel
    from protperf.formats.manifest import Manifest
    from protperf.formats.shards import ShardSet

BY = {"length": "by_length", "residue": "by_residue"}
"""What `--by` takes -> where the numbers stand in the JSON file."""

_DASHES = ((0, (1, 1.5)), (0, (4, 2)), (0, (7, 2, 1, 2)))


def main(argv: list[str] | None = None) -> int:
    """Evaluate a checkpoint and print tables; return the exit status."""
    options = parse(argv)
    from protperf.checkpoint import load_model, model_files

    outputs = [path for path in (options.json, options.figure) if path]
    models = [options.checkpoint, *filter(None, [options.against])]
    check_outputs(outputs, [file for path in models for file in model_files(path)], force=options.force)
    from protperf.devices import choose_device
    from protperf.formats.manifest import check_lengths, read_manifest

    device = choose_device(options.device, precision=options.precision)
    trained = load_model(options.checkpoint)
    against = load_model(options.against) if options.against else None
    manifest = read_manifest(options.data)
    for each in filter(None, (trained, against)):
        each.model.to(device)
        _warn_of_other_data(each, manifest, options.data)
        check_lengths(
            manifest,
            options.data,
            window=manifest.window,
            across=each.attend_across_documents,
            most=each.model.max_length,
        )
    results = evaluate(
        trained,
        options.data,
        splits=options.splits or held_out_splits(manifest, options.data),
        seed=options.seed,
        token_budget=options.toks_per_batch,
        max_windows=options.max_windows,
        against=against,
        precision=options.precision,
    )
    print(f"{trained.path}, step {trained.step:,}, {trained.objective.kind}")
    if against:
        print(f"against: {against.path}, step {against.step:,}, {against.objective.kind}")
    print(format_table(results))
    for group in options.by:
        print(f"\n{format_groups(results, group)}")
    if options.json:
        write_scores(options.json, results)
    if options.figure:
        save_figure(draw_scores(results, title=f"{trained.path}, step {trained.step:,}"), options.figure)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    options = parser.parse_args(argv)
    check_model_arguments(parser, options)
    if options.max_windows < 0:
        parser.error(f"--max-windows {options.max_windows}: must be at least 0")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed {options.seed}: allowed: 0 to {2**32 - 1}")
    if options.figure and options.figure.suffix not in FIGURE_SUFFIXES:
        parser.error(f"--figure {options.figure}: its name must end in {', '.join(FIGURE_SUFFIXES)}")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf evaluate`."""
    parser = argparse.ArgumentParser(
        prog="protperf evaluate",
        usage="protperf evaluate CHECKPOINT DATA [options]",
        description="Perplexity and accuracy of a model on held-out windows. A masked model is asked 15 % of the "
        "residues, all shown as <mask>; a causal one each residue after its left context. Beside them stand the "
        "floors: n-gram models of the training split, asked the same residues.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument("data", type=Path, metavar="DATA", help="the folder that `protperf prepare` wrote")
    parser.add_argument("--splits", nargs="+", metavar="SPLIT", help="splits (all but train)")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKPOINT",
        help="another model with the same objective, asked the same residues",
    )
    parser.add_argument(
        "--by",
        nargs="+",
        choices=list(BY),
        default=[],
        help="also print tables by the length of the protein, or by residue",
    )
    parser.add_argument(
        "--max-windows", type=int, default=0, metavar="N", help="first windows of a split; 0: all (0)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the masks; as in training for equal numbers (0)"
    )
    add_model_arguments(parser, token_budget=8192)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help=f"draw them by length and by residue ({', '.join(FIGURE_SUFFIXES)})",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    return parser


def held_out_splits(manifest: Manifest, dataset_dir: Path) -> list[str]:
    """Return the names of the splits with windows that no model of the dataset was trained on.

    Raises:
        ValueError: there is none.
    """
    names = [name for name, stats in manifest.splits.items() if stats.windows and name != TRAINING_SPLIT]
    if not names:
        raise ValueError(
            f"{dataset_dir}: holds no split but {TRAINING_SPLIT!r}; prepare it with --valid or --test above 0"
        )
    return names


def _warn_of_other_data(trained: TrainedModel, manifest: Manifest, dataset_dir: Path) -> None:
    if manifest.digest != trained.dataset_digest:
        print(
            f"protperf evaluate: {dataset_dir} is not the dataset the model was trained on "
            f"({trained.path}): it may have seen these proteins",
            file=sys.stderr,
        )


def evaluate(
    trained: TrainedModel,
    dataset_dir: Path,
    *,
    splits: list[str],
    seed: int = 0,
    token_budget: int = 8192,
    max_windows: int = 0,
    against: TrainedModel | None = None,
    precision: str = "fp32",
) -> Scores:
    """Score a model and the floors on splits of a dataset.

    Args:
        trained: from `checkpoint.load_model`, on the device to compute on.
        dataset_dir: what `protperf prepare` wrote; its training split gives the floors.
        splits: names.
        seed: of the masks; they depend on (seed, window) alone.
        token_budget: tokens in a batch, at least one window.
        max_windows: at most so many windows of each split; 0 is all.
        against: another model of the same objective, likewise.
        precision: `fp32`, `bf16` or `fp16`.

    Returns:
        split -> `model`, `unigram`, `trigram`, `4-gram`, and `against` -> loss (nats per residue), perplexity, accuracy,
        asked; the same again for each name in `by_length` and `by_residue`; and of models which they are.

    Raises:
        ValueError: the two models are asked different questions, or there is no such split.
    """
    from protperf.formats.manifest import read_manifest
    from protperf.formats.ngrams import NGRAMS_NAME, read_ngrams
    from protperf.formats.shards import ShardSet
    from protperf.inference.evaluation import Answerer, tally_windows
    from protperf.metrics import NgramFloor, length_bins

    models = {MODEL: trained} if against is None else {MODEL: trained, AGAINST: against}
    _check_comparable(trained, against)
    dataset_digest = read_manifest(dataset_dir).digest
    described = {name: _describe(each, dataset_digest) for name, each in models.items()}
    counted = NgramFloor(list(read_ngrams(dataset_dir / NGRAMS_NAME).orders.values()))
    results: Scores = {}
    for split in splits:
        shards = ShardSet(dataset_dir, split)
        count = min(len(shards), max_windows or len(shards))
        tallies = tally_windows(
            {
                name: Answerer(each.model, each.attend_across_documents, precision)
                for name, each in models.items()
            },
            {name: (counted, order) for name, order in FLOORS.items()},
            _read_windows(shards, count=count, rows=max(1, token_budget // shards.window)),
            objective=trained.objective,
            seed=seed,
            bins=length_bins(shards.window),
        )
        names = [MODEL, *FLOORS, *(name for name in models if name != MODEL)]
        results[split] = {
            name: {
                **tallies[name].summary(),
                **described.get(name, {}),
                "by_length": tallies[name].by_length(),
                "by_residue": tallies[name].by_residue(),
            }
            for name in names
        }
    return results


def _check_comparable(trained: TrainedModel, against: TrainedModel | None) -> None:
    if against is not None and against.objective.kind != trained.objective.kind:
        raise ValueError(
            f"{against.path}: its objective is {against.objective.kind}, that of {trained.path} is "
            f"{trained.objective.kind}; they are asked different questions, so their perplexities do not compare: "
            f"give a {trained.objective.kind} model"
        )


def _describe(trained: TrainedModel, dataset_digest: str) -> dict[str, Any]:
    return {
        "checkpoint": str(trained.path),
        "step": trained.step,
        "objective": trained.objective.kind,
        "weights_sha256": trained.weights_digest(),
        "dataset_digest": dataset_digest,
    }


def _read_windows(shards: ShardSet, *, count: int, rows: int) -> Iterator[tuple[range, np.ndarray]]:
    """Yield the numbers of the first `count` windows and their tokens, uint8 `(B, W)`, `rows` at a time."""
    from tqdm import tqdm

    for first in tqdm(range(0, count, rows), desc=shards.split, unit="batch", disable=None):
        numbers = range(first, min(first + rows, count))
        yield numbers, shards.read_many(list(numbers))


def format_table(results: Scores) -> str:
    """Return the numbers as an aligned table: one line for each split and predictor."""
    lines = [f"{'split':<8} {'predictor':<10} {'residues':>12} {'perplexity':>11} {'accuracy':>9}"]
    for split, scores in results.items():
        for name, values in scores.items():
            numbers = f"{values['asked']:>12,} {values['perplexity']:>11.3f} {values['accuracy']:>9.2%}"
            lines.append(f"{split:<8} {name:<10} {numbers}")
    return "\n".join(lines)


def format_groups(results: Scores, by: str) -> str:
    """Return perplexities by group as an aligned table: a line for each split and group, a column for each predictor.

    Args:
        results: from `evaluate`.
        by: a key of `BY`.
    """
    lines: list[str] = []
    for split, scores in results.items():
        models = [name for name in (MODEL, AGAINST) if name in scores]
        head = [f"{'split':<8} {by:<14} {'residues':>12}", *(f"{name:>11}" for name in scores)]
        head += [f"{f'{name} accuracy':>17}" for name in models]
        lines += [" ".join(head)] if not lines else []
        for group, values in scores[MODEL][BY[by]].items():
            cells = [f"{split:<8} {group.replace('_', ' '):<14} {values['asked']:>12,}"]
            cells += [f"{score[BY[by]][group]['perplexity']:>11.3f}" for score in scores.values()]
            cells += [f"{scores[name][BY[by]][group]['accuracy']:>17.2%}" for name in models]
            lines.append(" ".join(cells))
    return "\n".join(lines)


def draw_scores(results: Scores, *, title: str) -> Figure:
    """Draw perplexity by length bin, and perplexity and accuracy by residue: a row of panels for each split.

    Args:
        results: from `evaluate`.
        title: of the figure.
    """
    figure, rows = new_panels(title, rows=len(results), widths=(1.0, 1.5, 1.5), height=3.6)
    for (split, scores), panels in zip(results.items(), rows, strict=True):
        for axes, by, value in zip(
            panels, ("length", "residue", "residue"), ("perplexity", "perplexity", "accuracy"), strict=True
        ):
            _draw_groups(axes, scores, by=by, value=value)
            axes.set_title(f"{split}: {value} by {by}", loc="left", fontsize=10)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _draw_groups(axes: Axes, scores: dict[str, dict[str, Any]], *, by: str, value: str) -> None:
    """Draw one panel: models as lines with points over lengths and as bars over residues, floors as thin lines."""
    groups = [
        group for group in scores[MODEL][BY[by]] if group != OTHER
    ]  # so rare that it would set the scale
    places = np.arange(len(groups))
    heights = {
        name: np.array([score[BY[by]][group][value] for group in groups]) for name, score in scores.items()
    }
    models = [name for name in (MODEL, AGAINST) if name in scores]
    for number, name in enumerate(models):
        if by == "length":
            axes.plot(places, heights[name], color=COLOURS[number], marker="o", label=name, zorder=3)
        else:
            width = 0.8 / len(models)
            shifted = places + (number - (len(models) - 1) / 2) * width
            axes.bar(shifted, heights[name], width, color=COLOURS[number], label=name)
    for name, dashes in zip(floors_of(scores), _DASHES, strict=True):
        if by == "length" or name == "unigram":  # one floor is enough beside 20 bars
            axes.hlines(
                heights[name],
                places - 0.4,
                places + 0.4,
                color="0.1",
                linewidth=1.2,
                linestyle=dashes if by == "length" else "solid",
                label=f"floor: {name}",
                zorder=4,
            )
    labels = [group.removeprefix("up_to_").replace("over_", "> ") for group in groups]
    axes.set_xticks(places, labels, fontsize=8)
    axes.set_xlabel(
        "residues of the protein, at most" if by == "length" else "standard residue (strokes: unigram floor)"
    )
    axes.set_ylabel(value)
    if value == "accuracy":
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.margins(y=0.1)
    if by == "residue":
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    sys.exit(main())
