"""Who competes in `protperf bench attention`: exact attention, the X line, protperf's kinds and a package from PyPI.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `F` features.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from protperf.attention import ATTENTIONS, BIDIRECTIONAL, Hashing, attend, draw_projection
from protperf.layers import INIT_GATE
from protperf.work import rows_for

EXACT = "SDPA"
X_LINE = "X line"
PERFORMER_PYTORCH = "performer-pytorch"
GATED = ", gated"
PACKED = ", packed"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(q, k, v) -> (B, H, L, K)`, each of them `(B, H, L, K)`."""


@dataclass(frozen=True)
class Setting:
    """What all contestants share.

    Attributes:
        kinds: attentions of protperf, besides `softmax`, which always competes.
        batch: B.
        heads: H.
        head_dim: K.
        num_features: F, the same for each feature map with a projection; the pooled tokens of `linformer`.
        packed: documents in a window; 0 leaves packed windows out.
        dtype: of q, k, v.
        device: where all happens.
        layout: of protperf's linear attentions; `None` lets the device choose.
        rounds: turns of each contestant.
        budget: seconds that one call may take.
        seed: of inputs, projections and documents.
    """

    kinds: tuple[str, ...] = ATTENTIONS
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    num_features: int = 256
    packed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    layout: str | None = None
    rounds: int = 5
    budget: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class Contestant:
    """One attention.

    Attributes:
        name: in tables.
        kind: the attention's name in `work`; `None` has no arithmetic.
        attend: the attention.
        packed: whether the window holds several documents.
    """

    name: str
    kind: str | None
    attend: Attention
    packed: bool = False


def gather(setting: Setting, *, causal: bool, length: int) -> list[Contestant]:
    """Return those who compete at one length: exact attention first, then the X line, then the others.

    Causal `rfa` competes with and without a gate; what has no causal form does not compete there.
    """
    windows = [None, documents_of(setting, length)] if setting.packed else [None]
    kinds = [kind for kind in setting.kinds if kind != "softmax" and not (causal and kind in BIDIRECTIONAL)]
    found = [
        _own("softmax", setting, causal=causal, documents=documents, length=length) for documents in windows
    ]
    found.append(Contestant(X_LINE, None, lambda q, k, v: v))
    found += [
        _own(kind, setting, causal=causal, documents=documents, length=length)
        for kind in kinds
        for documents in windows
    ]
    if causal and "rfa" in kinds:
        found += [
            _own("rfa", setting, causal=True, documents=documents, length=length, gated=True)
            for documents in windows
        ]
    with contextlib.suppress(ImportError):
        found.append(Contestant(PERFORMER_PYTORCH, "favor", performer_pytorch(setting, causal=causal)))
    return found


def performer_pytorch(setting: Setting, *, causal: bool) -> Attention:
    """Return the attention of the PyPI package performer-pytorch, its projection drawn once.

    The same work as `favor`: positive softmax features of an orthogonal projection. Without fast-transformers' CUDA
    code its causal form is the one in torch.

    Raises:
        ImportError: it is not installed, or something that it needs is not; one line.
    """
    # it prints what it lacks on stdout, which is ours
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            from performer_pytorch import FastAttention
        except ImportError as error:
            missing = error.name == "performer_pytorch"
            reason = "is not installed" if missing else f"cannot be imported ({error})"
            raise ImportError(f"{PERFORMER_PYTORCH} {reason}: left out") from error
        with contextlib.redirect_stdout(None):
            peer = FastAttention(setting.head_dim, nb_features=setting.num_features, causal=causal)
    attention: Attention = peer.to(setting.device)
    return attention


def cut(length: int, count: int, *, seed: int) -> list[int]:
    """Return the lengths of `count` documents that fill a window, cut at places drawn without replacement."""
    order = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))
    places = [0, *sorted((order[: count - 1] + 1).tolist()), length]
    return [end - start for start, end in pairwise(places)]


def documents_of(setting: Setting, length: int) -> Tensor:
    """Return the number of each token's document, int32 `(B, L)`."""
    sizes = torch.tensor(cut(length, setting.packed, seed=setting.seed))
    numbers = torch.repeat_interleave(torch.arange(setting.packed, dtype=torch.int32), sizes)
    return numbers.expand(setting.batch, -1).contiguous().to(setting.device)


def _own(
    kind: str,
    setting: Setting,
    *,
    causal: bool,
    documents: Tensor | None,
    length: int,
    gated: bool = False,
) -> Contestant:
    """Return one of protperf's attentions; `softmax` without documents is torch's SDPA itself."""
    name = EXACT if kind == "softmax" else kind + (GATED if gated else "")
    layout, choices = None if gated else setting.layout, _choices(kind, setting, length)

    def compete(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate = torch.full(q.shape[:3], INIT_GATE, device=q.device) if gated else None
        return attend(q, k, v, documents, kind=kind, causal=causal, gate=gate, layout=layout, **choices)

    return Contestant(
        name + (PACKED if documents is not None else ""), kind, compete, packed=documents is not None
    )


def _choices(kind: str, setting: Setting, length: int) -> dict[str, Any]:
    """Return what a kind needs besides q, k and v: drawn as a model draws it, the same for each contestant of a kind."""
    generator = torch.Generator().manual_seed(setting.seed)
    if kind == "linformer":
        pooling = torch.randn(2, setting.num_features, length, generator=generator)
        return {"pooling": pooling.to(setting.device) * setting.num_features**-0.5}
    hashing = Hashing()
    rows = hashing.num_rows if kind == "reformer" else rows_for(kind, setting.num_features, setting.head_dim)
    drawn = draw_projection(rows, setting.head_dim, coupling="orthogonal", norms="chi", generator=generator)
    expected = torch.full((setting.heads,), 2 * setting.head_dim**0.5)  # of |q' + k'|^2, q and k ~ N(0, 1)
    return {
        "projection": drawn.to(setting.device),
        "pair_square": expected.to(setting.device),
        "hashing": hashing,
    }
