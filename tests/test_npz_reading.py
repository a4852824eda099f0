"""Members of a NumPy archive claim what is there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from embedding_outputs import describe, write

from protperf.formats import FormatError
from protperf.formats.embedding_npz import NpzFile


def test_numbers_of_an_archive_claim_what_is_there(tmp_path: Path):
    path = tmp_path / "e"
    write(path, "npz", describe("per_tok"), range(3))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    huge = (
        b"\x93NUMPY\1\0\x76\0"
        + b"{'descr': '<U9', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
        + b"\n"
    )
    for name in ("ids.npy", "headers.npy", "num_residues.npy", "about.npy"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
            for each, data in members.items():
                made.writestr(each, huge if each == name else data)
        with pytest.raises(FormatError, match=r"e: no readable embedding file|e: holds"):
            NpzFile(path)
    path.write_bytes(whole)
    with NpzFile(path) as file:
        assert all(isinstance(each.array, np.ndarray) and each.array.flags.writeable for each in file)
