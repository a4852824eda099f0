"""`protperf embed --merge OUT`: the shards of one input become the files that one run would have written."""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from protperf.arguments import check_outputs
from protperf.embed.job import name_skipped
from protperf.embed.outputs import SHARD_WORD
from protperf.formats.commit import commit_bytes
from protperf.formats.embedding_merge import merge_embeddings
from protperf.formats.embeddings import KINDS
from protperf.formats.skipped import SOME_LEFT_OUT, skipped_path

_WORDS = re.compile(rf"(\.(?:{'|'.join(KINDS)}))?(\.layer\d+)?\.{SHARD_WORD}")
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
    count = max(map(len, shards.values()))
    skipped = [name_skipped(out, (number, count)) for number in range(1, count + 1)]
    list_path = skipped_path(out)
    inputs = [*skipped, *(path for paths in shards.values() for path in paths)]
    check_outputs([*shards, list_path], inputs, force=force)
    for path, parts in shards.items():
        proteins = merge_embeddings(parts, path, anew=force)
        print(
            f"{path}: {proteins:,} protein{'s' * (proteins != 1)} out of {len(parts)} shards, which may be removed"
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
    """Return the rows of the lists of all shards, in the order of the files and of their lines; a header if there are any.

    Each list begins with what no shard could read; what follows is the shard's own.

    Args:
        paths: the list of each shard; one that is not there has no rows.
    """
    lists = [
        path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else [] for path in paths
    ]
    common = next(
        (place for place, rows in enumerate(zip(*lists, strict=False)) if len({*rows}) > 1),
        min(map(len, lists)),
    )
    if not any(lists):
        return []
    header = max(lists, key=len)[0]
    files: dict[str, int] = {}
    rows = [*lists[0][1:common], *(row for own in lists for row in own[max(1, common) :])]
    order = [files.setdefault(row.split("\t")[0], len(files)) for row in rows]
    placed = sorted(zip(order, rows, strict=True), key=lambda pair: (pair[0], int(pair[1].split("\t")[1])))
    return [header, *(row for _, row in placed)]
