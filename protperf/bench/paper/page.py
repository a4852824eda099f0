"""Tables of docs/paper.md: made of the numbers of the experiments, never typed."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table as Markdown.

    >>> print(markdown_table("ms", ["256", "512"], [("SDPA", ["1.2", "4.8"])]))
    | ms | 256 | 512 |
    |---|---|---|
    | SDPA | 1.2 | 4.8 |
    """
    lines = [(title, *columns), ("---",) * (1 + len(columns)), *((name, *cells) for name, cells in rows)]
    return "\n".join(
        "|---" * len(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines
    )
