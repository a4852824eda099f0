"""`protperf embed` in many runs: killed, in shards, on several devices, with every kind of output."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import polars
import pytest
import torch
from checkpoints import make_checkpoint
from prepared import random_records, write_fasta
from training import clean_environment, command_line, protperf, start_protperf

import protperf as api
from protperf.embed import blocks, engine
from protperf.embed.__main__ import main
from protperf.formats.contact_head import ContactHead, write_contact_head
from protperf.formats.embeddings import EmbeddingFile, read_embeddings
from protperf.formats.fasta import Record
from protperf.inference.contacts import predict_contacts
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

TOLERANCE = 1e-5

LENGTHS = [300 + 7 * i % 900 for i in range(300)]
"""Residues of 300 proteins: 4 blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `m.ckpt`, proteins `a.fasta` with two equal ones far apart and a bad one, and all of them embedded."""
    folder = tmp_path_factory.mktemp("embed")
    make_checkpoint(folder / "m.ckpt")
    records = random_records(LENGTHS)
    records[290] = ("twin", records[3][1])
    records.insert(100, ("bad", "MK-V"))
    write_fasta(folder / "a.fasta", records)
    assert run(folder, "whole.h5") == 3
    return folder


def run(folder: Path, out: str, *options: str, fasta: str = "a.fasta") -> int:
    return main(
        [
            str(folder / "m.ckpt"),
            str(folder / fasta),
            str(folder / out),
            "--include",
            "mean",
            "per_tok",
            *options,
        ]
    )


def start(folder: Path, out: str, *options: str) -> subprocess.Popen[str]:
    arguments = [
        folder / "m.ckpt",
        folder / "a.fasta",
        folder / out,
        "--include",
        "mean",
        "per_tok",
        *options,
    ]
    return start_protperf("embed", *arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def committed(folder: Path, name: str) -> int:
    """Return the records that a run is done with, as its partial file says."""
    try:
        return json.loads((folder / f".{name}.partial.json").read_text())["state"]["caller"]["records"]
    except (OSError, ValueError):
        return 0


def killed(folder: Path, out: str, *, after: int, number: int = signal.SIGKILL) -> None:
    """Start a run and end it when it is done with so many records."""
    name = Path(out).with_suffix(".per_tok.h5").name
    with start(folder, out) as process:
        while process.poll() is None and committed(folder, name) < after:
            time.sleep(0.001)
        process.send_signal(number)
        process.communicate()
    assert process.returncode != 3, "it was faster than the kill"
    assert not (folder / out).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    folder: Path, number: int, capsys: pytest.CaptureFixture[str]
):
    name = f"killed-{number}.h5"
    killed(folder, name, after=1, number=number)
    done = committed(folder, f"killed-{number}.per_tok.h5")
    assert 0 < done < 300
    computed: list[int] = []
    states = ProteinModel.states

    def counted(self, tokens, documents=None, *, layers):
        computed.append(tokens.numel())
        return states(self, tokens, documents, layers=layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProteinModel, "states", counted)
        assert run(folder, name) == 3
    assert f"going on after {done}" in capsys.readouterr().err
    assert sum(computed) < sum(LENGTHS) * (1 - 0.9 * done / 300)
    for kind in ("mean", "per_tok"):
        ours, whole = (folder / f"{stem}.{kind}.h5" for stem in (f"killed-{number}", "whole"))
        assert ours.read_bytes() == whole.read_bytes()
    assert (folder / f"killed-{number}.h5.skipped.tsv").read_text() == (
        folder / "whole.h5.skipped.tsv"
    ).read_text()
    assert not list(folder.glob(f".killed-{number}*"))


@pytest.mark.parametrize("published", [1, 2, 3])
def test_a_run_killed_while_its_outputs_get_their_names_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: int
):
    """The list of left-out records first, then the files; an exception in `os.replace` stands for the kill."""
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    (tmp_path / "a.fasta").write_text(">x\nMKV\n>bad\nM-V\n>long\n" + "MKTAY" * 20 + "\n>y\nACD\n")
    options = ("--long", "error", "--window", "50")
    assert run(tmp_path, "whole.h5", *options) == 3
    replace, done = os.replace, 0

    def killed_after(source, target):
        nonlocal done
        if Path(target).name in ("e.h5.skipped.tsv", "e.mean.h5", "e.per_tok.h5"):
            done += 1
            if done == published:
                raise SystemExit(137)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed_after)
        with pytest.raises(SystemExit):
            run(tmp_path, "e.h5", *options)
    assert run(tmp_path, "e.h5", *options) == 3
    for name in ("{}.mean.h5", "{}.per_tok.h5", "{}.h5.skipped.tsv"):
        assert (tmp_path / name.format("e")).read_bytes() == (tmp_path / name.format("whole")).read_bytes()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_one_that_goes_on_refuses_another_model_other_options_and_other_records(folder: Path, tmp_path: Path):
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    killed(tmp_path, "e.h5", after=100)
    begun = (tmp_path / ".e.per_tok.h5.partial").read_bytes()
    for options, message in (
        (["--dtype", "float16"], r"dtype 'float32', now it is 'float16'.*--force"),
        (["--toks-per-batch", "100"], r"toks_per_batch 4096, now it is 100"),
        (["--precision", "bf16"], r"precision 'fp32', now it is 'bf16'"),
        (["--id", "header"], r"id 'word', now it is 'header'"),
        (["--gaps", "drop"], r"gaps 'refuse', now it is 'drop'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path, "e.h5", *options)
    text = (tmp_path / "a.fasta").read_text()
    (tmp_path / "b.fasta").write_text(text.replace(">p3\n", ">q3\n"))
    with pytest.raises(ValueError, match=r"the first \d+ records are not those.*--force to begin anew"):
        run(tmp_path, "e.h5", fasta="b.fasta")
    (tmp_path / "b.fasta").write_text(text[:2000])
    with pytest.raises(ValueError, match=r"the first \d+ records are not those"):
        run(tmp_path, "e.h5", fasta="b.fasta")
    make_checkpoint(tmp_path / "m.ckpt", attention="relu")
    with pytest.raises(ValueError, match=r"checkpoint_sha256 '\w+', now it is '\w+'"):
        run(tmp_path, "e.h5")
    assert (tmp_path / ".e.per_tok.h5.partial").read_bytes()[: len(begun)] == begun
    assert run(tmp_path, "e.h5", "--force") == 3
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".")]


def test_two_runs_never_write_one_file(folder: Path, tmp_path: Path):
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    with start(tmp_path, "e.h5") as first:
        while first.poll() is None and not committed(tmp_path, "e.per_tok.h5"):
            time.sleep(0.001)
        first.send_signal(signal.SIGSTOP)
        for options in ([], ["--force"]):
            with pytest.raises(ValueError, match="another process is writing it"):
                run(tmp_path, "e.h5", *options)
        first.send_signal(signal.SIGCONT)
        first.communicate()
    assert first.returncode == 3
    assert (tmp_path / "e.per_tok.h5").read_bytes() == (folder / "whole.per_tok.h5").read_bytes()


def test_equal_sequences_are_computed_once_however_far_apart(folder: Path, tmp_path: Path):
    ids, rows = read_embeddings(folder / "whole.per_tok.h5")
    np.testing.assert_array_equal(rows[ids.index("p3")], rows[ids.index("twin")])
    shown: list[bytes] = []
    states = ProteinModel.states

    def noted(self, tokens, documents=None, *, layers):
        shown.append(tokens.numpy().tobytes())
        return states(self, tokens, documents, layers=layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProteinModel, "states", noted)
        run(folder, "../again.h5", "--force")
    everything = b"".join(shown)
    with open(folder / "a.fasta") as file:
        twin = next(residues for name, residues in zip(file, file, strict=False) if name == ">twin\n").strip()
    assert everything.count(VOCABULARY.encode(twin).tobytes()) == 1


def test_shards_join_to_the_file_of_one_run(folder: Path):
    for number in (2, 3, 1):
        assert run(folder, "parts.h5", "--shard", f"{number}/3") == 3
    with EmbeddingFile(folder / "parts.mean.shard-2-of-3.h5") as file:
        assert 0 < len(file) < 300
    assert main(["--merge", str(folder / "parts.h5")]) == 3
    for kind in ("mean", "per_tok"):
        ids, arrays = read_embeddings(folder / f"parts.{kind}.h5")
        expected_ids, expected = read_embeddings(folder / f"whole.{kind}.h5")
        assert ids == expected_ids
        for ours, theirs in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert (folder / "parts.h5.skipped.tsv").read_text() == (folder / "whole.h5.skipped.tsv").read_text()


def test_a_missing_or_foreign_shard_is_named(folder: Path, tmp_path: Path):
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    run(tmp_path, "e.h5", "--shard", "1/2")
    with pytest.raises(ValueError, match=r"1 of 2 shards are missing: 2; give all"):
        main(["--merge", str(tmp_path / "e.h5")])
    write_fasta(tmp_path / "a.fasta", random_records([40, 50]))
    run(tmp_path, "e.h5", "--shard", "2/2")
    with pytest.raises(ValueError, match=r"its (num_accepted|records_digest) is"):
        main(["--merge", str(tmp_path / "e.h5")])
    with pytest.raises(ValueError, match=r"no\.h5"):
        main(["--merge", str(tmp_path / "no.h5")])


@pytest.mark.slow
def test_several_processes_write_what_one_writes(folder: Path):
    done = protperf(
        "embed", folder / "m.ckpt", folder / "a.fasta", folder / "two.h5", "--include", "mean", "per_tok",
        "--device", "cpu", "--devices", "2", cwd=folder, OMP_NUM_THREADS="2",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "on cpu, cpu" in done.stderr
    for kind in ("mean", "per_tok"):
        ids, arrays = read_embeddings(folder / f"two.{kind}.h5")
        expected_ids, expected = read_embeddings(folder / f"whole.{kind}.h5")
        assert ids == expected_ids
        for ours, theirs in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


def test_every_kind_and_layer_has_its_file(folder: Path, tmp_path: Path):
    sequences = ["MKTAYIAKQR", "MKV"]
    fasta = write_fasta(tmp_path / "a.fasta", [("a", sequences[0]), ("b", sequences[1])])
    argv = [
        str(folder / "m.ckpt"),
        fasta,
        str(tmp_path / "e.h5"),
        "--include",
        "mean",
        "per_tok",
        "bos",
        "logits",
    ]
    assert main([*argv, "--repr_layers", "-1", "0", "--pool", "max"]) == 0
    expected = list(api.load(folder / "m.ckpt", device="cpu").embed(sequences, layers=[0, 2], logits=True))
    for layer in (0, 2):
        for kind, wanted in (
            ("max", [each.layers[layer].max(0) for each in expected]),
            ("per_tok", [each.layers[layer] for each in expected]),
            ("bos", [each.bos[layer] for each in expected]),
        ):
            with EmbeddingFile(tmp_path / f"e.{kind}.layer{layer}.h5") as file:
                assert (file.info.kind, file.info.layer) == (kind, layer)
                for found, right in zip(file, wanted, strict=True):
                    np.testing.assert_allclose(found.array, right, atol=TOLERANCE)
    with h5py.File(tmp_path / "e.logits.h5") as file:
        assert file.attrs["tokens"].split()[:3] == ["A", "C", "D"]
        np.testing.assert_allclose(file["0000000001"][()], expected[1].logits, atol=1e-4)
    assert len(list(tmp_path.glob("*.h5"))) == 7


def test_cls_is_the_state_of_bos_and_a_causal_model_has_none(folder: Path, tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", [("a", "MKTAYIAKQR")])
    assert main([str(folder / "m.ckpt"), fasta, str(tmp_path / "e.h5"), "--pool", "cls"]) == 0
    (expected,) = api.load(folder / "m.ckpt", device="cpu").embed(["MKTAYIAKQR"])
    np.testing.assert_allclose(read_embeddings(tmp_path / "e.h5")[1][0], expected.bos[2], atol=TOLERANCE)
    causal = str(make_checkpoint(tmp_path / "c.ckpt", kind="causal"))
    for options, option in ((["--pool", "cls"], "--pool cls"), (["--include", "bos"], "--include bos")):
        with pytest.raises(ValueError, match=f"{option}: <bos> stands first and a causal model"):
            main([causal, fasta, str(tmp_path / "f.h5"), *options])


def test_long_proteins_are_whole_stitched_or_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    records = random_records([20, 21, 60])
    fasta = write_fasta(tmp_path / "a.fasta", records)
    argv = [str(folder / "m.ckpt"), fasta]
    common = ["--include", "per_tok", "--window", "20"]
    assert main([*argv, str(tmp_path / "whole.h5"), *common]) == 0
    assert main([*argv, str(tmp_path / "window.h5"), *common, "--long", "window"]) == 0
    assert main([*argv, str(tmp_path / "error.h5"), *common, "--long", "error"]) == 3
    whole, window, error = (read_embeddings(tmp_path / f"{name}.h5") for name in ("whole", "window", "error"))
    assert whole[0] == window[0] == ["p0", "p1", "p2"]
    assert error[0] == ["p0"]
    assert [array.shape for array in window[1]] == [(20, 16), (21, 16), (60, 16)]
    np.testing.assert_allclose(window[1][0], whole[1][0], atol=TOLERANCE)
    assert np.abs(window[1][2] - whole[1][2]).max() > 1e-3
    rows = (tmp_path / "error.h5.skipped.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[2:] for row in rows] == [
        ["p1", "", "too_long", "21 residues"],
        ["p2", "", "too_long", "60 residues"],
    ]
    assert "record 'p1' (21 residues) is longer than --window" in capsys.readouterr().err


def test_shards_that_read_otherwise_are_not_merged(folder: Path, tmp_path: Path):
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    run(tmp_path, "e.h5", "--shard", "1/2")
    run(tmp_path, "e.h5", "--shard", "2/2", "--id", "header")
    with pytest.raises(ValueError, match=r"its id is 'header', that of .* is 'word'"):
        main(["--merge", str(tmp_path / "e.h5")])


def test_one_that_goes_on_keeps_its_kinds(folder: Path, tmp_path: Path):
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    killed(tmp_path, "e.h5", after=1)
    with pytest.raises(
        ValueError, match=r"with parts \['mean of layer 2', 'per_tok of layer 2'\], now it is"
    ):
        main(
            [
                *map(str, (tmp_path / "m.ckpt", tmp_path / "a.fasta", tmp_path / "e.h5")),
                "--include",
                "mean",
                "bos",
            ]
        )


def test_merging_takes_its_own_shards_and_joins_their_lists(folder: Path, tmp_path: Path):
    """Names with brackets, and an output whose name begins like another's."""
    shutil.copy(folder / "m.ckpt", tmp_path / "m.ckpt")
    bad = ">bad\nM-V\n>bad\nM-V\n"
    texts = [f">{name}\n{residues}\n" for name, residues in random_records([700, 900] * 60)]
    (tmp_path / "a.fasta").write_text(bad + "".join(texts) + ">far\nM.V\n")
    argv = [str(tmp_path / "m.ckpt"), str(tmp_path / "a.fasta"), "--long", "error", "--window", "800"]
    assert main([*argv, str(tmp_path / "whole.h5")]) == 3
    for out in ("x[1].h5", "x[1].train.h5"):
        for number in (1, 2):
            assert main([*argv, str(tmp_path / out), "--shard", f"{number}/2"]) == 3
    assert main(["--merge", str(tmp_path / "x[1].h5")]) == 3
    assert (tmp_path / "x[1].h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert not (tmp_path / "x[1].train.h5").exists()
    joined, whole = ((tmp_path / f"{name}.h5.skipped.tsv").read_text() for name in ("x[1]", "whole"))
    assert sorted(joined.splitlines()) == sorted(whole.splitlines())
    lines = [int(row.split("\t")[1]) for row in joined.splitlines()[1:]]
    assert lines == sorted(lines)


def test_names_that_a_format_cannot_hold_cost_one_record(folder: Path, tmp_path: Path):
    (tmp_path / "a.fasta").write_bytes(b">a\nMKV\n>b x\0\nMKT\n>c\nMKT\n")
    argv = [str(folder / "m.ckpt"), str(tmp_path / "a.fasta")]
    assert main([*argv, str(tmp_path / "e.npz")]) == 3
    with np.load(tmp_path / "e.npz") as archive:
        assert list(archive["ids"]) == ["a", "c"]
    assert "unfit_name" in (tmp_path / "e.npz.skipped.tsv").read_text()
    assert main([*argv, str(tmp_path / "e.h5")]) == 0


@pytest.mark.slow
def test_processes_of_several_devices_end_with_the_one_that_started_them(folder: Path, tmp_path: Path):
    for name in ("m.ckpt", "a.fasta"):
        shutil.copy(folder / name, tmp_path / name)
    with start(tmp_path, "e.h5", "--devices", "2", "--device", "cpu") as process:
        while process.poll() is None and not committed(tmp_path, "e.per_tok.h5"):
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}/task").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}/task").exists()]


def test_nothing_is_left_where_all_records_are_left_out(folder: Path, tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20, 30]))
    argv = [str(folder / "m.ckpt"), fasta, str(tmp_path / "e.h5")]
    with pytest.raises(
        ValueError, match=r"no record accepted of 2; the first: .*'p0' \(20 residues\) is longer"
    ):
        main([*argv, "--long", "error", "--window", "5"])
    assert os.listdir(tmp_path) == ["a.fasta"]
    assert main(argv) == 0


def test_left_out_records_are_committed_once_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a commit holds does not grow with them, and a run that goes on has all of them in its list."""
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 60)
    records = random_records([50, 20] * 20)
    fasta = write_fasta(tmp_path / "a.fasta", records)
    argv = [str(folder / "m.ckpt"), fasta, str(tmp_path / "e.h5"), "--long", "error", "--window", "30"]
    sizes = []
    states = ProteinModel.states

    def failing(self, tokens, documents=None, *, layers):
        sizes.append(len((tmp_path / ".e.h5.partial.json").read_bytes()) if sizes else 0)
        if len(sizes) == 18:
            raise RuntimeError("power cut")
        return states(self, tokens, documents, layers=layers)

    with monkeypatch.context() as patch:
        patch.setattr(ProteinModel, "states", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            main(argv)
    assert max(sizes[1:]) < min(sizes[1:]) + 20
    assert main(argv) == 3
    rows = (tmp_path / "e.h5.skipped.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[2] for row in rows] == [f"p{i}" for i in range(0, 40, 2)]
    assert read_embeddings(tmp_path / "e.h5")[0] == [f"p{i}" for i in range(1, 40, 2)]
    assert sorted(os.listdir(tmp_path)) == ["a.fasta", "e.h5", "e.h5.skipped.tsv"]


def test_a_block_of_many_short_records_is_planned_in_linear_time():
    """Counted, not timed: how often a sequence is turned into its key."""
    keys = 0

    class Tokens(np.ndarray):
        def tobytes(self, order="C"):
            nonlocal keys
            keys += 1
            return super().tobytes(order)

    records = [
        Record(f"p{i}", f"p{i}", np.array([i // 400, i // 20 % 20, i % 20], np.uint8).view(Tokens), "a", 1)
        for i in range(2000)
    ]
    (block,) = blocks.cut_blocks(records)
    task = engine.Task(block, blocks.Sequences().of(block, lambda record: True), 0)
    assert len(task.proteins) == 2000
    assert keys <= 4 * 2000


def test_the_expected_size_follows_the_records(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 2000))
    assert main([str(folder / "m.ckpt"), fasta, str(tmp_path / "e.h5")]) == 0
    number, unit = re.search(r"takes about ([\d.]+) (kB|MB)", capsys.readouterr().err).groups()
    said = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
    assert 0.5 < said / (tmp_path / "e.h5").stat().st_size < 2


def test_numbers_that_are_not_finite_are_left_out_and_said(folder: Path, tmp_path: Path):
    """float16 ends at 65,504, and this model's input is made larger than that for one amino acid."""
    path = make_checkpoint(tmp_path / "m.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.embedding.weight"][1] = 1e5  # C
    torch.save(content, path)
    fasta = write_fasta(tmp_path / "a.fasta", [("good", "MKV"), ("bad", "MCV"), ("bad-again", "MCV")])
    argv = [str(path), fasta, str(tmp_path / "e.h5"), "--repr-layers", "0", "--include", "per_tok"]
    assert main([*argv, "--dtype", "float16"]) == 3
    assert read_embeddings(tmp_path / "e.h5")[0] == ["good"]
    rows = (tmp_path / "e.h5.skipped.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[2:5] for row in rows] == [
        ["bad", "", "not_finite"],
        ["bad-again", "", "not_finite"],
    ]
    assert main([*argv, "--force"]) == 0


def test_ids_are_the_word_the_header_or_the_accession(folder: Path, tmp_path: Path):
    fasta = write_fasta(
        tmp_path / "a.fasta", [("sp|P01308|INS_HUMAN Insulin OS=Homo sapiens", "MALW"), ("x y", "MKV")]
    )
    for kind, ids in (
        ("word", ["sp|P01308|INS_HUMAN", "x"]),
        ("header", ["sp|P01308|INS_HUMAN Insulin OS=Homo sapiens", "x y"]),
        ("accession", ["P01308", "x"]),
    ):
        assert main([str(folder / "m.ckpt"), fasta, str(tmp_path / f"{kind}.h5"), "--id", kind]) == 0
        assert read_embeddings(tmp_path / f"{kind}.h5")[0] == ids


def test_a_copy_in_a_later_block_of_what_was_left_out_is_left_out_for_the_same_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 60)
    records = random_records([50, 20, 20])
    records.append(("copy", records[0][1]))
    fasta = write_fasta(tmp_path / "a.fasta", records)
    argv = [str(folder / "m.ckpt"), fasta, str(tmp_path / "e.h5"), "--long", "error", "--window", "30"]
    assert main(argv) == 3
    rows = (tmp_path / "e.h5.skipped.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[2:5] for row in rows] == [["p0", "", "too_long"], ["copy", "", "too_long"]]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_records(folder: Path, tmp_path: Path):
    """Measured from outside while the command runs: 8,000 proteins of 50 residues."""
    write_fasta(tmp_path / "a.fasta", random_records([50] * 8_000))
    shutil.copy(folder / "m.ckpt", tmp_path / "m.ckpt")
    command = command_line("embed", tmp_path / "m.ckpt", tmp_path / "a.fasta", tmp_path / "e.h5")
    resident: dict[int, int] = {}
    with subprocess.Popen(
        command, env=clean_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        while child.poll() is None:
            done = committed(tmp_path, "e.h5")
            if found := re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{child.pid}/status").read_text()):
                resident[done] = max(resident.get(done, 0), int(found[1]))
            time.sleep(0.01)
        assert child.communicate()[1].endswith(b"0 left out\n")
    early = max(size for done, size in resident.items() if 0 < done <= 3000)
    assert max(resident) >= 7_000
    assert max(resident.values()) < 1.1 * early


@pytest.mark.parametrize("name", ["e.npz", "e.parquet", "e"])
def test_every_format_holds_the_same_numbers(folder: Path, tmp_path: Path, name: str):
    records = random_records([40, 10, 25])
    records.append(("copy/of p0", records[0][1]))
    fasta = write_fasta(tmp_path / "a.fasta", records)
    argv = [str(folder / "m.ckpt"), fasta]
    assert main([*argv, str(tmp_path / "e.h5"), "--include", "per_tok", "--id", "header"]) == 0
    options = [] if "." in name else ["--format", "pt"]
    assert main([*argv, str(tmp_path / name), "--include", "per_tok", "--id", "header", *options]) == 0
    ids, expected = read_embeddings(tmp_path / "e.h5")
    if name == "e.npz":
        with np.load(tmp_path / name) as archive:
            found = dict(zip(archive["ids"], [archive[f"{i:010d}"] for i in range(4)], strict=True))
    elif name == "e.parquet":
        table = polars.read_parquet(tmp_path / name)
        found = dict(zip(table["id"], [np.array(rows.to_list()) for rows in table["embedding"]], strict=True))
    else:
        files = [torch.load(path, weights_only=True) for path in (tmp_path / name).glob("*.pt")]
        found = {each["label"]: each["representations"][2].numpy() for each in files}
        assert (tmp_path / name / "p1.pt").exists()
    assert found.keys() == set(ids) == {header for header, _ in records}
    for each, right in zip(ids, expected, strict=True):
        np.testing.assert_allclose(found[each], right, atol=TOLERANCE)
    with pytest.raises(ValueError, match="exists already"):
        main([*argv, str(tmp_path / name), "--include", "per_tok", *options])


@pytest.mark.parametrize("name", ["e.npz", "e"])
def test_other_formats_go_on_too_and_copy_what_an_earlier_run_wrote(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """The third block fails at first; then it holds a copy of a protein of the first block."""
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 60)
    records = random_records([50, 50, 40])
    records += [("twin", records[0][1]), ("last", "MKV")]
    fasta = write_fasta(tmp_path / "a.fasta", records)
    options = ["--include", "mean", "per_tok", *([] if "." in name else ["--format", "pt"])]
    argv = [str(folder / "m.ckpt"), fasta]
    assert main([*argv, str(tmp_path / f"whole{name}"), *options]) == 0
    states = ProteinModel.states

    def failing(self, tokens, documents=None, *, layers):
        if tokens.numel() == 42:
            raise RuntimeError("power cut")
        return states(self, tokens, documents, layers=layers)

    with monkeypatch.context() as patch:
        patch.setattr(ProteinModel, "states", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            main([*argv, str(tmp_path / name), *options])
    assert main([*argv, str(tmp_path / name), *options]) == 0
    ours = sorted(tmp_path.glob("e/*" if name == "e" else "e.*.npz"))
    whole = sorted(tmp_path.glob("wholee/*" if name == "e" else "wholee.*.npz"))
    assert len(ours) == len(whole) == (6 if name == "e" else 2)
    for one, other in zip(ours, whole, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".")]


def test_contacts_come_from_the_head_beside_the_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copy(folder / "m.ckpt", tmp_path / "m.ckpt")
    fasta = write_fasta(tmp_path / "a.fasta", [("a", "MKTAYIAKQRQISFVK"), ("b", "MKV")])
    argv = [str(tmp_path / "m.ckpt"), fasta, str(tmp_path / "e.h5"), "--include", "contacts"]
    with pytest.raises(ValueError, match=r"contact_head\.json: no such file.*protperf maps contacts"):
        main(argv)
    weights = np.array([[3.0, -1.0], [0.5, 2.0]])
    write_contact_head(tmp_path / "contact_head.json", ContactHead(weights, -2.0, {}))
    assert main(argv) == 0
    model = api.load(tmp_path / "m.ckpt", device="cpu").model
    expected = predict_contacts(model, VOCABULARY.encode("MKTAYIAKQRQISFVK"), ContactHead(weights, -2.0, {}))
    _, (found, small) = read_embeddings(tmp_path / "e.h5")
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert small.shape == (3, 3)
    assert "was fitted to an unknown model, not to" in capsys.readouterr().err
    write_contact_head(tmp_path / "other.json", ContactHead(weights[:1], -2.0, {}))
    with pytest.raises(ValueError, match=r"other\.json: the contact head has weights for 1 layers"):
        main([*argv, "--force", "--contact-head", str(tmp_path / "other.json")])
