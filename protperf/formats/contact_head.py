"""A contact head: one weight for each head of attention, and an intercept, as a JSON file.

Axis letters: `N` layers, `H` heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protperf.formats import FormatError, one_line
from protperf.formats.commit import commit_bytes
from protperf.formats.json_files import read_json

FORMAT = "protperf contact head"
FORMAT_VERSION = 1


CONTACT_HEAD_NAME = "contact_head.json"
"""The file's name where the user gives none."""


@dataclass(frozen=True)
class ContactHead:
    """What turns attention maps into probabilities of contacts.

    Attributes:
        weights: of each head's corrected map, float64 `(N, H)`.
        intercept: of the log-odds.
        provenance: plain values: the checkpoint it belongs to, and what it was fitted to and how.
    """

    weights: np.ndarray
    intercept: float
    provenance: dict[str, Any]


def write_contact_head(path: Path, head: ContactHead) -> None:
    """Write a head; the file appears only when it is whole."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **head.provenance,
        "intercept": head.intercept,
        "weights": head.weights.tolist(),
    }
    commit_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_contact_head(path: Path) -> ContactHead:
    """Read a head.

    Raises:
        ValueError: the file cannot be read.
        FormatError: it is no contact head, or one of a later version.
    """
    try:
        content = read_json(path, remedy="give a file that `protperf maps contacts` wrote")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path}: no contact head; give a file that `protperf maps contacts` wrote")
    if content.get("format_version") != FORMAT_VERSION:
        raise FormatError(
            f"{path}: has format version {content.get('format_version')}, this protperf reads {FORMAT_VERSION}; "
            "fit the head again, or install the protperf that wrote it"
        )
    try:
        found, intercept = np.array(content["weights"]), content["intercept"]
        if found.dtype.kind not in "iuf" or type(intercept) not in (int, float):
            raise TypeError("what should be a number is none that floats hold")
        weights, intercept = found.astype(np.float64), float(intercept)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: damaged contact head ({error}); fit it again") from error
    if weights.ndim != 2 or not np.isfinite(weights).all() or not np.isfinite(intercept):
        raise FormatError(f"{path}: damaged contact head: weights are no finite matrix; fit it again")
    own = ("format", "format_version", "weights", "intercept")
    return ContactHead(weights, intercept, {key: content[key] for key in content if key not in own})


def describe_other_model(head: ContactHead, checkpoint: Path, digest: str) -> str:
    """Return the end of a line that says that a head was fitted to another model; nothing if it was fitted to this one.

    Args:
        head: from `read_contact_head`.
        checkpoint: the file that holds the weights.
        digest: hex SHA-256 of it.
    """
    if head.provenance.get("checkpoint_sha256") == digest:
        return ""
    other = head.provenance.get("checkpoint")
    return (
        f"was fitted to {one_line(other) if type(other) is str else 'an unknown model'}, not to {checkpoint}"
    )
