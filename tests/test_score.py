"""`protperf score` as it is called: right numbers under the right ids, tables kept as they were, honest ends."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from prepared import random_records, write_fasta
from test_scoring import TOLERANCE, by_hand, effect_by_hand, make_model, model_of_residues

from protperf.checkpoint import describe
from protperf.config import ObjectiveConfig
from protperf.formats.mutations import read_mutant
from protperf.inference.mutations import EFFECT_METHODS
from protperf.inference.scoring import METHODS
from protperf.model import ProteinModel
from protperf.score import proteins
from protperf.score.__main__ import main
from protperf.vocab import VOCABULARY

COLUMNS = ["id", "num_residues", "method", "log_likelihood", "mean_log_likelihood", "perplexity"]


def save(model: ProteinModel, path: Path) -> str:
    """Write a checkpoint as training does."""
    objective = ObjectiveConfig(kind="causal" if model.causal else "masked")
    about = describe(model.config, objective, attend_across_documents=False, dataset_digest="")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"protperf": about, "state_dict": state, "global_step": 7}, path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save(make_model(kind), folder / f"{kind}.ckpt") for kind in ("masked", "causal")}


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.mark.parametrize("method", ["", *METHODS])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_proteins_come_back_in_order_with_the_model_s_own_likelihood(
    tmp_path: Path, checkpoints: dict[str, str], method: str, suffix: str
):
    kind = METHODS.get(method, "masked")
    records = random_records([9, 1, 30, 2])
    records[1] = ('a,"b"', records[1][1])
    out = tmp_path / f"s{suffix}"
    argv = [checkpoints[kind], write_fasta(tmp_path / "a.fasta", records), str(out)]
    assert main([*argv, *(["--method", method] if method else []), "--toks_per_batch", "40"]) == 0
    rows = read_rows(out)
    assert list(rows[0]) == COLUMNS
    assert [row["id"] for row in rows] == ["p0", 'a,"b"', "p2", "p3"]
    for row, (_, residues) in zip(rows, records, strict=True):
        values = by_hand(make_model(kind), VOCABULARY.encode(residues), method or "pseudo-ppl")
        assert row["method"] == (method or "pseudo-ppl")
        assert int(row["num_residues"]) == len(residues)
        assert float(row["log_likelihood"]) == pytest.approx(sum(values), abs=TOLERANCE * len(values))
        assert float(row["mean_log_likelihood"]) == pytest.approx(np.mean(values), abs=TOLERANCE)
        assert float(row["perplexity"]) == pytest.approx(np.exp(-np.mean(values)), rel=TOLERANCE)
    assert sorted(os.listdir(tmp_path)) == ["a.fasta", f"s{suffix}"]


def test_bad_records_are_left_out_and_listed(
    tmp_path: Path, checkpoints: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.fasta").write_text(">a\nMKV\n>b\nMK-V\n>c\nMK<mask>V\n>d\nMKT\n")
    argv = [checkpoints["causal"], str(tmp_path / "a.fasta"), str(tmp_path / "s.csv")]
    assert main(argv) == 3
    assert [row["id"] for row in read_rows(tmp_path / "s.csv")] == ["a", "d"]
    listed = (tmp_path / "s.csv.skipped.tsv").read_text().splitlines()
    assert [line.split("\t")[2:5] for line in listed[1:]] == [["b", "3", "gap"], ["c", "3", "mask_token"]]
    output, log = capsys.readouterr()
    assert "2 proteins scored, 2 without a score" in output
    assert "record 'b' has '-' at column 3" in log
    with pytest.raises(ValueError, match=r"s\.csv: exists already"):
        main(argv)
    with pytest.raises(ValueError, match=r"record 'b'.*--strict"):
        main([*argv, "--force", "--strict"])
    assert main([*argv, "--force", "--gaps", "drop"]) == 3
    assert [row["id"] for row in read_rows(tmp_path / "s.csv")] == ["a", "b", "d"]


def test_a_record_that_does_not_fit_into_memory_is_listed(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    states = ProteinModel.states

    def limited(self: ProteinModel, tokens: torch.Tensor, *rest, **settings):
        if tokens.numel() > 50:
            raise torch.OutOfMemoryError("out of memory")
        return states(self, tokens, *rest, **settings)

    monkeypatch.setattr(ProteinModel, "states", limited)
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20, 60, 30]))
    argv = [checkpoints["causal"], fasta, str(tmp_path / "s.csv")]
    assert main(argv) == 3
    assert [row["id"] for row in read_rows(tmp_path / "s.csv")] == ["p0", "p2"]
    listed = (tmp_path / "s.csv.skipped.tsv").read_text().splitlines()
    assert [line.split("\t")[2:] for line in listed[1:]] == [["p1", "", "out_of_memory", "60 residues"]]
    with pytest.raises(ValueError, match=r"record 'p1' \(60 residues\) does not fit into memory.*--strict"):
        main([*argv, "--force", "--strict"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (">b\nMK-V\n", "no record scored of 1; the first: .*record 'b'"),
        ("", "no sequence"),
        ("MKV\n", "no '>' header"),
    ],
)
def test_failure_leaves_nothing(tmp_path: Path, checkpoints: dict[str, str], text: str, message: str):
    (tmp_path / "a.fasta").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        main([checkpoints["masked"], str(tmp_path / "a.fasta"), str(tmp_path / "s.csv")])
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["a.fasta"]


TABLE = b'\xef\xbb\xbfname,mutant,"measured, in %"\r\n"a ""1""",M1A,3\r\n\r\nb,K2C:Q9W,\r\nc,WT,1e1\r\nd,Q9Q,-1\r\n'


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_a_table_keeps_every_byte_and_gets_a_column_for_each_method(
    tmp_path: Path, checkpoints: dict[str, str], kind: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "t.csv").write_bytes(TABLE)
    argv = [checkpoints[kind], "--mutations", str(tmp_path / "t.csv"), str(tmp_path / "o.csv")]
    argv += ["--wild-type", "MKTAYIAKQR", "--measured", "measured, in %"]
    assert main([*argv, "--method", "all"]) == 0
    written = (tmp_path / "o.csv").read_bytes()
    methods = [method for method, needed in EFFECT_METHODS.items() if needed == kind]
    kept = [line.rsplit(b",", len(methods))[0] if line else b"" for line in written.split(b"\r\n")]
    assert b"\r\n".join(kept) == TABLE
    rows = [row for row in csv.DictReader(io.StringIO(written.decode("utf-8-sig"))) if row["mutant"]]
    assert list(rows[0])[3:] == [f"protperf_{method}" for method in methods]
    for row in rows:
        for method in methods:
            mutant = read_mutant(row["mutant"])
            expected = effect_by_hand(make_model(kind), VOCABULARY.encode("MKTAYIAKQR"), mutant, method)
            assert float(row[f"protperf_{method}"]) == pytest.approx(expected, abs=10 * TOLERANCE)
    output, log = capsys.readouterr()
    for method in methods:
        assert f"{method}: Spearman " in output
        assert f"{method}: " in log
    assert "over 3 rows, 1 without a measured value" in output
    assert "4 rows scored, 0 without a score" in output


def test_known_effects_give_the_known_correlation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By hand: scores rank 1 2 3 4 5, measured 2 3.5 3.5 5 1; sums -0.5, 10 and 9.5, so -0.5 / sqrt(95) = -0.0513."""
    model = save(model_of_residues({"C": 1.0, "D": 2.0, "E": 3.0, "F": 4.0, "G": 5.0}), tmp_path / "m.ckpt")
    lines = [
        "mutant\tx\tsame",
        "A1C\t10\t1",
        "A2D\t20\t1",
        "A3E\t20\t1",
        "A4F\t40\t1",
        "A5G\t5\t1",
        "A6G\tNA\t1",
    ]
    (tmp_path / "t.tsv").write_text("\n".join(lines) + "\n")
    argv = [model, "--mutations", str(tmp_path / "t.tsv"), "--wild-type", "AAAAAA", str(tmp_path / "o.tsv")]
    assert main([*argv, "--measured", "x"]) == 0
    assert (
        "masked-marginals: Spearman -0.0513 against x over 5 rows, 1 without a measured"
        in capsys.readouterr().out
    )
    rows = read_rows(tmp_path / "o.tsv")
    assert [row["protperf_masked-marginals"] for row in rows] == [f"{i}.00000" for i in (1, 2, 3, 4, 5, 5)]
    assert main([*argv, "--measured", "same", "--force"]) == 0
    assert "masked-marginals: Spearman undefined, one side has a single value" in capsys.readouterr().out


def test_the_wild_type_may_be_given_in_each_way(tmp_path: Path, checkpoints: dict[str, str]):
    lines = ["mutant,mutated_sequence", "H24Y,YPETLV", "E26A:L28C,HPATCV", "WT,HPETLV"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "w.fasta").write_text(">w\nHPETLV*\n")
    argv = [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), "--force"]
    found = []
    for number, extra in enumerate(
        [
            ["--offset", "23"],
            ["--offset-idx", "24"],
            ["--offset_idx", "24", "--wild-type", "hpetlv"],
            ["--offset", "23", "--wild-type", str(tmp_path / "w.fasta")],
        ]
    ):
        out = tmp_path / f"{number}.csv"
        assert main([*argv, str(out), *extra]) == 0
        found.append(out.read_text())
    assert len(set(found)) == 1
    rows = read_rows(tmp_path / "0.csv")
    model, wild_type = make_model("masked"), VOCABULARY.encode("HPETLV")
    for row in rows:
        expected = effect_by_hand(model, wild_type, read_mutant(row["mutant"], offset=23), "masked-marginals")
        assert float(row["protperf_masked-marginals"]) == pytest.approx(expected, abs=10 * TOLERANCE)


def test_a_wild_type_may_be_longer_than_a_file_name(tmp_path: Path, checkpoints: dict[str, str]):
    (tmp_path / "t.csv").write_text("mutant\nK5000A\n")
    argv = [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), str(tmp_path / "o.csv")]
    assert main([*argv, "--wild-type", "K" * 5000, "--method", "wt-marginals"]) == 0


def test_what_does_not_fit_into_memory_ends_without_a_table(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    def states(*rest, **settings):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ProteinModel, "states", states)
    (tmp_path / "t.csv").write_text("mutant\nM1A\n")
    argv = [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), str(tmp_path / "o.csv")]
    with pytest.raises(ValueError, match=r"t\.csv: 1 rows do not fit into memory even alone"):
        main([*argv, "--wild-type", "MKT"])
    assert os.listdir(tmp_path) == ["t.csv"]


def test_rows_without_a_mutant_stay_without_a_score(
    tmp_path: Path, checkpoints: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "t.csv").write_text("mutant,x\nM1A,1\nK2*,2\nK2C,3\n")
    argv = [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), "--wild-type", "MKT"]
    argv += [str(tmp_path / "o.csv"), "--measured", "x"]
    assert main(argv) == 3
    rows = read_rows(tmp_path / "o.csv")
    assert [bool(row["protperf_masked-marginals"]) for row in rows] == [True, False, True]
    output, log = capsys.readouterr()
    assert "2 rows scored, 1 without a score" in output
    assert "over 2 rows" in output
    assert "1 of 3 rows name no substitutions" in log
    assert "t.csv:3: mutant 'K2*'" in log
    with pytest.raises(ValueError, match=r"t\.csv:3: mutant 'K2\*'.*--strict"):
        main([*argv, "--force", "--strict"])


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (
            "mutant\nK1A",
            ["--wild-type", "MKT"],
            r"t\.csv:2: mutant 'K1A' has K at residue 1; the wild type has M there",
        ),
        ("mutant\nM1A\nT4A", ["--wild-type", "MKT"], r"t\.csv:3: mutant 'T4A' names residue 4"),
        (
            "mutant\nM1A",
            [],
            r"t\.csv: no column 'mutated_sequence' to take the wild type from; give --wild-type",
        ),
        ("mutant\nM1A", ["--wild-type", "MK-T"], r"--wild-type MK-T: no such file, and .* '-'"),
        ("mutant\nM1A", ["--wild-type", "no.fasta"], r"--wild-type no\.fasta: no such file"),
        ("mutant\nK1*", ["--wild-type", "MKT"], r"t\.csv:2: mutant 'K1\*' is no substitution"),
        ("mutant\n", ["--wild-type", "MKT"], r"t\.csv: has no row below its header"),
        (
            "mutant,x\nM1A,1",
            ["--wild-type", "MKT", "--measured", "y"],
            r"t\.csv: no column 'y'; there are: 'mutant', 'x'",
        ),
        (
            "variant\nM1A",
            ["--wild-type", "MKT"],
            r"t\.csv: no column 'mutant'; there are: 'variant'; --mutation-column",
        ),
        ("mutant\nM1A", ["--wild-type", "MKT", "--method", "likelihood"], "likelihood: needs a causal model"),
        ("mutant\nM1A", ["--wild-type", "MKT", "--method", "best"], "best: no such method"),
        ("mutant\nM1A", ["--wild-type", "MKT", "--precision", "fp16"], "--precision fp16: not on a CPU"),
        ("mutant\nM1A", ["--wild-type", "MKT", "--device", "cuda:7"], "--device cuda:7: not here"),
        (
            "mutant,protperf_wt-marginals\nM1A,1",
            ["--wild-type", "MKT", "--method", "all"],
            "has a column 'protperf_wt",
        ),
        (
            "mutant\tx\nM1A\t1",
            ["--wild-type", "MKT"],
            r"o\.csv: .*t\.csv is kept as it is, so .* end in \.tsv",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, checkpoints: dict[str, str], table: str, options: list[str], message: str
):
    (tmp_path / "t.csv").write_text(f"{table}\n")
    with pytest.raises(ValueError, match=message) as caught:
        main(
            [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), str(tmp_path / "o.csv"), *options]
        )
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["t.csv"]


def test_a_wild_type_file_holds_one_record(tmp_path: Path, checkpoints: dict[str, str]):
    (tmp_path / "t.csv").write_text("mutant\nM1A\n")
    (tmp_path / "w.fasta").write_text(">a\nMKT\n>b\nMKV\n")
    argv = [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), str(tmp_path / "o.csv")]
    with pytest.raises(ValueError, match=r"w\.fasta: holds more than one record"):
        main([*argv, "--wild-type", str(tmp_path / "w.fasta")])
    with pytest.raises(ValueError, match=r"t\.csv: is an input"):
        main([*argv[:-1], str(tmp_path / "t.csv"), "--wild-type", "MKT", "--force"])


@pytest.mark.parametrize(
    "argv",
    [
        ["m.ckpt", "o.csv"],
        ["m.ckpt", "--mutations", "t.csv"],
        ["m.ckpt", "a.fasta", "o.csv", "--mutations", "t.csv"],
        ["m.ckpt", "a.fasta", "o.txt"],
        ["m.ckpt", "a.fasta", "o.csv", "--wild-type", "MKV"],
        ["m.ckpt", "a.fasta", "o.csv", "--measured", "x"],
        ["m.ckpt", "a.fasta", "o.csv", "--method", "pseudo-ppl,strided-ppl"],
        ["m.ckpt", "--mutations", "t.csv", "o.csv", "--offset", "1", "--offset-idx", "2"],
        ["m.ckpt", "a.fasta", "o.csv", "--toks-per-batch", "0"],
    ],
)
def test_wrong_usage_ends_with_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_pipes_carry_the_rows_alone(tmp_path: Path, checkpoints: dict[str, str]):
    """From stdin to stdout, as a program: rows on stdout, all else on stderr, nothing left behind."""
    argv = [sys.executable, "-m", "protperf.score", checkpoints["causal"], "-", "-"]
    done = subprocess.run(argv, input=b">a\nMKV\n>b\nMKTA\n", capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
    assert [row["id"] for row in rows] == ["a", "b"]
    assert b"<stdout>: 2 proteins scored" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_very_long_protein_is_announced(
    tmp_path: Path,
    checkpoints: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(proteins, "MANY_TOKENS", 30 * 32 - 1)
    fasta = write_fasta(tmp_path / "a.fasta", random_records([29, 30, 31]))
    assert main([checkpoints["masked"], fasta, str(tmp_path / "s.csv")]) == 0
    log = capsys.readouterr().err
    assert log.count("pseudo-ppl shows the model") == 1
    assert "record 'p1' (30 residues): pseudo-ppl shows the model 960 tokens; strided-ppl 224" in log


def test_a_table_may_go_through_a_pipe(
    tmp_path: Path, checkpoints: dict[str, str], capfdbinary: pytest.CaptureFixture[bytes]
):
    (tmp_path / "t.csv").write_text("mutant,x\nM1A,1\nK2A,2\n")
    argv = [checkpoints["masked"], "--mutations", str(tmp_path / "t.csv"), "-", "--wild-type", "MKT"]
    assert main([*argv, "--measured", "x"]) == 0
    output, log = capfdbinary.readouterr()
    assert output.startswith(b"mutant,x,protperf_masked-marginals\nM1A,1,")
    assert output.count(b"\n") == 3
    assert b"Spearman" in log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "causal"])
@pytest.mark.parametrize("name", ["BLAT_ECOLX_Jacquier_2013.csv", "B2L11_HUMAN_Dutta_2010_binding-Mcl-1.csv"])
def test_real_assays_run_through(
    shared_dir: Path,
    tmp_path: Path,
    checkpoints: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    kind: str,
    name: str,
):
    """Every cheap method on every row; `pseudo-ppl`, L passes a mutant, on the first rows."""
    assay = shared_dir / "data" / "variants" / name
    few = tmp_path / "few.csv"
    few.write_text("".join(assay.read_text().splitlines(keepends=True)[:6]))
    cheap = "likelihood" if kind == "causal" else "masked-marginals,wt-marginals"
    for table, method in ((assay, cheap), (few, "all")):
        out = tmp_path / "o.csv"
        argv = [checkpoints[kind], "--mutations", str(table), str(out), "--method", method, "--force"]
        assert main([*argv, "--measured", "DMS_score"]) == 0
        kept = [line.rsplit(",", len(method.split(","))) for line in out.read_text().splitlines()]
        if method == cheap:
            assert [line[0] for line in kept] == assay.read_text().splitlines()
        output = capsys.readouterr().out
        count = len(table.read_text().splitlines()) - 1
        assert output.count(f"against DMS_score over {count} rows") == output.count("Spearman") >= 1


def test_no_output_replaces_the_checkpoint(tmp_path: Path, checkpoints: dict[str, str]):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([9]))
    (tmp_path / "s.csv").symlink_to(checkpoints["masked"])
    with pytest.raises(ValueError, match=r"s\.csv: is an input; give another name"):
        main([checkpoints["masked"], fasta, str(tmp_path / "s.csv"), "--force"])


@pytest.mark.parametrize(("suffix", "separator"), [(".tsv", "\t"), (".csv", ","), (".txt", ",")])
def test_a_table_of_one_column_is_continued_as_its_name_says(
    tmp_path: Path, checkpoints: dict[str, str], suffix: str, separator: str
):
    table = tmp_path / f"t{suffix}"
    table.write_text("mutant\nA1C\n")
    out = tmp_path / ("o.csv" if suffix == ".txt" else f"o{suffix}")
    argv = [checkpoints["masked"], "--mutations", str(table), "--wild-type", "AAA", str(out)]
    assert main(argv) == 0
    assert out.read_text().splitlines()[0] == f"mutant{separator}protperf_masked-marginals"
