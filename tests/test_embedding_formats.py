"""Embedding files of every format: read here as strangers read them, merged from shards, and refused where they differ."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars
import pytest
from embedding_outputs import DIM, HOSTILE_IDS, content, describe, make, write
from prepared import REPOSITORY

from protperf.formats import FormatError
from protperf.formats.embedding_merge import WRITERS, format_of, merge_embeddings, open_embeddings
from protperf.formats.embeddings import DTYPES, KINDS, Embedding, EmbeddingFile, EmbeddingInfo, sequence_key
from protperf.vocab import VOCABULARY

KEPT = Path(__file__).parent / "kept"
NUMBER = 20


def shape_of(kind: str, length: int) -> tuple[int, ...]:
    """Return the shape that docs/formats.md gives."""
    return {"per_tok": (length, DIM), "logits": (length, 36), "contacts": (length, length)}.get(kind, (DIM,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_comes_back_exactly(tmp_path: Path, name: str, kind: str, dtype: str):
    info = describe(kind, dtype=dtype, layer=3)
    write(tmp_path / "e", name, info, range(NUMBER))
    assert format_of(tmp_path / "e") == name
    with open_embeddings(tmp_path / "e") as file:
        found = list(file)
        assert (len(file), file.info) == (NUMBER, info)
    for number, embedding in enumerate(found):
        expected = make(number, info)
        assert embedding[:3] == expected[:3]
        assert embedding.array.shape == shape_of(kind, expected.num_residues)
        assert embedding.array.dtype == dtype
        np.testing.assert_array_equal(embedding.array, expected.array.astype(dtype))


def test_strangers_read_h5_with_h5py_alone(tmp_path: Path):
    info = describe("logits", layer=2)
    write(tmp_path / "e.h5", "h5", info, range(NUMBER))
    with h5py.File(tmp_path / "e.h5") as file:
        assert list(file) == [f"{number:010d}" for number in range(NUMBER)]
        for number, dataset in enumerate(file.values()):
            expected = make(number, info)
            np.testing.assert_array_equal(dataset[:], expected.array)
            if "\0" in expected.id:
                assert dataset.attrs["original_id"].tobytes().decode() == expected.id
            else:
                assert dataset.attrs["original_id"] == expected.id
            assert ("header" in dataset.attrs) == (expected.header != expected.id)
        assert file.attrs["tokens"].split() == list(VOCABULARY.tokens)
        assert (file.attrs["layer"], file.attrs["num_records"]) == (2, NUMBER)
        assert "num_residues" not in file.attrs
    write(tmp_path / "mean.h5", "h5", describe(), range(NUMBER))
    with h5py.File(tmp_path / "mean.h5") as file:
        lengths = [make(number, info).num_residues for number in range(NUMBER)]
        assert file.attrs["num_residues"].tolist() == lengths


def test_strangers_read_npz_with_numpy_alone(tmp_path: Path):
    info = describe("per_tok")
    write(tmp_path / "e.npz", "npz", info, range(NUMBER))
    with np.load(tmp_path / "e.npz") as file:
        expected = [make(number, info) for number in range(NUMBER)]
        assert file["ids"].tolist() == [each.id for each in expected]
        assert file["headers"].tolist() == [each.header for each in expected]
        assert file["num_residues"].tolist() == [each.num_residues for each in expected]
        for number, each in enumerate(expected):
            np.testing.assert_array_equal(file[f"{number:010d}"], each.array)
        about = json.loads(str(file["about"]))
        assert (about["kind"], about["checkpoint"], about["num_records"]) == ("per_tok", "best.ckpt", NUMBER)


def test_strangers_read_parquet_with_polars(tmp_path: Path):
    expected = [make(number, describe()) for number in range(NUMBER)]
    write(tmp_path / "e.parquet", "parquet", describe(), range(NUMBER))
    table = polars.read_parquet(tmp_path / "e.parquet")
    assert table.columns == ["id", "header", "num_residues", "number", "embedding"]
    assert table["id"].to_list() == [each.id for each in expected]
    assert table["number"].to_list() == list(range(NUMBER))
    assert table.schema["embedding"] == polars.Array(polars.Float32, DIM)
    np.testing.assert_array_equal(table["embedding"].to_numpy(), np.stack([each.array for each in expected]))
    for kind in ("per_tok", "contacts"):
        write(tmp_path / kind, "parquet", describe(kind), range(NUMBER))
        rows = polars.read_parquet(tmp_path / kind)["embedding"].to_list()
        for number, row in enumerate(rows):
            array = make(number, describe(kind)).array
            np.testing.assert_array_equal(np.array(row, np.float32).reshape(array.shape), array)


def test_parquet_without_pyarrow_is_one_line_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'protperf\[parquet\]'"):
        WRITERS["parquet"](tmp_path / "e", describe())
    assert list(tmp_path.iterdir()) == []


def test_row_groups_of_parquet_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import pyarrow.parquet

    monkeypatch.setattr("protperf.formats.embedding_parquet.GROUP_ROWS", 6)
    write(tmp_path / "e", "parquet", describe(), range(NUMBER))
    found = pyarrow.parquet.ParquetFile(tmp_path / "e").metadata
    assert [found.row_group(place).num_rows for place in range(found.num_row_groups)] == [6, 6, 6, 2]


@pytest.mark.parametrize("name", WRITERS)
def test_bytes_depend_on_the_proteins_alone(tmp_path: Path, name: str):
    for every in (1, 2, 50):
        write(tmp_path / f"{every}", name, describe("per_tok"), range(NUMBER), commit_every=every)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "50")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("keys", ["number", "sequence"])
@pytest.mark.parametrize("way", ["in turn", "in runs", "one is empty"])
def test_merged_shards_are_the_bytes_of_one_run(tmp_path: Path, name: str, keys: str, way: str):
    def shard_of(number: int) -> int:
        return {"in turn": number % 3, "in runs": number // 7 % 3, "one is empty": number % 2}[way]

    numbers = [number for number in range(NUMBER) if number != 4]  # a record that was left out
    for shard in (None, 0, 1, 2):
        info = describe("per_tok", keys=keys)
        path = tmp_path / "whole"
        if shard is not None:
            info, path = replace(info, shard=shard, num_shards=3), tmp_path / f"{shard}"
        with WRITERS[name](path, info) as writer:
            for number in numbers:
                if shard in (None, shard_of(number)):
                    key = sequence_key("M" * (number // 2)) if keys == "sequence" else ""
                    writer.add(number, make(number, info)._replace(key=key))
            writer.finish({"records_digest": "abc", "total_records": NUMBER})
    assert merge_embeddings([tmp_path / each for each in "201"], tmp_path / "merged") == NUMBER - 1
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


def make_shard(path: Path, shard: int, *, name: str = "h5", digest: str = "abc", **others: Any) -> Path:
    info = describe(**{"shard": shard, "num_shards": 3, **others})
    with WRITERS[name](path, info) as writer:
        writer.add(shard, make(shard, info))
        writer.finish({"records_digest": digest})
    return path


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path):
    zero, one, two = (make_shard(tmp_path / f"{shard}", shard) for shard in range(3))
    whole = make_shard(tmp_path / "whole", 0, num_shards=1)
    for paths, message in (
        ([zero, two], "1 of 3 shards are missing: 2; give all"),
        ([zero, one, one, two], "1: shard 2 again, as .*1; give each once"),
        (
            [zero, make_shard(tmp_path / "x", 1, digest="xyz"), two],
            "x: its records_digest is 'xyz', that of .*0 is 'abc'",
        ),
        ([zero, make_shard(tmp_path / "y", 1, precision="bf16"), two], "y: its precision is 'bf16'.*'fp32'"),
        ([zero, make_shard(tmp_path / "z", 1, name="npz"), two], "z: is npz, but .*0 is h5"),
        ([whole, one, two], "whole: no shard but a whole file"),
        ([], "no shard"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            merge_embeddings(paths, tmp_path / "out")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is one of the shards"):
        merge_embeddings([zero, one, two], one)
    with WRITERS["h5"](tmp_path / "again", describe(shard=1, num_shards=3)) as writer:
        writer.add(0, make(0, describe()))
        writer.finish({"records_digest": "abc"})
    with pytest.raises(FormatError, match=r"again: record 0 is in .*0 too; embed again"):
        merge_embeddings([zero, tmp_path / "again", two], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_keys_of_sequences_are_those_that_biotrainer_looks_up(tmp_path: Path):
    """What biotrainer 1.4.0 does (trainers/steps/embedding_step.py): file[key] for the key of each sequence."""
    sequences = ["MKV", "ACDEF", "MKV", "W"]
    info = describe("per_tok", keys="sequence")
    arrays = [np.full((len(text), DIM), place, np.float32) for place, text in enumerate(sequences)]
    with WRITERS["h5"](tmp_path / "e.h5", info) as writer:
        for place, text in enumerate(sequences):
            writer.add(
                place, Embedding(f"p{place}", f"p{place}", len(text), arrays[place], sequence_key(text))
            )
    keys = [hashlib.sha256(f"{text}_{len(text)}".encode()).hexdigest() for text in sequences]
    with h5py.File(tmp_path / "e.h5") as file:
        for place in (0, 1, 3):
            assert keys[place] in file
            np.testing.assert_array_equal(file[keys[place]][:], arrays[place])
            assert file[keys[place]].attrs["original_id"] == f"p{place}"
        assert list(file) == [keys[0], keys[1], f"{keys[2]}_0000000002", keys[3]]
    with EmbeddingFile(tmp_path / "e.h5") as file:
        assert [each.id for each in file] == ["p0", "p1", "p2", "p3"]
        assert [each.key for each in file] == keys


@pytest.mark.filterwarnings("ignore")
def test_biotrainer_itself_loads_a_file(tmp_path: Path):
    """With its own code, where it is installed; it is no dependency, even of tests, for its size."""
    service = pytest.importorskip("biotrainer.embedders.services.embedding_service").EmbeddingService
    hashing = pytest.importorskip("biotrainer.utilities.hashing")
    for kind in ("mean", "per_tok"):
        info = describe(kind, keys="sequence")
        sequences = ["M" * make(number, info).num_residues + "KV" * number for number in range(NUMBER)]
        proteins = [
            make(number, info)._replace(key=sequence_key(text)) for number, text in enumerate(sequences)
        ]
        with WRITERS["h5"](tmp_path / f"{kind}.h5", info) as writer:
            for number, protein in enumerate(proteins):
                writer.add(number, protein)
        keys = [hashing.calculate_sequence_hash(text) for text in sequences]
        found = service.load_embeddings(str(tmp_path / f"{kind}.h5"), ids_to_load=keys)
        for key, protein in zip(keys, proteins, strict=True):
            np.testing.assert_array_equal(found[key].numpy(), protein.array)


@pytest.mark.parametrize(
    ("version", "kind", "rows"), [(1, "mean", False), (1, "per_tok", True), (2, "mean", False)]
)
def test_old_files_are_read(version: int, kind: str, rows: bool):
    """Written by protperf 0.1.0 before version 2, and before headers said where attributes lie; the numbers are those put in."""
    with EmbeddingFile(KEPT / f"embeddings_v{version}_{kind}.h5") as file:
        found = list(file)
        assert file.info == EmbeddingInfo(kind, 3, "best.ckpt", "0123456789abcdef" * 4, "masked")
    assert [each.id for each in found] == ["sp|P01308|INS_HUMAN", "a/b", "nul\0id"]
    assert [each.header for each in found] == [f"{each.id} OS=Homo sapiens" for each in found]
    assert [each.num_residues for each in found] == [4, 1, 2]
    for place, each in enumerate(found):
        array = np.arange(each.num_residues * 3).reshape(-1, 3) + 10 * place
        np.testing.assert_array_equal(each.array, array if rows else array.mean(0))


@pytest.mark.parametrize("name", WRITERS)
def test_number_that_half_precision_cannot_hold_is_an_error(tmp_path: Path, name: str):
    with (
        pytest.raises(ValueError, match=r"record 'q' has a number of 7e\+04, which float16.*float32"),
        WRITERS[name](tmp_path / "e", describe(dtype="float16")) as writer,
    ):
        writer.add(0, Embedding("q", "q", 2, np.array([1, -7e4, 0, 0], np.float32)))


def test_each_format_says_which_names_it_can_hold(tmp_path: Path):
    """A NUL: NumPy drops one at the end, HDF5 stores such a text as bytes, of which an attribute takes 64 kB."""
    names = {"plain": "q x", "nul": "q\0x", "at the end": "q\0", "long": "\0" + "x" * 70_000}
    expected = {
        "h5": {"plain", "nul", "at the end"},
        "npz": {"plain", "nul", "long"},
        "parquet": set(names),
    }
    for name, allowed in expected.items():
        with WRITERS[name](tmp_path / name, describe()) as writer:
            assert {kind for kind, text in names.items() if writer.can_name("q", text)} == allowed


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_and_foreign_files_are_one_line(tmp_path: Path, name: str):
    path = tmp_path / "e"
    write(path, name, describe("per_tok"), range(3))
    whole = path.read_bytes()
    for data in (whole[:-30], whole[:100], b"hello", b""):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"e: no (readable )?embedding file") as caught:
            open_embeddings(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no such file"):
        open_embeddings(tmp_path / "none")


def test_hostile_ids_are_hostile():
    assert len({each.lower() for each in HOSTILE_IDS}) < len(HOSTILE_IDS)


@pytest.mark.slow
def test_100_000_vectors_take_a_ninth_more_than_their_numbers_and_flat_memory(tmp_path: Path):
    script = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
import numpy as np
from protperf.formats.embedding_h5 import H5Writer
from protperf.formats.embeddings import Embedding, EmbeddingInfo
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
vector, marks = np.ones(512, np.float32), []
with H5Writer(Path("e.h5"), EmbeddingInfo("mean", 512, "best.ckpt", "0" * 64, "masked")) as writer:
    for number in range(100_000):
        writer.add(number, Embedding(f"p{{number}}", f"p{{number}}", 50, vector))
        if number % 2_000 == 1_999:
            writer.commit({{"done": number + 1}})
        if number % 10_000 == 9_999:
            marks.append(resident())
print(max(marks) / marks[0])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert float(done.stdout) < 1.1
    assert (tmp_path / "e.h5").stat().st_size < (1 + 1 / 9) * 100_000 * 512 * 4
    with EmbeddingFile(tmp_path / "e.h5") as file:
        assert (len(file), file[99_999].id, file[77].num_residues) == (100_000, "p99999", 50)
