"""The tensors of a source, each taken under its name and in its shape: nothing is left over without a word.

Axis letters: `D` model width, `F` feed-forward width, `P` positions, `V` vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protperf.formats import FormatError

_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""What the first conversions of BERT from TensorFlow called them."""

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Tensors:
    """The tensors of a source, to be taken one by one.

    Args:
        tensors: by the source's names.
        place: the file's name, for messages.

    Raises:
        FormatError: one stands there under its name of today and an old one.

    Attributes:
        ignored: names of what has no part in the scores of tokens.
    """

    def __init__(self, tensors: Mapping[str, Tensor], place: str) -> None:
        self.place = place
        self.ignored: list[str] = []
        self._left: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if _today(name) in self._left:
                raise FormatError(
                    f"{place}: holds {_today(name)} under that name and an old one; give weights with one of them"
                )
            self._left[_today(name)] = tensor

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor is there and was not taken."""
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is not taken yet."""
        self._check_there(name)
        return tuple(self._left[name].shape)

    def take(self, name: str, *shape: int | None) -> Tensor:
        """Return a tensor as float32.

        Args:
            name: the source's.
            shape: what it must be, `None` for any length.

        Raises:
            FormatError: it is missing, has another shape, or holds what is no finite number.
        """
        found = self.shape(name)
        if len(found) != len(shape) or any(
            want not in (None, have) for want, have in zip(shape, found, strict=True)
        ):
            raise FormatError(
                f"{self.place}: {name} is {_shown(found)}, its config asks for {_shown(shape)}; give the config of these weights"
            )
        tensor = self._left.pop(name)
        if tensor.dtype not in _TYPES or tensor.layout != torch.strided:
            raise FormatError(
                f"{self.place}: {name} is of type {tensor.dtype}, {tensor.layout}; allowed: dense floating point of 16 bits "
                "or more, save the weights unquantised"
            )
        tensor = tensor.to(torch.float32)
        if not tensor.isfinite().all():
            raise FormatError(f"{self.place}: {name} holds what is no finite number; give other weights")
        return tensor

    def linear(self, source: str, own: str, *shape: int) -> dict[str, Tensor]:
        """Take a matrix, `(out, in)`, and its bias; return them under our name.

        Args:
            source: the source's name, without `.weight` and `.bias`.
            own: ours.
            shape: of the matrix; `(D,)` for the weight of a norm.
        """
        return {
            f"{own}.weight": self.take(f"{source}.weight", *shape),
            f"{own}.bias": self.take(f"{source}.bias", shape[0]),
        }

    def first_of(self, names: tuple[str, ...], *shape: int, tied: bool) -> Tensor:
        """Take a tensor that a source may hold under several names.

        Args:
            names: the first that is there counts.
            shape: what it must be.
            tied: whether the others are the same tensor; if not, they are ignored.

        Raises:
            FormatError: it is under none of them, or two differ that are one.
        """
        there = [name for name in names if name in self] or list(names[-1:])
        first, *others = (self.take(name, *shape) for name in there)
        for name, other in zip(there[1:], others, strict=True):
            if other.equal(first):
                continue
            if tied:
                raise FormatError(
                    f"{self.place}: {there[0]} and {name} differ, but the config ties them (tie_word_embeddings); give the "
                    "config of these weights"
                )
            self.ignored.append(name)
        return first

    def names(self, pattern: str) -> list[str]:
        """Return the names that match a regular expression as a whole and were not taken."""
        return [name for name in self._left if re.fullmatch(pattern, name)]

    def ignore(self, pattern: str) -> None:
        """Set aside what has no part in the scores of tokens.

        Args:
            pattern: a regular expression of whole names.
        """
        names = self.names(pattern)
        self.ignored += names
        for name in names:
            del self._left[name]

    def check_empty(self) -> None:
        """Refuse a source that holds more than was taken or ignored.

        Raises:
            FormatError: it names what is left.
        """
        if self._left:
            name, *others = sorted(self._left)
            more = f" and {len(others)} more" if others else ""
            raise FormatError(
                f"{self.place}: {name}{more} has no place in this layout, so the model would compute something else; "
                "give weights of a masked language model as they were saved"
            )

    def _check_there(self, name: str) -> None:
        if name not in self._left:
            raise FormatError(
                f"{self.place}: {name} is missing; give weights of a masked language model, its head included, and their config"
            )


@dataclass(frozen=True)
class BlockNames:
    """What a layout calls the parts of a block, behind the block's own name."""

    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    into: str
    feedforward_out: str
    feedforward_norm: str


def take_block(
    tensors: Tensors, source: str, own: str, names: BlockNames, *, width: int, inner: int
) -> dict[str, Tensor]:
    """Take one block; the matrices of queries, keys and values become one, `(3 D, D)`, in this order.

    Args:
        tensors: of the source.
        source: the source's name of the block, with a dot behind.
        own: ours, likewise.
        names: of its parts.
        width: D.
        inner: F.
    """
    parts = [
        tensors.linear(f"{source}{name}", "qkv", width, width)
        for name in (names.query, names.key, names.value)
    ]
    return {
        f"{own}attention.qkv.weight": torch.cat([part["qkv.weight"] for part in parts]),
        f"{own}attention.qkv.bias": torch.cat([part["qkv.bias"] for part in parts]),
        **tensors.linear(f"{source}{names.out}", f"{own}attention.out", width, width),
        **tensors.linear(f"{source}{names.attention_norm}", f"{own}attention_norm", width),
        **tensors.linear(f"{source}{names.into}", f"{own}feedforward.into", inner, width),
        **tensors.linear(f"{source}{names.feedforward_out}", f"{own}feedforward.out", width, inner),
        **tensors.linear(f"{source}{names.feedforward_norm}", f"{own}feedforward_norm", width),
    }


def _today(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _shown(shape: tuple[int | None, ...]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"({sizes}{',' * (len(shape) == 1)})"
