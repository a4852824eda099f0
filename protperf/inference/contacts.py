"""Which residues touch, by a logistic regression over attention maps.

After Rao et al. 2021 (doi:10.1101/2020.12.15.422761): the maps of all heads of all layers, without special tokens, are made
symmetric and corrected for the average product (Dunn et al. 2008), and a pair's probability of a contact is a logistic
function of their weighted sum. A causal model's maps are triangular; made symmetric they serve alike.

Axis letters: `L` length in residues, `N` layers, `H` heads, `P` pairs of residues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from protperf.formats.contact_head import ContactHead
from protperf.inference.attention_maps import gather, watch_layers
from protperf.inference.passes import autocast, frame
from protperf.model import ProteinModel

CONTACT_DISTANCE = 8.0
"""Angstrom between C-beta atoms (C-alpha of glycine); a contact is nearer."""
MIN_SEPARATION = 6
"""Residues nearer along the chain touch anyway and are not asked."""
RANGES = {"long": (24, None), "medium": (12, 24), "short": (6, 12)}
"""Separation along the chain: from, and up to but without."""

_COLUMNS = 512
"""Columns of a map made in one go."""
_SEEN, _UNSEEN = slice(1, -1), 2
"""`<bos>` and `<eos>` stand around the residues."""


def pairs_of(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs i < j at least `MIN_SEPARATION` apart, by i and then by j: two int64 `(P,)`."""
    return np.triu_indices(length, k=MIN_SEPARATION)


def contacts_of(positions: np.ndarray) -> np.ndarray:
    """Return the contacts among the pairs of `pairs_of`: float32 `(P,)`, 1, 0, or NaN where an atom is missing.

    Args:
        positions: C-beta atoms in Angstrom, `(L, 3)`, NaN where the structure does not show them.
    """
    i, j = pairs_of(len(positions))
    distances = np.linalg.norm(positions[i].astype(np.float64) - positions[j], axis=1)
    return np.where(np.isnan(distances), np.nan, distances < CONTACT_DISTANCE).astype(np.float32)


def pair_features(model: ProteinModel, residues: np.ndarray, *, precision: str = "fp32") -> np.ndarray:
    """Return what each head says of each pair of `pairs_of`: float32 `(P, N * H)`.

    Args:
        model: in evaluation mode, on the device to compute on.
        residues: tokens, uint8 `(L,)`.
        precision: of the model's pass: `fp32`, `bf16` or `fp16`.
    """
    i, j = (torch.from_numpy(index) for index in pairs_of(len(residues)))
    num_features = model.config.num_layers * model.config.num_heads
    features = np.empty((len(i), num_features), np.float32)

    def take(number: int, columns: Iterator[tuple[slice, Tensor]]) -> None:
        matrix = torch.empty(len(residues), len(residues), device=model.device)
        for place, part in columns:
            matrix[:, place] = part
        matrix = matrix + matrix.T
        sums = matrix.sum(0)
        corrected = matrix - torch.outer(sums, sums / sums.sum())
        features[:, number] = corrected.cpu()[i, j].numpy()

    _each_head(model, residues, take, precision=precision)
    return features


def predict_contacts(
    model: ProteinModel, residues: np.ndarray, head: ContactHead, *, precision: str = "fp32"
) -> np.ndarray:
    """Return the probability of a contact for each two residues, float32 `(L, L)`, symmetric, zero on the diagonal.

    Pairs nearer than `MIN_SEPARATION` have a probability too, but the head was never fitted to such.

    Heads are taken one by one and their maps in blocks of columns: memory is that of one matrix `(L, L)` and a few blocks. The
    correction of a map has rank one, so that those of all heads are one product at the end.

    Args:
        model: in evaluation mode, on the device to compute on.
        residues: tokens, uint8 `(L,)`.
        head: fitted to this model.
        precision: of the model's pass: `fp32`, `bf16` or `fp16`.

    Raises:
        ValueError: the head belongs to a model of another shape.
    """
    check_head(model, head)
    length, device = len(residues), model.device
    weights = head.weights.ravel()
    total = torch.zeros(length, length, device=device)
    sums = torch.zeros(len(weights), length, device=device)

    def take(number: int, columns: Iterator[tuple[slice, Tensor]]) -> None:
        if not weights[number]:
            return
        for place, part in columns:
            total[:, place] += float(weights[number]) * part
            sums[number] += part.sum(1)
            sums[number, place] += part.sum(0)

    _each_head(model, residues, take, precision=precision)
    scale = sums.sum(1, keepdim=True)
    scaled = sums * torch.from_numpy(weights).float().to(device)[:, None] / scale.masked_fill(scale == 0, 1.0)
    _finish(total, scaled, sums, head.intercept)
    return total.cpu().numpy()


def check_head(model: ProteinModel, head: ContactHead) -> None:
    """Refuse a head for a model of another shape.

    Raises:
        ValueError: it has weights for another number of layers or heads.
    """
    shape = (model.config.num_layers, model.config.num_heads)
    if head.weights.shape != shape:
        raise ValueError(
            f"the contact head has weights for {head.weights.shape[0]} layers of {head.weights.shape[1]} heads, "
            f"the model has {shape[0]} of {shape[1]}; fit a head to this model"
        )


def _finish(total: Tensor, scaled: Tensor, sums: Tensor, intercept: float) -> None:
    """Turn the weighted sum of maps `(L, L)` into probabilities in place, two mirrored blocks at a time.

    Args:
        total: the sum.
        scaled: each map's sums over rows and columns, times its weight, over the map's total, `(N * H, L)`.
        sums: the same without weight and total.
        intercept: of the log-odds.
    """
    blocks = [slice(start, start + _COLUMNS) for start in range(0, len(total), _COLUMNS)]
    for number, rows in enumerate(blocks):
        for columns in blocks[: number + 1]:
            product = scaled[:, rows].T @ sums[:, columns]
            part = torch.sigmoid(total[rows, columns] + total[columns, rows].T - product + intercept)
            if rows == columns:
                part = part.triu() + part.triu(1).T  # mirrored to the last bit
            total[rows, columns] = part
            total[columns, rows] = part.T
    total.fill_diagonal_(0.0)


def _each_head(
    model: ProteinModel,
    residues: np.ndarray,
    take: Callable[[int, Iterator[tuple[slice, Tensor]]], None],
    *,
    precision: str,
) -> None:
    """Show `take` each head's map of the residues, without the special tokens: its number and its blocks of columns.

    Args:
        model: in evaluation mode.
        residues: tokens, uint8 `(L,)`.
        take: called as `take(number, columns)` with `columns` yielding places of columns and float32 `(L, C)`.
        precision: of the model's pass.
    """
    device = model.device
    tokens = torch.from_numpy(frame(residues)).unsqueeze(0).to(device)
    num_heads = model.config.num_heads

    def look(layer: int, q: Tensor, k: Tensor, gate: Tensor | None) -> None:
        for head in range(num_heads):
            take(layer * num_heads + head, _columns(model, layer, q, k, gate, head))

    with autocast(device, precision):
        watch_layers(model, tokens, None, look)


def _columns(
    model: ProteinModel, layer: int, q: Tensor, k: Tensor, gate: Tensor | None, head: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of columns of one head's map of the residues, float32 `(L, C)`."""
    shown = q.shape[2]
    for start in range(0, shown - _UNSEEN, _COLUMNS):
        place = slice(start, min(start + _COLUMNS, shown - _UNSEEN))
        values = torch.zeros(1, shown, place.stop - start, device=q.device)
        values[0, start + 1 : place.stop + 1].fill_diagonal_(1.0)
        part = gather(model, layer, q, k, values, gate=gate, heads=slice(head, head + 1))
        yield place, part[0, 0, _SEEN]


def precision_at(scores: np.ndarray, contacts: np.ndarray, count: int) -> float:
    """Return the share of contacts among the `count` pairs with the highest scores; NaN where there are no pairs.

    Of pairs with equal scores, as many as fit are taken as if drawn at random: the result is the mean over all draws.

    Args:
        scores: `(P,)`.
        contacts: 1 or 0, `(P,)`.
        count: at least 1; all pairs, if there are fewer.
    """
    count = min(count, len(scores))
    if not count:
        return float("nan")
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above, equal = scores > threshold, scores == threshold
    return float((contacts[above].sum() + contacts[equal].mean() * (count - above.sum())) / count)


def precisions(scores: np.ndarray, contacts: np.ndarray, length: int) -> dict[str, dict[str, float]]:
    """Return the precision of a protein's predicted contacts: range -> `L`, `L/2`, `L/5` -> share.

    Args:
        scores: of the pairs of `pairs_of`, `(P,)`.
        contacts: 1, 0, or NaN where not known, `(P,)`; such pairs are left out.
        length: L, in residues.
    """
    i, j = pairs_of(length)
    found = {}
    for name, (low, high) in RANGES.items():
        asked = (j - i >= low) & (j - i < (high or length)) & ~np.isnan(contacts)
        found[name] = {
            label: precision_at(scores[asked], contacts[asked], max(1, length // part))
            for label, part in (("L", 1), ("L/2", 2), ("L/5", 5))
        }
    return found


def fit_contacts(
    features: np.ndarray, contacts: np.ndarray, *, shape: tuple[int, int], regularisation: float
) -> ContactHead:
    """Fit a contact head: logistic regression with an L2 penalty on the weights of standardised features.

    L2 because the maps of many heads are alike: L1 keeps one of them by chance, and few structures do not tell which.

    Args:
        features: `(P, N * H)` of all pairs of all proteins.
        contacts: 1 or 0, `(P,)`.
        shape: N and H.
        regularisation: C of scikit-learn: the penalty is |w|^2 / 2C beside the sum of the pairs' losses.

    Returns:
        a head for the features as they are, without provenance.

    Raises:
        ValueError: contacts or other pairs are missing, a feature is no number, or scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ValueError(
            "contact heads are fitted by scikit-learn, which is not installed: pip install 'protperf[contacts]'"
        ) from error
    if not len(contacts) or not 0 < contacts.mean() < 1:
        raise ValueError("the structures have no contacts, or nothing else; a head cannot be fitted")
    if not np.isfinite(features).all():
        raise ValueError("attention maps are not finite; did training diverge?")
    mean, std = features.mean(0, dtype=np.float64), features.std(0, dtype=np.float64)
    std[std == 0] = 1.0
    standardised = features - mean.astype(features.dtype)  # float32 as it came: there may be gigabytes
    standardised /= std.astype(features.dtype)
    regression = LogisticRegression(C=regularisation, max_iter=1000)
    regression.fit(standardised, contacts)
    weights = regression.coef_[0] / std
    return ContactHead(weights.reshape(shape), float(regression.intercept_[0] - weights @ mean), {})


def score_pairs(features: np.ndarray, head: ContactHead) -> np.ndarray:
    """Return the log-odds of a contact of each pair, float64 `(P,)`, from its features `(P, N * H)`."""
    return features @ head.weights.ravel() + head.intercept
