"""`protperf evaluate`: perplexity and accuracy on held-out windows, beside what counting n-grams gets."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from protperf.checkpoint import TrainedModel
    from protperf.formats.shards import ShardSet
    from protperf.metrics import NgramFloor

TRAINING_SPLIT = "train"
FLOOR_NAMES = {1: "unigram", 2: "bigram", 3: "trigram", 4: "4-gram"}


class Score(NamedTuple):
    """Sums over asked residues: they add up.

    Attributes:
        nll: negative log-likelihood in nats.
        asked: number of asked residues.
        correct: number of them got right.
    """

    nll: float
    asked: int
    correct: int


def main(argv: list[str] | None = None) -> int:
    """Evaluate a checkpoint and print a table; return the exit status."""
    options = parse(argv)
    if options.json and not options.json.parent.is_dir():
        raise ValueError(
            f"{options.json.parent}: no such folder to write {options.json.name} to; make it first"
        )
    if options.json and options.json.exists() and not options.force:
        raise ValueError(f"{options.json}: exists already; give another name, or --force to replace it")
    from protperf.checkpoint import load_model
    from protperf.devices import choose_device
    from protperf.formats.commit import commit_bytes
    from protperf.formats.manifest import read_manifest

    device = choose_device(options.device)
    trained = load_model(options.checkpoint)
    trained.model.to(device)
    manifest = read_manifest(options.data)
    if manifest.digest != trained.dataset_digest:
        print(
            f"protperf evaluate: {options.data} is not the dataset the model was trained on: "
            "it may have seen these proteins",
            file=sys.stderr,
        )
    held_out = [name for name, stats in manifest.splits.items() if stats.windows and name != TRAINING_SPLIT]
    if not held_out and not options.splits:
        raise ValueError(
            f"{options.data}: holds no split but {TRAINING_SPLIT!r}; prepare it with --valid or --test above 0"
        )
    results = evaluate(
        trained,
        options.data,
        splits=options.splits or held_out,
        seed=options.seed,
        token_budget=options.toks_per_batch,
        max_windows=options.max_windows,
    )
    print(f"{trained.path}, step {trained.step:,}, {trained.objective.kind}")
    print(format_table(results))
    if options.json:
        commit_bytes(options.json, (json.dumps(results, indent=1) + "\n").encode())
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="protperf evaluate",
        description="Perplexity and accuracy of a model on held-out windows. A masked model is asked 15 % of the "
        "residues, all shown as <mask>; a causal one each residue after its left context. Beside them stand the "
        "floors: n-gram models of the training split, asked the same residues.",
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a .ckpt file, or the folder of a run (its best checkpoint)"
    )
    parser.add_argument("data", type=Path, help="the folder that `protperf prepare` wrote")
    parser.add_argument("--splits", nargs="+", metavar="SPLIT", help="splits (all but train)")
    parser.add_argument(
        "--max-windows", type=int, default=0, metavar="N", help="first windows of a split; 0: all (0)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the masks; as in training for equal numbers (0)"
    )
    parser.add_argument(
        "--toks-per-batch",
        "--toks_per_batch",
        type=int,
        default=8192,
        metavar="N",
        help="tokens in a batch (8192)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    options = parser.parse_args(argv)
    if options.max_windows < 0:
        parser.error(f"--max-windows {options.max_windows}: must be at least 0")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed {options.seed}: allowed: 0 to {2**32 - 1}")
    if options.toks_per_batch < 1:
        parser.error(f"--toks-per-batch {options.toks_per_batch}: must be at least 1")
    return options


def evaluate(
    trained: TrainedModel,
    dataset_dir: Path,
    *,
    splits: list[str],
    seed: int = 0,
    token_budget: int = 8192,
    max_windows: int = 0,
) -> dict[str, dict[str, dict[str, float]]]:
    """Score a model and the floors on splits of a dataset.

    Args:
        trained: from `checkpoint.load_model`.
        dataset_dir: what `protperf prepare` wrote; its training split gives the floors.
        splits: names.
        seed: of the masks; they depend on (seed, window) alone.
        token_budget: tokens in a batch, at least one window.
        max_windows: at most so many windows of each split; 0 is all.

    Returns:
        split -> `model`, `unigram`, `trigram`, `4-gram` -> loss (nats per residue), perplexity, accuracy, asked.
    """
    from protperf.formats.ngrams import NGRAMS_NAME, read_ngrams
    from protperf.formats.shards import ShardSet
    from protperf.metrics import NgramFloor, summarise

    floor = NgramFloor(list(read_ngrams(dataset_dir / NGRAMS_NAME).orders.values()))
    results = {}
    for split in splits:
        shards = ShardSet(dataset_dir, split)
        count = min(len(shards), max_windows or len(shards))
        batches = list(
            _score_batches(trained, shards, floor, count=count, seed=seed, token_budget=token_budget)
        )
        totals = {name: add_scores([scores[name] for scores in batches]) for name in batches[0]}
        results[split] = {name: summarise(*total) | {"asked": total.asked} for name, total in totals.items()}
    return results


def add_scores(scores: list[Score]) -> Score:
    """Return the sum of scores."""
    return Score(
        sum(score.nll for score in scores),
        sum(score.asked for score in scores),
        sum(score.correct for score in scores),
    )


def _score_batches(
    trained: TrainedModel, shards: ShardSet, floor: NgramFloor, *, count: int, seed: int, token_budget: int
) -> Iterator[dict[str, Score]]:
    """Yield the scores of model and floors, batch by batch."""
    import torch
    from tqdm import tqdm

    from protperf.batches import Batch
    from protperf.objectives import EVALUATION_EPOCH, NOT_ASKED, answer, ask, question_generator

    causal = trained.objective.kind == "causal"
    rows = max(1, token_budget // shards.window)
    device = next(trained.model.parameters()).device
    for first in tqdm(range(0, count, rows), desc=shards.split, unit="batch", disable=None):
        places = range(first, min(first + rows, count))
        windows = shards.read_many(list(places))
        questions = [
            ask(
                window,
                trained.objective,
                question_generator(seed, epoch=EVALUATION_EPOCH, window=place),
                evaluation=True,
            )
            for place, window in zip(places, windows, strict=True)
        ]
        inputs, targets = (np.stack(part) for part in zip(*questions, strict=True))
        batch = Batch(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        with torch.inference_mode():
            sums = answer(trained.model, batch, across=trained.attend_across_documents)
        scores = {"model": Score(float(sums.nll), int(sums.asked), int(sums.correct))}
        for order in (1, 3, 4):
            parts = [
                Score(*floor.sums(window, np.flatnonzero(target != NOT_ASKED) + causal, order=order))
                for window, target in zip(windows, targets, strict=True)
            ]
            scores[FLOOR_NAMES[order]] = add_scores(parts)
        yield scores


def format_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the numbers as an aligned table: one line for each split and predictor."""
    lines = [f"{'split':<8} {'predictor':<10} {'residues':>12} {'perplexity':>11} {'accuracy':>9}"]
    for split, scores in results.items():
        for name, values in scores.items():
            numbers = f"{values['asked']:>12,} {values['perplexity']:>11.3f} {values['accuracy']:>9.2%}"
            lines.append(f"{split:<8} {name:<10} {numbers}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
