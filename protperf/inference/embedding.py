"""Hidden states of proteins: one row a residue, whole proteins or stitched windows, and what is pooled from them.

Axis letters: `L` residues of a protein, `D` model width, `V` vocabulary, `W` window in residues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from protperf.inference.passes import DEFAULT_TOKENS, ask_model, frame
from protperf.model import ProteinModel


@dataclass(frozen=True, eq=False)
class ProteinEmbedding:
    """What a model makes of one protein; `<bos>` and `<eos>` have no row.

    Attributes:
        layers: layer -> hidden state of each residue, float32 `(L, D)`.
        bos: layer -> hidden state of `<bos>`, float32 `(D,)`.
        logits: scores of all tokens at each residue, float32 `(L, V)`, or `None` where they were not asked. Row i of a
            masked model is what it says at residue i; of a causal one what it expects there after the residues before.
    """

    layers: dict[int, np.ndarray]
    bos: dict[int, np.ndarray]
    logits: np.ndarray | None = None

    @property
    def residues(self) -> np.ndarray:
        """Hidden states of the last layer that was asked, `(L, D)`."""
        return self.layers[max(self.layers)]

    @property
    def mean(self) -> np.ndarray:
        """The mean of `residues`, float32 `(D,)`."""
        return self.pooled("mean", max(self.layers))

    def pooled(self, pool: str, layer: int) -> np.ndarray:
        """Return one vector for the protein, float32 `(D,)`.

        Args:
            pool: `mean` or `max` over residues alone (a `<mask>` stands for one), or `cls`, the state of `<bos>`.
            layer: one of `layers`.
        """
        if pool == "cls":
            return self.bos[layer]
        states = self.layers[layer]
        return states.max(0) if pool == "max" else states.mean(0, dtype=np.float64).astype(np.float32)


def embed_proteins(
    model: ProteinModel,
    proteins: Sequence[np.ndarray],
    *,
    layers: Sequence[int] = (-1,),
    logits: bool = False,
    window: int = 0,
    token_budget: int = DEFAULT_TOKENS,
    precision: str = "fp32",
) -> list[ProteinEmbedding | None]:
    """Embed proteins, each shown whole as `<bos> residues <eos>` and unseen by the others.

    Args:
        model: in evaluation mode, on the device to compute on.
        proteins: residue tokens, uint8 `(L,)` each, L at least 1.
        layers: 0 is what enters the first block, -1 the last, after the final norm (see `ProteinModel.states`).
        logits: whether to keep the scores of all tokens too.
        window: cut proteins of more residues into windows of so many and stitch their states (see `cut_windows`); 0
            shows every protein whole.
        token_budget: tokens in a forward pass; a longer protein has one of its own.
        precision: `fp32`, `bf16` or `fp16`.

    Returns:
        `None` in place of a protein that does not fit into memory even alone.

    Raises:
        ValueError: the model has no such layer.
    """
    wanted = resolve_layers(layers, model.config.num_layers)
    asked = sorted({*wanted, model.config.num_layers} if logits else {*wanted})
    cuts = [cut_windows(len(protein), window) for protein in proteins]
    shown = [frame(protein)[cut.shown] for protein, own in zip(proteins, cuts, strict=True) for cut in own]

    def take(place: int, states: list[Tensor]) -> _Rows:
        scores = model.logits(states[-1]).float().cpu().numpy() if logits else None
        kept = zip(asked, states, strict=True)
        return _Rows({layer: x.cpu().numpy().copy() for layer, x in kept if layer in wanted}, scores)

    answers = iter(
        ask_model(model, shown, take, layers=asked, token_budget=token_budget, precision=precision)
    )
    return [_join(own, [next(answers) for _ in own], causal=model.causal) for own in cuts]


def resolve_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return layers as counted from 0, in the order given, each once; -1 is the last.

    >>> resolve_layers([-1, 0, 4], 4)
    (4, 0)

    Raises:
        ValueError: there is no such layer.
    """
    if not layers:
        raise ValueError("no layer is asked for; give one or more, such as -1, the last")
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ValueError(
                f"layer {layer}: the model has the layers 0 (what enters the first block) to {num_layers}; "
                f"-1 is the last, {-num_layers - 1} the first"
            )
    return tuple(dict.fromkeys(layer % (num_layers + 1) for layer in layers))


class Cut(NamedTuple):
    """A part of a protein that is shown at once.

    Attributes:
        residues: its residues.
        shown: its place in the framed protein: with `<bos>` or `<eos>` only where the protein begins or ends.
    """

    residues: slice
    shown: slice


def cut_windows(num_residues: int, window: int) -> list[Cut]:
    """Cut a protein into windows that overlap by half; one that fits, or a window of 0, is left whole.

    The last window ends with the protein and is as long as the others.

    >>> [(cut.residues.start, cut.residues.stop) for cut in cut_windows(10, 4)]
    [(0, 4), (2, 6), (4, 8), (6, 10)]

    Args:
        num_residues: L.
        window: W, at least 2, or 0.
    """
    if not window or num_residues <= window:
        return [Cut(slice(0, num_residues), slice(0, num_residues + 2))]
    starts = [*range(0, num_residues - window, window // 2), num_residues - window]
    return [
        Cut(
            slice(start, start + window),
            slice(start + 1 if start else 0, start + window + (2 if start + window == num_residues else 1)),
        )
        for start in starts
    ]


class _Rows(NamedTuple):
    """States and scores of one pass over one cut, a row a shown token."""

    layers: dict[int, np.ndarray]
    logits: np.ndarray | None


def _join(cuts: Sequence[Cut], answers: Sequence[_Rows | None], *, causal: bool) -> ProteinEmbedding | None:
    """Return the embedding of a protein from its cuts, or `None` if one of them is missing.

    A row that several windows have is their mean, weighted by its distance from the nearest end of each: a window
    knows least at its ends.
    """
    found = [answer for answer in answers if answer is not None]
    if len(found) < len(cuts):
        return None
    firsts = [1 if cut.shown.start == 0 else 0 for cut in cuts]
    layers = {
        layer: _stitch(cuts, [each.layers[layer] for each in found], firsts) for layer in found[0].layers
    }
    bos = {layer: states[0].copy() for layer, states in found[0].layers.items()}
    scores = [each.logits for each in found if each.logits is not None]
    before = [first - causal for first in firsts]
    return ProteinEmbedding(layers, bos, _stitch(cuts, scores, before) if scores else None)


def _stitch(cuts: Sequence[Cut], rows: Sequence[np.ndarray], firsts: Sequence[int]) -> np.ndarray:
    """Return one row a residue, float32 `(L, ...)`.

    Args:
        cuts: of the protein, in order.
        rows: of each cut, a row a shown token.
        firsts: which row of each belongs to the cut's first residue; -1 if none does.
    """
    if len(cuts) == 1:
        length = cuts[0].residues.stop
        return rows[0][firsts[0] : firsts[0] + length]
    total = np.zeros((cuts[-1].residues.stop, rows[0].shape[1]))
    weights = np.zeros((len(total), 1))
    for cut, found, first in zip(cuts, rows, firsts, strict=True):
        length = cut.residues.stop - cut.residues.start
        near = np.minimum(np.arange(1, length + 1), np.arange(length, 0, -1))[:, None]
        skipped = max(0, -first)
        own = slice(cut.residues.start + skipped, cut.residues.stop)
        total[own] += near[skipped:] * found[max(0, first) : first + length]
        weights[own] += near[skipped:]
    return (total / weights).astype(np.float32)
