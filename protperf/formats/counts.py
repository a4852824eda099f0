"""What a reading has met: accepted records, left-out ones, and what was repaired."""

from __future__ import annotations

from collections import Counter

from protperf.formats.headers import WHITE_SPACE, first_word
from protperf.formats.records import (
    REASONS,
    REPAIRS,
    Policy,
    RawRecord,
    Record,
    Skipped,
    decoded,
    judge,
    num_residues,
)

LONGEST_KNOWN = 100_000
"""Residues; the longest proteins known have fewer (titin 35,000; the longest in UniProtKB about 46,000)."""

NUM_EXAMPLES = 3
"""Left-out records kept in memory for each reason; all of them go to `skipped_path`."""


class Counts:
    """What a reading has met so far.

    Attributes:
        records: records read: accepted and left out.
        accepted: records handed on.
        residues: residues (and mask tokens) in them.
        skipped: left-out records by reason (a key of `REASONS`).
        skipped_examples: the first few left-out records of each reason.
        repaired: what was changed in accepted input or is worth a look, by name (a key of `REPAIRS`).
        repaired_examples: where each of these was met first.
    """

    def __init__(self) -> None:
        self.records = 0
        self.accepted = 0
        self.residues = 0
        self.skipped: Counter[str] = Counter()
        self.skipped_examples: list[Skipped] = []
        self.repaired: Counter[str] = Counter()
        self.repaired_examples: dict[str, str] = {}

    def accept(self, record: Record, repaired: Counter[str], place: str) -> None:
        """Count a record that is handed on, and what was repaired in it."""
        self.records += 1
        self.accepted += 1
        self.residues += record.tokens.size
        for name, count in repaired.items():
            self.repair(name, place, count)

    def accept_many(self, records: int, residues: int) -> None:
        """Count records that are handed on as they are."""
        self.records += records
        self.accepted += records
        self.residues += residues

    def skip(self, skipped: Skipped) -> None:
        """Count a record that is left out."""
        self.records += 1
        self.skipped[skipped.reason] += 1
        if self.skipped[skipped.reason] <= NUM_EXAMPLES:
            self.skipped_examples.append(skipped)

    def reject(self, skipped: Skipped, residues: int) -> None:
        """Count as left out a record that was counted as accepted."""
        self.taken(self.accepted - 1, self.residues - residues)
        self.skip(skipped)

    def taken(self, records: int, residues: int) -> None:
        """Count so many records as accepted: a reading that was stopped had accepted more than it handed on."""
        self.accepted, self.residues = records, residues
        self.records = records + self.skipped.total()

    def repair(self, name: str, place: str, count: int = 1) -> None:
        """Count something that was changed or is worth a look."""
        self.repaired[name] += count
        self.repaired_examples.setdefault(name, place)

    def summary(self) -> list[str]:
        """Return the reading in lines: totals, a line for each reason, a line for each repair or note."""
        left_out = self.skipped.total()
        lines = [
            f"read {self.records:,} records: {self.accepted:,} accepted ({self.residues:,} residues), {left_out:,} left out"
        ]
        for reason in REASONS:
            if self.skipped[reason]:
                first = next(example for example in self.skipped_examples if example.reason == reason)
                lines.append(f"left out, {reason}: {self.skipped[reason]:,} (first: {first.message})")
        for name, words in REPAIRS.items():
            if self.repaired[name]:
                lines.append(f"{words}: {self.repaired[name]:,} (first: {self.repaired_examples[name]})")
        return lines


def settle(raw: RawRecord, policy: Policy, counts: Counts) -> Record | Skipped:
    """Turn a raw record into an accepted one (and count it) or into one to be left out."""
    header, is_utf8 = decoded(raw.header)
    header = header.strip(WHITE_SPACE)
    record_id = first_word(header)
    if not record_id:
        return Skipped(raw.path, raw.line, "", None, "no_name", ">", raw.unit)
    verdict = judge(raw.body, policy)
    if len(raw.body) > LONGEST_KNOWN and num_residues(raw.body) > LONGEST_KNOWN:
        counts.repair("very_long", raw.place)
    if verdict.tokens is None:
        return raw.skipped(record_id, verdict)
    repaired = verdict.repaired if is_utf8 else verdict.repaired + Counter(header_encoding=1)
    record = Record(record_id, header, verdict.tokens, raw.path, raw.line, raw.unit)
    counts.accept(record, repaired, raw.place)
    return record
