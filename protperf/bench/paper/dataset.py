"""The dataset of the experiments: proteins split as in the paper, at random and by whole families.

The paper's validation set is a random share of the sequences, its out-of-distribution set whole Pfam families (Choromanski
et al. 2021, appendix C.1). Here `valid` is a share of the sequences by their hash, and `ood` a share of whole clusters by the hash of
their representatives. `protperf prepare` makes it, in a process of its own.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from protperf.bench.paper.jobs import claim
from protperf.bench.training import run_protperf
from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes
from protperf.formats.manifest import MANIFEST_NAME, read_manifest
from protperf.formats.unpacking import unpacked

HELD_OUT = "PF00000"
"""No family of Pfam: the name under which `prepare` learns which records are of clusters that are held out."""


def prepare_dataset(options: Namespace, *, window: int) -> Path:
    """Return the folder of the proteins in windows of so many tokens, made unless it is there.

    Args:
        options: `work`, `fasta`, `clusters`, `valid` and `ood`.
        window: tokens.

    Raises:
        ValueError: an input that cannot be read, or a folder made from other input.
    """
    folder: Path = options.work / f"data-{window}"
    settings = {name: _digest(path) for name, path in (("FASTA", options.fasta), ("table", options.clusters))}
    claim(folder, settings | {"--valid": options.valid, "--ood": options.ood})
    dataset = folder / "dataset"
    if not (dataset / MANIFEST_NAME).exists():
        table = folder / "held_out.tsv"
        members = held_out_members(options.clusters, share=options.ood)
        commit_bytes(table, "".join(f"{member}\t{HELD_OUT}\n" for member in members).encode())
        splits = (f"--valid={options.valid}", "--test=0", f"--ood-families={table}", f"--families={HELD_OUT}")
        run_protperf("prepare", f"--window={window}", *splits, str(options.fasta), str(dataset))
    for split in ("valid", "ood"):
        if not read_manifest(dataset).splits[split].windows:
            raise ValueError(
                f"{dataset}: its split {split!r} is empty; give a larger --{split} and another --work"
            )
    return dataset


def held_out_members(table: Path, *, share: float) -> list[str]:
    """Return the members of the clusters that are held out: those whose representatives' hashes are lowest.

    Args:
        table: lines `representative TAB member`, plain or gzip.
        share: of the clusters, about.

    Raises:
        FormatError: a damaged table.
        ValueError: no file, or no cluster is held out.
    """
    members = [member for representative, member in _read_clusters(table) if _point(representative) < share]
    if not members:
        raise ValueError(f"--ood {share:g}: holds out no cluster of {table}; give a larger share")
    return members


def _point(name: str) -> float:
    """Return a number from 0 to 1 that a name always has."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _read_clusters(table: Path) -> Iterator[tuple[str, str]]:
    """Yield representatives and members."""
    try:
        text = unpacked(table.read_bytes(), str(table)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{table}: cannot be read ({error}); give the table whole") from None
    for number, line in enumerate(text.splitlines(), start=1):
        representative, tab, member = line.partition("\t")
        if not tab or "\t" in member or not (representative and member):
            raise FormatError(f"{table}:{number}: {line[:60]!r} is not `representative TAB member`")
        yield representative, member


def _digest(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give FASTA, then the table of clusters")
    return hashlib.sha256(path.read_bytes()).hexdigest()
