"""`protperf embed`: the right rows under the right ids, whole proteins, and honest ends."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from prepared import random_records, read_fasta, write_fasta

from protperf.checkpoint import load_model
from protperf.embed import blocks, engine, job
from protperf.embed.__main__ import main
from protperf.embed.options import parse
from protperf.formats import FormatError
from protperf.formats.embeddings import read_embeddings
from protperf.formats.headers import parse_header
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

TOLERANCE = 1e-5
"""float32 sums in another order; hidden states are of order one after the final norm."""

SHARED = Path(os.environ.get("PROTPERF_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "step=00000007.ckpt"))


def states_alone(checkpoint: str | Path, residues: str) -> np.ndarray:
    """Ask the model about one protein, unpadded, and cut `<bos>` and `<eos>` off by hand."""
    tokens = [VOCABULARY.bos, *VOCABULARY.encode(residues).tolist(), VOCABULARY.eos]
    with torch.no_grad():
        return load_model(checkpoint).model(torch.tensor([tokens]))[0, 1:-1].numpy()


def per_residue(path: Path) -> dict[str, np.ndarray]:
    return dict(zip(*read_embeddings(path), strict=True))


@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        ("favor", "masked"),
        ("relu", "causal"),
        ("softmax", "masked"),
        ("favor_hyperbolic", "causal"),
        ("reformer", "masked"),
    ],
)
def test_rows_are_those_of_the_model_on_each_protein_alone(tmp_path: Path, attention: str, kind: str):
    model = make_checkpoint(tmp_path / "m.ckpt", attention=attention, kind=kind)
    records = random_records([5, 1, 130, 64, 2, 300, 65, 127, 128])
    fasta = write_fasta(tmp_path / "a.fasta", records)
    assert main([str(model), fasta, str(tmp_path / "e.h5"), "--include", "mean", "per_tok"]) == 0
    ids, rows = read_embeddings(tmp_path / "e.per_tok.h5")
    pooled_ids, means = read_embeddings(tmp_path / "e.mean.h5")
    assert ids == pooled_ids == [name for name, _ in records]
    for (_, residues), found, mean in zip(records, rows, means, strict=True):
        expected = states_alone(model, residues)
        assert found.shape == (len(residues), 16)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        np.testing.assert_allclose(mean, expected.mean(0), atol=TOLERANCE)


def test_batch_budget_never_matters(tmp_path: Path, checkpoint: str):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([3, 200, 17, 90, 91, 92, 1, 400, 33]))
    for budget in ("1", "100", "1000", "100000"):
        argv = [checkpoint, fasta, str(tmp_path / f"{budget}.h5"), "--include", "per_tok"]
        assert main([*argv, "--toks_per_batch", budget]) == 0
    expected = per_residue(tmp_path / "1.h5")
    for budget in ("100", "1000", "100000"):
        found = per_residue(tmp_path / f"{budget}.h5")
        assert list(found) == list(expected)
        for name, rows in expected.items():
            np.testing.assert_allclose(found[name], rows, atol=TOLERANCE)


def test_blocks_keep_the_order_and_the_memory(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    """However many records there are, only a block of them is held."""
    records = random_records([10 + i % 37 for i in range(300)])
    fasta = write_fasta(tmp_path / "a.fasta", records)
    waiting: list[int] = []
    written = 0

    class Reader(job.SequenceReader):
        def __iter__(self):
            for record in super().__iter__():
                waiting.append(len(waiting) - written)
                yield record

    add = engine.Engine._add

    def counted(*arguments):
        nonlocal written
        written += 1
        add(*arguments)

    monkeypatch.setattr(job, "SequenceReader", Reader)
    monkeypatch.setattr(engine.Engine, "_add", counted)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 500)
    assert main([checkpoint, fasta, str(tmp_path / "e.h5")]) == 0
    assert max(waiting) <= 500 / 12
    assert read_embeddings(tmp_path / "e.h5")[0] == [name for name, _ in records]


def test_hostile_and_equal_ids_and_equal_sequences_all_come_back(tmp_path: Path, checkpoint: str):
    names = [
        "a/b",
        ".",
        "..",
        "A.B/..",
        "x:y",
        "x" * 300,
        "prot\u00e9ine",
        "same",
        "same",
        "twin",
        "0000000003",
    ]
    records = [(name, residues) for name, (_, residues) in zip(names, random_records([30] * 11), strict=True)]
    records[9] = ("twin", records[0][1])
    fasta = write_fasta(tmp_path / "a.fasta", records)
    assert main([checkpoint, fasta, str(tmp_path / "e.h5"), "--include", "per_tok"]) == 0
    ids, rows = read_embeddings(tmp_path / "e.h5")
    assert ids == names
    for (_, residues), found in zip(records, rows, strict=True):
        np.testing.assert_allclose(found, states_alone(checkpoint, residues), atol=TOLERANCE)
    np.testing.assert_array_equal(rows[0], rows[9])


def test_each_letter_has_its_own_token_and_lower_case_is_upper_case(tmp_path: Path, checkpoint: str):
    letters = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    fasta = write_fasta(tmp_path / "a.fasta", [(letter, f"MK{letter}TV") for letter in letters])
    (tmp_path / "lower.fasta").write_text(">lower\nmkuTv*\n")
    assert main([checkpoint, fasta, str(tmp_path / "lower.fasta"), str(tmp_path / "e.h5")]) == 0
    means = per_residue(tmp_path / "e.h5")
    np.testing.assert_allclose(means["lower"], means["U"], atol=TOLERANCE)
    found = np.stack([means[letter] for letter in letters])
    distances = np.abs(found[:, None] - found).max(-1) + np.eye(26)
    assert distances.min() > 1e-3


def test_mask_is_one_token(tmp_path: Path, checkpoint: str):
    (tmp_path / "a.fasta").write_text(">q\nMK<mask>TV\n")
    assert main([checkpoint, str(tmp_path / "a.fasta"), str(tmp_path / "e.h5"), "--include", "per_tok"]) == 0
    shown = VOCABULARY.encode("MKATV").copy()
    shown[2] = VOCABULARY.mask
    tokens = torch.tensor([[VOCABULARY.bos, *shown.tolist(), VOCABULARY.eos]])
    with torch.no_grad():
        expected = load_model(checkpoint).model(tokens)[0, 1:-1].numpy()
    np.testing.assert_allclose(per_residue(tmp_path / "e.h5")["q"], expected, atol=TOLERANCE)


def test_bad_records_are_left_out_and_listed(
    tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
):
    fasta = tmp_path / "a.fasta"
    fasta.write_text(">a\nMKV\n>b\nMK-V\n>c\nMK*V\n>d\nMKT\n")
    out = tmp_path / "e.h5"
    assert main([checkpoint, str(fasta), str(out)]) == 3
    assert read_embeddings(out)[0] == ["a", "d"]
    rows = (tmp_path / "e.h5.skipped.tsv").read_text().splitlines()
    assert [row.split("\t")[1:5] for row in rows[1:]] == [
        ["4", "b", "3", "gap"],
        ["6", "c", "3", "inner_stop"],
    ]
    output, log = capsys.readouterr()
    assert "2 proteins written, 2 left out, 6 residues" in output
    assert output.count("\n") == 1
    assert "record 'b' has '-' at column 3" in log
    assert "are free in" in log
    assert "on cpu" in log
    assert main([checkpoint, str(fasta), str(out), "--force", "--gaps", "drop", "--unknown", "x"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["a.fasta", "e.h5"]
    assert read_embeddings(out)[0] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (">a\nMKV\n>b\nMK-V\n", ["--strict"], r"a\.fasta:4: record 'b'.*--strict"),
        (">b\nMK-V\n", [], "no record accepted of 1; the first: .*record 'b'"),
        ("", [], "no sequence"),
        ("MKV\n", [], r"a\.fasta:1: no '>' header"),
    ],
)
def test_failure_leaves_nothing(tmp_path: Path, checkpoint: str, text: str, options: list[str], message: str):
    (tmp_path / "a.fasta").write_text(text)
    argv = [checkpoint, str(tmp_path / "a.fasta"), str(tmp_path / "e.h5"), "--include", "per_tok", "mean"]
    with pytest.raises(ValueError, match=message) as caught:
        main([*argv, *options])
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["a.fasta"]


LEFT_OUT_IN = {
    "c01_text_before_first_header.fasta": [],
    "c10_empty_record_two_blank_lines.fasta": [],
    "c14_empty_header.fasta": [],
    "c33_gap_dash.fasta": ["q1"],
    "c34_dot_stop.fasta": ["g2497.t1"],
    "c35_star_stop_end_and_inside.fasta": ["q2"],
    "c37_error_message_in_sequence.fasta": [],
    "c48_mask_token_in_sequence.fasta": [],
    "c54_length_over_100k.fasta.gz": ["frame1"],
    "c70_null_bytes.fasta": [],
}
"""Files with bad records; the ids are those that CASES.tsv would also allow to be read."""

OTHERWISE = {"c48_mask_token_in_sequence.fasta": [("q1", 8)], "c63_zstd.fasta.zst": []}
"""Where a row of CASES.tsv leaves a choice: `<mask>` is one token (its q2 has gaps), zstd is refused."""


def read_cases() -> list[tuple[str, list[tuple[str, int]]]]:
    table = SHARED / "cases" / "fasta" / "CASES.tsv"
    if not table.exists():
        return []
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    cases = []
    for row in rows:
        lengths = [int(length) for length in row["residue_lengths"].split(";") if length]
        found = list(zip(filter(None, row["ids"].split(";")), lengths, strict=True))
        kept = [pair for pair in found if pair[0] not in LEFT_OUT_IN.get(row["file"], [])]
        cases.append((row["file"], OTHERWISE.get(row["file"], kept)))
    return cases


@pytest.mark.parametrize(("name", "expected"), read_cases())
def test_odd_fasta_file_has_its_outcome(
    shared_dir: Path, tmp_path: Path, checkpoint: str, name: str, expected: list[tuple[str, int]]
):
    argv = [checkpoint, str(shared_dir / "cases" / "fasta" / name), str(tmp_path / "e.h5")]
    if not expected:
        with pytest.raises(ValueError, match=rf"{re.escape(name)}|no record accepted") as caught:
            main(argv)
        assert "\n" not in str(caught.value)
        assert os.listdir(tmp_path) == []
        return
    assert main([*argv, "--include", "per_tok"]) == (3 if name in LEFT_OUT_IN else 0)
    with h5py.File(tmp_path / "e.h5") as file:
        found = [(dataset.attrs["original_id"], len(dataset)) for dataset in file.values()]
        assert all(np.isfinite(dataset[:]).all() for dataset in file.values())
    assert [length for _, length in found] == [length for _, length in expected]
    for (record_id, _), (wanted, _) in zip(found, expected, strict=True):
        assert wanted in (record_id, parse_header(record_id).accession)
    assert (tmp_path / "e.h5.skipped.tsv").exists() == (name in LEFT_OUT_IN)


def refusing(limit: int, error: Exception):
    """Return a stand-in for the model's forward pass that has memory for `limit` tokens."""
    states = ProteinModel.states

    def limited(self, tokens, documents=None, *, layers):
        if tokens.numel() > limit:
            raise error
        return states(self, tokens, documents, layers=layers)

    return limited


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
    ],
)
def test_out_of_memory_halves_the_batch_then_reports_the_record(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([40, 10, 200, 20, 41, 42, 43]))
    monkeypatch.setattr(ProteinModel, "states", refusing(100, error))
    assert main([checkpoint, fasta, str(tmp_path / "e.h5"), "--include", "per_tok"]) == 3
    monkeypatch.undo()
    found = per_residue(tmp_path / "e.h5")
    assert list(found) == ["p0", "p1", "p3", "p4", "p5", "p6"]
    for name, residues in read_fasta(Path(fasta)):
        if name in found:
            np.testing.assert_allclose(found[name], states_alone(checkpoint, residues), atol=TOLERANCE)
    header, row = (tmp_path / "e.h5.skipped.tsv").read_text().splitlines()
    assert header.split("\t") == ["file", "line", "id", "column", "reason", "found"]
    assert row.split("\t")[1:] == ["5", "p2", "", "out_of_memory", "200 residues"]


def test_records_left_out_for_both_reasons_stand_in_one_list(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([5, 200]))
    monkeypatch.setattr(ProteinModel, "states", refusing(100, torch.OutOfMemoryError("out of memory")))
    with pytest.raises(ValueError, match=r"a\.fasta:3: record 'p1' \(200 residues\) does not fit.*--strict"):
        main([checkpoint, fasta, str(tmp_path / "e.h5"), "--strict"])
    assert os.listdir(tmp_path) == ["a.fasta"]
    fasta = write_fasta(tmp_path / "a.fasta", [*random_records([5, 200]), ("bad", "MK-V")])
    assert main([checkpoint, fasta, str(tmp_path / "e.h5")]) == 3
    rows = (tmp_path / "e.h5.skipped.tsv").read_text().splitlines()
    assert [row.split("\t")[2] for row in rows] == ["id", "bad", "p1"]


def test_other_errors_of_the_model_are_not_swallowed(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ProteinModel, "states", refusing(0, RuntimeError("shapes differ")))
    fasta = write_fasta(tmp_path / "a.fasta", random_records([5]))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main([checkpoint, fasta, str(tmp_path / "e.h5")])
    assert os.listdir(tmp_path) == ["a.fasta"]


def test_existing_output_is_refused_before_any_work(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([5]))
    run = engine.Engine.run
    monkeypatch.setattr(engine.Engine, "run", lambda *arguments: pytest.fail("work has started"))
    for name in ("e.mean.h5", "e.per_tok.h5", "e.h5.skipped.tsv"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"{re.escape(name)}: exists already.*--force"):
            main([checkpoint, fasta, str(tmp_path / "e.h5"), "--include", "mean", "per_tok"])
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    monkeypatch.setattr(engine.Engine, "run", run)
    (tmp_path / "e.h5").write_text("old")
    assert main([checkpoint, fasta, str(tmp_path / "e.h5"), "--force"]) == 0
    assert read_embeddings(tmp_path / "e.h5")[0] == ["p0"]


def test_mistakes_are_one_line_before_work_starts(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([5]))
    monkeypatch.setattr(engine.Engine, "run", lambda *arguments: pytest.fail("work has started"))
    out = str(tmp_path / "e.h5")
    for argv, message in (
        ([checkpoint, fasta, out, "--device", "cuda:77"], "--device cuda:77: not here"),
        (["no.ckpt", fasta, out], r"no\.ckpt: no such file"),
        ([fasta, fasta, out], r"a\.fasta: not a checkpoint of `protperf train`, or cut short"),
        ([checkpoint, "no.fasta", out], r"no\.fasta: no such file"),
        ([checkpoint, str(tmp_path), out], "is a folder"),
        ([checkpoint, fasta, str(tmp_path / "no" / "e.h5")], r"no: no such folder to write e\.h5"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            main(argv)
        assert "\n" not in str(caught.value)
    os.link(fasta, out)
    with pytest.raises(ValueError, match=r"e\.h5: is an input"):
        main([checkpoint, out, out, "--force"])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["m.ckpt", "out.h5"],
        ["m.ckpt", "a.fasta", "b.fasta"],
        ["m.ckpt", "a.fasta", "out.h5", "--include", "everything"],
        ["m.ckpt", "a.fasta", "out.h5", "--toks-per-batch", "0"],
        ["m.ckpt", "a.fasta", "out.h5", "--nogpu", "--device", "cuda:0"],
    ],
)
def test_wrong_usage_exits_with_status_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_options_may_stand_before_and_between_the_paths():
    options = parse(["--include", "per_tok", "mean", "m.ckpt", "a.fa", "--nogpu", "b.fa", "o.h5"])
    assert options.include == ["per_tok", "mean"]
    assert (options.checkpoint, options.inputs, options.out) == ("m.ckpt", ["a.fa", "b.fa"], Path("o.h5"))
    assert options.device == "cpu"
    assert parse(["m.ckpt", "a.fa", "o.h5"]).include == ["mean"]


def test_file_says_which_model_made_it(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    model = make_checkpoint(tmp_path / "checkpoints" / "best.ckpt", kind="causal")
    fasta = write_fasta(tmp_path / "a.fasta", random_records([5]))
    assert main([str(tmp_path), fasta, str(tmp_path / "e.h5")]) == 0
    digest = subprocess.run(["sha256sum", model], capture_output=True, text=True, check=True).stdout.split()[
        0
    ]
    with h5py.File(tmp_path / "e.h5") as file:
        found = [
            file.attrs[name] for name in ("kind", "checkpoint", "checkpoint_sha256", "objective", "model_dim")
        ]
    assert found == ["mean", "best.ckpt", digest, "causal", 16]


def test_damaged_input_at_the_end_leaves_nothing(tmp_path: Path, checkpoint: str, sample_path: Path):
    whole = sample_path.read_bytes()
    (tmp_path / "a.fasta.gz").write_bytes(whole[:4000])
    with pytest.raises(FormatError, match="truncated"):
        main([checkpoint, str(tmp_path / "a.fasta.gz"), str(tmp_path / "e.h5")])
    assert os.listdir(tmp_path) == ["a.fasta.gz"]


def run(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own, with code before it."""
    script = f"import sys\n{code}\nfrom protperf.cli import main\nsys.argv[0] = 'protperf'\nsys.exit(main())"
    return subprocess.run([sys.executable, "-c", script, "embed", *arguments], capture_output=True, **options)


def test_command_reads_stdin_and_opens_no_network_and_no_logger(tmp_path: Path, checkpoint: str):
    guard = """
import atexit, socket
def refuse(*arguments, **options): raise AssertionError("network")
socket.socket.connect = socket.getaddrinfo = refuse
atexit.register(lambda: print(sorted({"wandb", "pytorch_lightning"} & set(sys.modules))))
"""
    text = b">a\nMKV\n>b\nM.V\n"
    done = run(guard, checkpoint, "-", str(tmp_path / "e.h5"), input=text)
    assert done.returncode == 3, done.stderr.decode()
    output = done.stdout.decode().splitlines()
    assert output[1:] == ["[]"]
    assert "1 protein written, 1 left out, 3 residues" in output[0]
    assert b"<stdin>:4: record 'b'" in done.stderr
    assert read_embeddings(tmp_path / "e.h5")[0] == ["a"]


def test_failing_command_prints_one_line_and_exits_1(tmp_path: Path, checkpoint: str):
    done = run("", checkpoint, "no.fasta", str(tmp_path / "e.h5"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.count(b"\n") == 1


def test_help_does_not_import_torch():
    done = run("import atexit; atexit.register(lambda: print('torch' in sys.modules))", "--help")
    assert done.returncode == 0
    assert done.stdout.endswith(b"False\n")
    assert b"--toks-per-batch" in done.stdout


@pytest.mark.slow
def test_longest_proteins_are_embedded_whole(shared_dir: Path, tmp_path: Path, checkpoint: str):
    folder = shared_dir / "data" / "sequences"
    inputs = [str(folder / name) for name in ("titin_human_34350.fasta", "titin_twice_68700.fasta.gz")]
    argv = [checkpoint, *inputs, str(tmp_path / "e.h5"), "--include", "per_tok"]
    # not ru_maxrss: a new process starts with that of the one that forked it
    tell = "import atexit, pathlib; atexit.register(lambda: print(pathlib.Path('/proc/self/status').read_text()))"
    done = run(tell, *argv)
    assert done.returncode == 0, done.stderr.decode()
    peak_gib = int(re.search(rb"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 2**20
    assert peak_gib < 3
    rows = read_embeddings(tmp_path / "e.h5")[1]
    assert [array.shape for array in rows] == [(34_350, 16), (68_700, 16)]
    residues = read_fasta(Path(inputs[0]))[0][1]
    np.testing.assert_allclose(rows[0], states_alone(checkpoint, residues), atol=TOLERANCE)
