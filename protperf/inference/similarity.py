"""How alike amino acids are to a model, by the heads that look at them.

After Vig et al. 2021 (arXiv:2006.15222), as Choromanski et al. 2021 (arXiv:2009.14794) use it for a Performer: to each
amino acid belongs a vector over all heads of all layers, the share of each head's attention that goes to residues of this kind. The
similarity of two amino acids is Pearson's correlation of their vectors. Like there, attention from and to special tokens is
left out. Unlike there, no small weight is: a Performer spreads its attention over all of a protein.

What a head pays to all residues of a kind is what its attention gathers when the values say which kind each residue is,
so no matrix of pairs is made, and proteins may be of any length.

Axis letters: `B` batch, `L` length in tokens, `N` layers, `H` heads, `A` kinds of residue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from protperf.batches import pad_together
from protperf.inference.attention_maps import gather, watch_layers
from protperf.inference.passes import autocast, frame, pack_together, plan_passes
from protperf.model import ProteinModel
from protperf.vocab import STANDARD_RESIDUES, VOCABULARY

LEAST_HEADS = 3
"""Any two points lie on a line: fewer heads say nothing of correlation."""


def attention_to_residues(
    model: ProteinModel,
    proteins: Sequence[np.ndarray],
    *,
    token_budget: int = 4096,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda count: None,
) -> np.ndarray:
    """Return the attention that each head pays, from all residues, to the residues of each kind: float64 `(N, H, A)`.

    Args:
        model: in evaluation mode, on the device to compute on.
        proteins: residue tokens, uint8 `(L,)` each.
        token_budget: tokens in a pass; a longer protein has one of its own.
        precision: of the model's pass: `fp32`, `bf16` or `fp16`.
        advance: called with the number of proteins just done.

    Returns:
        sums over all proteins; A is the 26 residue letters in the order of the vocabulary.
    """
    device = model.device
    shape = (model.config.num_layers, model.config.num_heads, VOCABULARY.num_residues)
    totals = torch.zeros(shape, dtype=torch.float64)
    shown = [frame(protein) for protein in proteins]
    for places in plan_passes(model, [len(tokens) for tokens in shown], token_budget=token_budget):
        together = pad_together if model.config.is_exact_somewhere else pack_together
        tokens, documents = together([shown[place] for place in places])
        with autocast(device, precision):
            totals += _attention_paid(model, tokens.to(device), documents.to(device))
        advance(len(places))
    return totals.numpy()


def _attention_paid(model: ProteinModel, tokens: Tensor, documents: Tensor) -> Tensor:
    """Return the sums of one pass, float64 `(N, H, A)`."""
    kinds = one_hot(tokens.long(), len(VOCABULARY))[..., : VOCABULARY.num_residues]  # (B, L, A)
    looking = kinds.any(-1)[:, None, :, None]
    paid: list[Tensor] = []

    def look(layer: int, q: Tensor, k: Tensor, gate: Tensor | None) -> None:
        gathered = gather(model, layer, q, k, kinds, documents, gate=gate)  # (B, H, L, A)
        sums = gathered.masked_fill(~looking, 0.0).sum(dim=(0, 2))
        paid.append(sums.cpu().double())

    watch_layers(model, tokens, documents, look)
    return torch.stack(paid)


def residue_similarity(attention: np.ndarray) -> np.ndarray:
    """Return the correlation of the standard amino acids' vectors of shares, float64 `(20, 20)`.

    Args:
        attention: what `attention_to_residues` returned, `(N, H, A)`.

    Raises:
        ValueError: too few heads, an amino acid that no protein holds, or heads that all look alike.
    """
    heads = attention.reshape(-1, attention.shape[-1])
    if len(heads) < LEAST_HEADS:
        raise ValueError(
            f"the model has {len(heads)} head(s) in all; a correlation over heads takes {LEAST_HEADS} at least"
        )
    shares = (heads / heads.sum(axis=1, keepdims=True))[:, : VOCABULARY.num_standard]
    missing = [VOCABULARY.tokens[kind] for kind in np.flatnonzero(~shares.any(axis=0))]
    if missing:
        raise ValueError(f"the proteins hold no {', '.join(missing)}; give more proteins")
    if not np.isfinite(shares).all() or (np.ptp(shares, axis=0) == 0).any():
        raise ValueError("attention is the same in all heads, or is no number; is the model trained?")
    return np.corrcoef(shares.T)


def agreement(similarity: np.ndarray, reference: np.ndarray) -> float:
    """Return Pearson's correlation of two symmetric matrices over the pairs of different amino acids.

    Args:
        similarity: `(20, 20)`.
        reference: `(20, 20)` in the same order.
    """
    pairs = np.tril_indices(len(similarity), k=-1)
    return float(np.corrcoef(similarity[pairs], reference[pairs])[0, 1])


def chance_of(
    similarity: np.ndarray, reference: np.ndarray, *, num: int, generator: np.random.Generator
) -> float:
    """Return the share of random relabellings of the amino acids that agree with the reference at least as well.

    The 190 pairs share 20 amino acids, so that they are not independent: this is Mantel's test (1967).

    Args:
        similarity: `(20, 20)`.
        reference: `(20, 20)` in the same order.
        num: relabellings.
        generator: draws them.
    """
    found = agreement(similarity, reference)
    orders = (generator.permutation(len(similarity)) for _ in range(num))
    return sum(agreement(similarity[np.ix_(order, order)], reference) >= found for order in orders) / num


def read_blosum() -> np.ndarray:
    """Return BLOSUM62 for the standard amino acids in the vocabulary's order, float64 `(20, 20)`."""
    from Bio.Align import substitution_matrices

    table = substitution_matrices.load("BLOSUM62")
    return np.array([[table[a, b] for b in STANDARD_RESIDUES] for a in STANDARD_RESIDUES])
