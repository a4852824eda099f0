"""`protperf embed --merge OUT`: the shards of one input become the files that one run would have written."""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from protperf.arguments import check_outputs
from protperf.embed.outputs import SHARD_WORD
from protperf.formats.commit import commit_bytes
from protperf.formats.embedding_merge import merge_embeddings
from protperf.formats.skipped import SOME_LEFT_OUT, skipped_path

_WORDS = re.compile(rf"(\.[a-z_]+)?(\.layer\d+)?\.{SHARD_WORD}")
"""What stands between the stem of OUT and its suffix in the name of a shard."""


def merge_shards(out: Path, *, force: bool) -> int:
    """Merge the files of all shards; return the exit status of the whole.

    Args:
        out: as it was given to the runs with `--shard`.
        force: replace files that are there.

    Raises:
        ValueError: there are none, one is missing or foreign, or an output is taken.
        OSError: the disk is full.
    """
    shards = find_shards(out)
    skipped = sorted(out.parent.glob(f"{glob.escape(out.stem)}.shard-*.skipped.tsv"))
    list_path = skipped_path(out)
    inputs = [*skipped, *(path for paths in shards.values() for path in paths)]
    check_outputs([*shards, list_path], inputs, force=force)
    for path, parts in shards.items():
        count = merge_embeddings(parts, path, anew=force)
        print(
            f"{path}: {count:,} protein{'s' * (count != 1)} out of {len(parts)} shards, which may be removed"
        )
    rows = join_skipped(skipped)
    if not rows:
        list_path.unlink(missing_ok=True)
        return 0
    commit_bytes(list_path, "".join(rows).encode())
    return SOME_LEFT_OUT


def find_shards(out: Path) -> dict[Path, list[Path]]:
    """Return the shards of each file that belongs to `out`: merged file -> shards.

    Raises:
        ValueError: there are none.
    """
    found = defaultdict(list)
    for path in sorted(out.parent.glob(f"{glob.escape(out.stem)}.*{out.suffix}")):
        words = path.name.removeprefix(out.stem).removesuffix(out.suffix)
        if match := _WORDS.fullmatch(words):
            kept = "".join(word for word in match.group(1, 2) if word)
            found[out.with_name(f"{out.stem}{kept}{out.suffix}")].append(path)
    if not found:
        raise ValueError(
            f"{out}: there is no {out.stem}.shard-1-of-N{out.suffix} or the like; give OUT as it was given to the runs with "
            "--shard"
        )
    return dict(found)


def join_skipped(paths: Sequence[Path]) -> list[str]:
    """Return the rows of several lists of left-out records, each once: a shard lists what no shard can read, too."""
    rows: dict[str, None] = {}
    for path in paths:
        rows |= dict.fromkeys(path.read_text(encoding="utf-8").splitlines(keepends=True))
    return list(rows)
