"""The model card: what a model is, what it learned from, how good it is, what it is for, and how it is opened.

It tells what the checkpoint, its run and a file of scores say, and nothing else; what they say beyond plain words and numbers
stands in it as code, since readers of Markdown make links even of bare addresses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protperf import __version__
from protperf.attention.features import FEATURE_MAPS, UNPROJECTED
from protperf.checkpoint.facts import RunFacts
from protperf.checkpoint.loading import TrainedModel
from protperf.config import ModelConfig
from protperf.formats import one_line
from protperf.formats.manifest import Manifest
from protperf.formats.scores import AGAINST, MODEL, TRAINING_SPLIT, Scores

_QUESTIONS = {
    "masked": "residues shown as `<mask>`, from both sides",
    "causal": "the next residue, from those before it",
}
_OBJECTIVE_KEYS = {
    "masked": ("kind", "mask_fraction", "shown_as_mask", "shown_as_random", "label_smoothing"),
    "causal": ("kind", "ask_eos", "label_smoothing"),
}
_USES = {
    "masked": "Embeddings of proteins and residues, scores of variants, filling in of masked residues; a start for fine-tuning.",
    "causal": "Embeddings, likelihoods of proteins, generation of sequences; a start for fine-tuning.",
}
_CLASSES = {"masked": "AutoModelForMaskedLM", "causal": "AutoModelForCausalLM"}
_WORDS = re.compile(r"[A-Za-z0-9]+(?:[ _-][A-Za-z0-9]+)*")
"""What no reader of Markdown takes for anything else."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TASKS = {"masked": "fill-mask"}
"""What hubs ask of a model through transformers; there, nothing samples from a causal one."""


@dataclass(frozen=True)
class CardDetails:
    """What only the user knows.

    Attributes:
        name: title of the card; the run's name by default.
        licence: of the weights, as an SPDX identifier; without one the card tells none.
        scores: of `protperf evaluate --json`, on held-out proteins.
    """

    name: str = ""
    licence: str = ""
    scores: Scores = field(default_factory=dict)


def write_card(trained: TrainedModel, facts: RunFacts, details: CardDetails) -> str:
    """Return the text of a card, Markdown with the front matter that model hubs read."""
    config, kind = trained.model.config, trained.objective.kind
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    cost = "exact, quadratic" if config.is_exact_somewhere else "linear"
    parts = [
        _front_matter(kind, details.licence),
        f"# {details.name or (facts.name and _told(facts.name)) or 'A protein language model'}",
        f"A {kind} protein language model with {parameters:,} parameters, trained "
        f"{'in another form' if trained.origin else 'with protperf'} to predict {_QUESTIONS[kind]}. Its attention (`{config.attention}`) is {cost} in the length of a protein.",
        "## Model",
        _table(("property", "value"), _shape(trained)),
        "## Training",
        _training(trained, facts),
        "## Results",
        _results(trained, facts, details.scores),
        "## Intended use",
        _USES[kind],
        "## Limits",
        _limits(trained, facts),
        "## How to load it",
        _loading(kind),
    ]
    if details.licence:
        parts += ["## Licence", f"{details.licence}, as stated by whoever converted the model."]
    return "\n\n".join(parts) + "\n"


def _front_matter(kind: str, licence: str) -> str:
    lines = ["---", "library_name: protperf"]
    lines += [f"pipeline_tag: {_TASKS[kind]}"] if kind in _TASKS else []
    lines += [f"license: {licence}"] if licence else []
    return "\n".join([*lines, "tags:", "- protein", "- performer", "---"])


def _features(config: ModelConfig) -> str:
    return "learned for each head" if config.features == "learned" else config.projection


def _positions(config: ModelConfig) -> str:
    return f"learned, {config.max_positions:,}" if config.positions == "learned" else config.positions


def _shape(trained: TrainedModel) -> Iterable[tuple[str, Any]]:
    config = trained.model.config
    yield "blocks", config.num_layers
    yield "width", config.model_dim
    yield "heads", config.num_heads
    yield "feed-forward", f"{config.feedforward} {config.feedforward_dim} wide"
    if config.attention in FEATURE_MAPS.keys() - UNPROJECTED:
        yield "random features", f"{config.num_features}, {_features(config)}, stored with the weights"
    if config.attention == "rfa" and trained.model.causal:
        yield "gate", "learned for each head" if config.rfa_gate else "none"
    if config.attention == "linformer":
        yield (
            "pooled keys and values",
            f"{config.linformer_rank}; proteins of at most {config.linformer_length - 2:,} residues",
        )
    if config.attention == "reformer":
        yield (
            "hashing",
            f"{config.lsh_rounds} rounds of {config.lsh_buckets} buckets, {config.lsh_window} tokens to a side",
        )
    if config.softmax_layers:
        yield "layers with exact attention", ", ".join(map(str, config.softmax_layers))
    yield "positions", _positions(config)
    yield "queries and keys normalised", "yes" if config.qk_norm else "no"
    yield "vocabulary", f"{len(trained.model.embedding.weight)} tokens, in config.json"
    yield (
        "weights",
        f"float32; the output head is {'the embedding' if config.tied_head else 'a matrix of its own'}",
    )


def _training(trained: TrainedModel, facts: RunFacts) -> str:
    origin = f"Converted by protperf from {_quoted(trained.origin)}; what these weights were trained on, and how, those who made them tell."
    if trained.origin and not trained.step:
        return f"{origin} Not trained since."
    rows: list[tuple[str, Any]] = [("optimizer steps", f"{trained.step:,}")]
    asked = trained.describe()["objective"]
    rows += [(f"objective.{key}", asked[key]) for key in _OBJECTIVE_KEYS[trained.objective.kind]]
    rows.append(("data.attend_across_documents", trained.attend_across_documents))
    for name, value in facts.settings.items():
        section, _, key = name.partition(".")
        rows.append((f"{section}.{_told(key)}", _told(value)))
    parts = [f"{origin} Trained on with protperf:"] if trained.origin else []
    parts += [f"Dataset: SHA-256 digest {_digest(trained.dataset_digest)}."]
    if facts.manifest is not None:
        parts += [_dataset(facts.manifest)]
    return "\n\n".join([*parts, _table(("setting", "value"), rows)])


def _dataset(manifest: Manifest) -> str:
    names = ", ".join(_quoted(entry.name) for entry in manifest.inputs if entry.role == "sequences")
    release = f" (release {_told(manifest.release)})" if manifest.release else ""
    rows = [
        (_told(split), f"{stats.sequences:,}", f"{stats.residues:,}")
        for split, stats in manifest.splits.items()
        if stats.sequences
    ]
    made = f"Made from {names}{release} in windows of {manifest.window:,} tokens."
    return f"{made}\n\n{_table(('split', 'proteins', 'residues'), rows)}"


def _results(trained: TrainedModel, facts: RunFacts, scores: Scores) -> str:
    """Return the numbers of the evaluation if there is one, else those that the run itself measured.

    What was measured on the training split, and what another model got, is not of this model's worth.
    """
    measured = scores or {split: {MODEL: values} for split, values in facts.results.items()}
    measured = {split: predictors for split, predictors in measured.items() if split != TRAINING_SPLIT}
    rows = [
        (
            _told(split),
            "this model" if name == MODEL else _told(name),
            f"{score['perplexity']:.3f}",
            f"{score.get('accuracy', math.nan):.2%}",
        )
        for split, predictors in measured.items()
        for name, score in predictors.items()
        if name != AGAINST
    ]
    if not rows:
        return "None is recorded with this model; `protperf evaluate` measures it beside the floors."
    floors = (
        "n-gram models of the training split, asked the same residues"
        if scores
        else "not recorded here; `protperf evaluate` gives them for the same split"
    )
    own = trained.dataset_digest
    digests = (predictors.get(MODEL, {}).get("dataset_digest", own) for predictors in measured.values())
    others = [digest for digest in digests if digest != own]
    asked = (
        f"of a dataset that is not that of the training (digest {_quoted(str(others[0]))}), so training may have seen them"
        if others
        else "held out from training"
    )
    note = (
        "Perplexity (20 is guessing among the standard amino acids, lower is better) and accuracy, over residues "
        f"{asked}. Floors: {floors}. Numbers on different splits or datasets do not compare."
    )
    return f"{_table(('split', 'predictor', 'perplexity', 'accuracy'), rows)}\n\n{note}"


def _limits(trained: TrainedModel, facts: RunFacts) -> str:
    most = trained.model.max_length
    window = facts.settings.get("data.context_length") or (facts.manifest.window if facts.manifest else 0)
    window = window if type(window) is int else 0
    seen = f"It was trained on windows of {window:,} tokens: l" if window else "L"
    lines = [
        f"{seen}onger proteins than training showed are computed whole, but how well is not known."
        if most is None
        else f"Proteins of more than {most - 2:,} residues are refused: it has learned {most:,} positions.",
        "It knows sequences alone: no structure, no function, no alignment. What it gives is a prediction, not a measurement.",
        "It reflects the proteins that it was trained on, and groups of organisms or families that are rare there less well.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _loading(kind: str) -> str:
    return f"""\
With protperf {__version__} or later:

```bash
protperf embed FOLDER proteins.fasta embeddings.h5
```

```python
import protperf

model = protperf.load("FOLDER")
embedding = next(model.embed(["MKTAYIAKQR"])).mean
```

With transformers (`pip install "protperf[hf]"`); no code is taken from the folder:

```python
import protperf.hf
from transformers import AutoTokenizer, {_CLASSES[kind]}

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {_CLASSES[kind]}.from_pretrained("FOLDER")
logits = model(**tokenizer(["MKTAYIAKQR"], return_tensors="pt")).logits  # (1, 12, 36)
```"""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of what is Markdown already; a cell ends at a bar even within code."""
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\u00a6") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _told(value: Any) -> str:
    """Return what a file says: words and numbers as they are, anything else as code, in which nothing is Markdown, HTML or a link."""
    is_plain = value is None or type(value) in (bool, int, float) or _WORDS.fullmatch(str(value))
    return str(value) if is_plain else _quoted(str(value))


def _quoted(text: str) -> str:
    """Return what a file says as a piece of code, which ends where it ends."""
    return "`" + one_line(text).replace("`", "'") + "`"


def _digest(text: Any) -> str:
    """Return a digest that a file tells, which is 64 hex digits or none."""
    return f"`{text if type(text) is str and _DIGEST.fullmatch(text) else 'unknown'}`"
