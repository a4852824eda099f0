"""Clusters made by MMseqs2 (Steinegger and Söding 2018, doi:10.1038/s41467-018-04964-5), if that program is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from data_prep.options import PrepareOptions
from protperf.formats.streams import STDIN, open_stream

PROGRAM = "mmseqs"

_LAST_LINES = 3


def run_mmseqs(
    inputs: list[str],
    folder: Path,
    options: PrepareOptions,
    *,
    threads: int,
    memory: int,
    say: Callable[[str], None],
) -> Path:
    """Cluster all records of the inputs with `mmseqs easy-linclust`; do nothing if that is done in `folder` already.

    Args:
        inputs: FASTA files, plain or gzip.
        folder: for MMseqs2's files, of which only the table stays.
        options: identity and coverage of a cluster.
        threads: for MMseqs2.
        memory: bytes that MMseqs2 may take.
        say: takes a line of log.

    Returns:
        The cluster table.

    Raises:
        ValueError: MMseqs2 is not installed, cannot read an input, or fails.
    """
    table = folder / "clusters_cluster.tsv"
    if table.exists():
        return table
    check_mmseqs(inputs)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [PROGRAM, "easy-linclust", *inputs, str(folder / "clusters"), str(folder / "tmp")]
    command += ["--min-seq-id", str(options.cluster_identity), "-c", str(options.cluster_coverage)]
    command += ["--threads", str(threads), "--split-memory-limit", f"{memory >> 20}M", "-v", "1"]
    say(" ".join(command[:2]) + f" at identity {options.cluster_identity:g} (MMseqs2)")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:]
        raise ValueError(f"mmseqs easy-linclust failed with status {done.returncode}: {' '.join(lines)}")
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    for name in ("clusters_all_seqs.fasta", "clusters_rep_seq.fasta"):
        (folder / name).unlink(missing_ok=True)
    return table


def check_mmseqs(inputs: list[str]) -> None:
    """Refuse before any work what MMseqs2 could not do.

    Raises:
        ValueError: the program is missing, or an input is no file of FASTA, plain or gzip.
    """
    if shutil.which(PROGRAM) is None:
        raise ValueError(
            "--clusters mmseqs: no program `mmseqs` here; install MMseqs2 (conda install -c bioconda mmseqs2, apt install "
            "mmseqs2, brew install mmseqs2), or give a table that it wrote elsewhere"
        )
    for path in inputs:
        if path == STDIN:
            raise ValueError("--clusters mmseqs: MMseqs2 cannot read standard input; give a file")
        with open(path, "rb") as file:
            head = file.read(6)
        with open_stream(path, lambda num_bytes: None) as stream:
            if stream.kind != "fasta" or head.startswith((b"BZh", b"\xfd7zXZ")):
                raise ValueError(
                    f"--clusters mmseqs: {path}: MMseqs2 reads FASTA, plain or gzip; convert it first"
                )
