"""Read FASTA headers: UniProt `sp|` and `tr|`, UniRef, NCBI `gi|` and its kin, and plain ids.

Nothing here fails: a header of no known form has its first word as id and accession, and empty fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WHITE_SPACE = " \t\n\r\v\f"
"""ASCII white space: what separates words and is dropped from sequences; other spaces are characters like any."""

_FIRST_WORD = re.compile(rf"[^{WHITE_SPACE}]+")
_UNIPROT_FIELD = re.compile(rf"(?:^|[{WHITE_SPACE}])(OS|OX|GN|PE|SV)=")
_UNIREF_FIELD = re.compile(rf"(?:^|[{WHITE_SPACE}])(n|Tax|TaxID|RepID)=")
_OTHER_FIELD = re.compile(rf"[{WHITE_SPACE}][A-Za-z]\w*=")
_UNIREF_ID = re.compile(r"(UniRef(?:100|90|50))_(.+)", re.DOTALL)
_FRAGMENT = re.compile(r"\(Fragments?\)")
_NUMBER = re.compile(r"[0-9]{1,18}")

_DATABASES = frozenset(
    [
        "bbs",
        "dbj",
        "emb",
        "gb",
        "gnl",
        "gpp",
        "lcl",
        "nat",
        "pat",
        "pdb",
        "pir",
        "prf",
        "ref",
        "sp",
        "tpd",
        "tpe",
        "tpg",
        "tr",
    ]
)
"""Tags that stand before a `|` and an accession: UniProt's two and those of NCBI."""


@dataclass(frozen=True)
class Header:
    """What a header says; a field it does not have is `""` or None.

    Attributes:
        id: first word, exactly as written.
        database: `sp`, `tr`, `UniRef90`, ... with any prefix (`contam_sp`).
        accession: the database's identifier (isoform number kept), or the id where there is none.
        entry_name: such as `INS_HUMAN`; of a UniRef cluster that of its representative.
        description: the protein's or the cluster's name.
        organism: scientific name, of a UniRef cluster the common taxon.
        taxon_id: NCBI taxonomy number.
        gene: gene name; may hold spaces.
        evidence: protein existence, 1 (protein level) to 5 (uncertain).
        version: sequence version.
        fragment: the sequence is said to be a fragment.
    """

    id: str
    database: str = ""
    accession: str = ""
    entry_name: str = ""
    description: str = ""
    organism: str = ""
    taxon_id: int | None = None
    gene: str = ""
    evidence: int | None = None
    version: int | None = None
    fragment: bool = False


def parse_header(text: str) -> Header:
    """Read a header line, given without its `>`.

    Source: https://www.uniprot.org/help/fasta-headers; headers before 2018 have no OX, isoforms no PE and SV.

    >>> parse_header("sp|P01308|INS_HUMAN Insulin OS=Homo sapiens OX=9606 GN=INS PE=1 SV=1").gene
    'INS'
    """
    text = text.strip(WHITE_SPACE)
    record_id = first_word(text)
    rest = text[len(record_id) :].strip(WHITE_SPACE)
    uniref = _UNIREF_ID.fullmatch(record_id)
    if uniref:
        return _uniref_header(record_id, uniref.group(1), uniref.group(2), rest)
    database, accession, entry_name = _split_id(record_id)
    description, fields = _split_fields(rest, _UNIPROT_FIELD)
    return Header(
        id=record_id,
        database=database,
        accession=accession,
        entry_name=entry_name,
        description=description,
        organism=fields.get("OS", ""),
        taxon_id=_number(fields.get("OX", "")),
        gene=fields.get("GN", ""),
        evidence=_number(fields.get("PE", "")),
        version=_number(fields.get("SV", "")),
        fragment=bool(_FRAGMENT.search(description)),
    )


def first_word(header: str) -> str:
    """Return a header's id: its first word, split at ASCII white space only; `""` where there is none."""
    match = _FIRST_WORD.search(header)
    return match.group() if match else ""


def _uniref_header(record_id: str, database: str, member: str, rest: str) -> Header:
    description, fields = _split_fields(rest, _UNIREF_FIELD)
    return Header(
        id=record_id,
        database=database,
        accession=member,
        entry_name=fields.get("RepID", ""),
        description=description,
        organism=fields.get("Tax", ""),
        taxon_id=_number(fields.get("TaxID", "")),
        fragment=bool(_FRAGMENT.search(description)),
    )


def _split_id(record_id: str) -> tuple[str, str, str]:
    """Return database, accession and entry name of an id with `|`; the id itself as accession of any other."""
    parts = record_id.split("|")
    if parts[0] == "gi" and len(parts) > 3:
        parts = parts[2:]
    tag = parts[0].rsplit("_", 1)[-1]
    if len(parts) < 2 or tag not in _DATABASES:
        return "", record_id, ""
    if tag == "gnl" and len(parts) > 2:
        return "gnl", parts[2] or record_id, ""
    entry_name = parts[2] if len(parts) > 2 else ""
    return parts[0], parts[1] or entry_name or record_id, entry_name


def _split_fields(rest: str, key: re.Pattern[str]) -> tuple[str, dict[str, str]]:
    """Split `description KEY=value KEY=value`; a value ends at the next `word=`, known or not."""
    found = list(key.finditer(rest))
    starts = [*(match.start() for match in found), len(rest)]
    fields: dict[str, str] = {}
    for match, end in zip(found, starts[1:], strict=True):
        value = rest[match.end() : end]
        fields.setdefault(match.group(1), _OTHER_FIELD.split(value, maxsplit=1)[0].strip(WHITE_SPACE))
    return rest[: starts[0]].strip(WHITE_SPACE), fields


def _number(value: str) -> int | None:
    match = _NUMBER.match(value)
    return int(match.group()) if match else None
