"""Read UniProt `.dat`, UniProt XML and GenBank entries through `Bio.SeqIO` (imported only when such a file is met)."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from typing import Any

from protperf.formats import FormatError
from protperf.formats.headers import WHITE_SPACE
from protperf.formats.records import RawRecord
from protperf.formats.streams import PIECE_SIZE, SequenceStream

KINDS = {
    "swiss": "UniProt .dat",
    "uniprot-xml": "UniProt XML",
    "genbank": "GenPept",
    "genbank-cds": "GenBank",
}
"""`Bio.SeqIO` format names, with the words that messages use."""


LARGEST_ENTRY = 32 << 20
"""Bytes of text; the largest of UniProt have a few million."""
LARGEST_GENOME = 512 << 20
"""Bytes of an entry of nucleotides, which may be a chromosome."""
MOST_LINES = 1 << 18
"""Of an entry of proteins."""
MOST_TAGS = 1 << 20
"""And attributes of tags, of an entry in XML."""
MOST_KEPT_LINES = 1 << 22
"""Of an entry of nucleotides, before these; a human chromosome has about a million."""

_EVIDENCE = ("protein", "transcript", "inferred from homology", "predicted", "uncertain")
_DIGITS = ("1", "2", "3", "4", "5")


def entries(stream: SequenceStream) -> Iterator[RawRecord]:
    """Yield the entries of a file; of GenBank nucleotides the translation of each coding sequence.

    Raises:
        FormatError: the file is cut short, an entry has no end, or Biopython cannot read it.
    """
    is_xml = stream.kind == "uniprot-xml"
    encoding = "utf-8" if is_xml else "latin-1"
    most: dict[str, Any] = {"most": LARGEST_ENTRY, "marks": (b"\n", b"\r"), "most_marks": MOST_LINES}
    if is_xml:
        most |= {"marks": (b"<", b"="), "most_marks": MOST_TAGS}
    elif stream.kind == "genbank-cds":
        most = {"most": LARGEST_GENOME}
    stream.begin_entry(1, **most)
    for number, entry in enumerate(_parsed(stream), 1):
        stream.begin_entry(number + 1, **most)
        if entry.annotations.get("molecule_type") not in ("protein", None):
            raise FormatError(
                f"{stream.place}: entry {number} is nucleotide in a file that begins with proteins; split the file"
            )
        header = _header(entry).encode(encoding)
        yield RawRecord(stream.place, number, header, _residues(entry), [number], "entry")
    if not is_xml and not stream.tail.rstrip().endswith(b"//"):
        raise FormatError(f"{stream.place}: truncated: the last entry has no // line; get the file again")


class _GenBankLines(io.TextIOWrapper):
    """The lines of a stream; those before the nucleotides of an entry, which Biopython keeps, are counted."""

    def __init__(self, stream: SequenceStream) -> None:
        super().__init__(io.BufferedReader(stream, PIECE_SIZE), encoding="latin-1", newline=None)
        self._stream = stream
        self._kept, self._keeping = 0, True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # as io's own has it
        """Return the next line."""
        line = super().readline(size)
        if line[:2] == "//":
            self._kept, self._keeping = 0, True
        elif line[:12].rstrip() == "ORIGIN":
            self._keeping = False
        self._kept += self._keeping
        if self._kept > MOST_KEPT_LINES:
            raise self._stream.too_large(f"{MOST_KEPT_LINES:,} lines before its nucleotides")
        return line


def _parsed(stream: SequenceStream) -> Iterator[Any]:
    """Yield `SeqRecord`s; every failure inside Biopython becomes one line, its warnings stay inside."""
    from Bio import SeqIO

    handle: Any
    if stream.kind == "uniprot-xml":
        handle = io.BufferedReader(stream)
    else:
        handle = _GenBankLines(stream) if stream.kind == "genbank-cds" else stream.text()
    parser: Any = None
    number = 0
    while True:
        number += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parser = parser or SeqIO.parse(handle, stream.kind)
                entry = next(parser)
        except StopIteration:
            return
        except FormatError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or "it ends too early or is malformed"
            raise FormatError(
                f"{stream.place}: entry {number} is damaged or no {KINDS[stream.kind]}: {reason}"
            ) from error
        yield entry


def _residues(entry: Any) -> bytes:
    from Bio.Seq import UndefinedSequenceError

    try:
        return bytes(entry.seq) if entry.seq is not None else b""
    except UndefinedSequenceError:
        return b""


def _header(entry: Any) -> str:
    """Write id, name and the fields OS, OX, GN and PE as a FASTA header does."""
    notes = entry.annotations
    name = entry.description
    record_id = next((word for word in (entry.id, entry.name) if not word.startswith("<unknown")), "")
    full_name = re.search(r"(?:RecName|SubName): Full=([^;{]+)", name)
    if full_name:
        fragment = " (Fragment)" if re.search(r"Flags:[^:]*Fragment", name) else ""
        name = full_name.group(1).strip() + fragment
    elif "sequence_fragment" in notes:
        name += " (Fragment)"
    fields = {
        "OS": notes.get("organism"),
        "OX": _first(notes.get("ncbi_taxid")) or _taxon(entry.dbxrefs),
        "GN": _gene(notes),
        "PE": _evidence(notes),
    }
    words = [record_id, "" if name.startswith("<unknown") else name]
    words += [f"{key}={value}" for key, value in fields.items() if value]
    return re.sub(rf"[{WHITE_SPACE}]+", " ", " ".join(words)).strip(" ")


def _gene(notes: dict[str, Any]) -> str:
    genes = notes.get("gene_name") or notes.get("gene_name_primary") or notes.get("gene") or ""
    gene = _first(genes)
    name = str(gene.get("Name", "")) if isinstance(gene, dict) else str(gene)
    return name.split(" {", 1)[0]


def _taxon(references: list[str]) -> str:
    """Return the taxonomy number that UniProt XML has among the cross-references."""
    prefix = "NCBI Taxonomy:"
    return next((name.removeprefix(prefix) for name in references if name.startswith(prefix)), "")


def _evidence(notes: dict[str, Any]) -> str:
    """Return the level of protein existence, a digit: `.dat` has it as a number, XML in words."""
    found = str(_first(notes.get("protein_existence") or notes.get("proteinExistence") or ""))
    words = found.lower().removeprefix("evidence at ").removesuffix(" level")
    return str(_EVIDENCE.index(words) + 1) if words in _EVIDENCE else found if found in _DIGITS else ""


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value
