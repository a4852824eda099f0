"""`protperf generate`: the FASTA that was asked for, the same for the same seed, and honest ends."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prepared import REPOSITORY, read_fasta, write_fasta
from wide_models import save_checkpoint, wide_model

from protperf.formats import FormatError
from protperf.formats.fasta_writer import FastaWriter
from protperf.generate import main, parse
from protperf.model import ProteinModel


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(wide_model("favor"), tmp_path_factory.mktemp("causal") / "best.ckpt"))


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = wide_model("relu", causal=False)
    return str(save_checkpoint(model, tmp_path_factory.mktemp("masked") / "best.ckpt"))


def facts_of(header: str) -> dict[str, str]:
    name, *facts = header.split()
    return {"name": name} | dict(fact.split("=", 1) for fact in facts)


def test_same_seed_same_fasta_whatever_the_batch(tmp_path: Path, causal: str):
    found = []
    for batch in ("1", "6"):
        out = tmp_path / f"{batch}.fasta"
        assert (
            main([causal, str(out), "--num", "6", "--max-length", "70", "--seed", "3", "--batch", batch]) == 0
        )
        found.append(out.read_bytes())
    assert found[0] == found[1]
    assert sorted(os.listdir(tmp_path)) == ["1.fasta", "6.fasta"]
    records = read_fasta(tmp_path / "1.fasta")
    assert [facts_of(header)["name"] for header, _ in records] == [f"generated_{n}" for n in range(1, 7)]
    for header, residues in records:
        facts = facts_of(header)
        known = ["name", "length", "perplexity", "ended", "temperature", "max_length", "seed", "checkpoint"]
        assert list(facts) == known
        assert facts["length"] == str(len(residues))
        assert re.fullmatch(r"\d+\.\d\d", facts["perplexity"])
        assert facts["ended"] == ("max_length" if len(residues) == 70 else "eos")
        assert (facts["temperature"], facts["seed"], facts["checkpoint"]) == ("1", "3", "best.ckpt")


def test_lines_are_wrapped_at_60(tmp_path: Path):
    with FastaWriter(tmp_path / "a.fasta") as writer:
        writer.add("a b\tc", "M" * 121)
        writer.add("b", "K" * 60)
    expected = f">a b\\tc\n{'M' * 60}\n{'M' * 60}\nM\n>b\n{'K' * 60}\n"
    assert (tmp_path / "a.fasta").read_text() == expected


def test_nothing_is_left_of_a_file_that_failed(tmp_path: Path):
    def write_and_fail() -> None:
        with FastaWriter(tmp_path / "a.fasta") as writer:
            writer.add("a", "M")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path: Path):
    def write_and_fail() -> None:
        with FastaWriter(tmp_path / "a.fasta") as writer:
            writer.add("a", "M")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does: it knows no name

    with pytest.raises(OSError, match=r"No space left.*/a\.fasta'"):
        write_and_fail()
    assert os.listdir(tmp_path) == []


def test_prompts_from_a_file_each_with_its_samples(
    tmp_path: Path, causal: str, capsys: pytest.CaptureFixture[str]
):
    long = "M" * 30
    (tmp_path / "p.fasta").write_text(f">a one\nMKV\n>bad\nMK*V\n>long\n{long}\n>sp|P1|X y\nwwx\n")
    out = tmp_path / "o.fasta"
    argv = [causal, str(out), "--prompt", str(tmp_path / "p.fasta"), "--num", "2", "--max-length", "30"]
    assert main(argv) == 3
    records = read_fasta(out)
    assert [facts_of(header)["name"] for header, _ in records] == ["a_1", "a_2", "sp|P1|X_1", "sp|P1|X_2"]
    assert [residues[:3] for _, residues in records] == ["MKV", "MKV", "WWX", "WWX"]
    assert {facts_of(header)["prompt"] for header, _ in records} == {"3"}
    rows = [row.split("\t")[1:] for row in (tmp_path / "o.fasta.skipped.tsv").read_text().splitlines()[1:]]
    assert rows == [
        ["4", "bad", "3", "inner_stop", "*"],
        ["5", "long", "", "too_long", "30 residues"],
    ]
    output, log = capsys.readouterr()
    assert "o.fasta: 4 proteins generated" in output
    assert "read 4 records: 2 accepted (6 residues), 2 left out" in log
    assert "p.fasta:5: record 'long' (30 residues) is no prompt; allowed: fewer residues than" in log
    with pytest.raises(ValueError, match=r"p\.fasta:4: record 'bad'.*--strict"):
        main([*argv, "--force", "--strict"])


def test_header_says_how_to_get_the_same_again(causal: str, capsys: pytest.CaptureFixture[str]):
    options = ["--temperature", "0.8", "--top-k", "9", "--top_p", "0.95", "--seed", "5", "--max-length", "9"]
    assert main([causal, "--prompt", "mkv", "--num", "1", *options]) == 0
    header, residues = capsys.readouterr().out.splitlines()
    assert residues.startswith("MKV")
    assert header.endswith("temperature=0.8 top_k=9 top_p=0.95 max_length=9 seed=5 checkpoint=best.ckpt")


def test_header_names_all_that_differs_from_the_defaults(causal: str, capsys: pytest.CaptureFixture[str]):
    """What it says is what to give: numbers are not rounded, and nothing that decides a draw is left out."""
    options = [
        "--temperature",
        "0.81234567",
        "--top-p",
        "0.99999999",
        "--min-length",
        "4",
        "--max-length",
        "9",
    ]
    options += ["--allow-nonstandard", "--precision", "bf16"]
    assert main([causal, "--num", "1", *options]) == 0
    facts = facts_of(capsys.readouterr().out.splitlines()[0])
    named = ["temperature", "top_p", "min_length", "max_length", "nonstandard", "precision", "seed"]
    assert [facts[name] for name in named] == ["0.81234567", "0.99999999", "4", "9", "yes", "bf16", "0"]


def test_a_run_without_records_leaves_no_list_of_an_earlier_one(tmp_path: Path, causal: str):
    out, listed = tmp_path / "o.fasta", tmp_path / "o.fasta.skipped.tsv"
    listed.write_text("of another run")
    with pytest.raises(ValueError, match=r"o\.fasta\.skipped\.tsv: exists already"):
        main([causal, str(out), "--num", "1", "--max-length", "5"])
    assert main([causal, str(out), "--num", "1", "--max-length", "5", "--force"]) == 0
    assert os.listdir(tmp_path) == ["o.fasta"]


def test_masked_places_are_filled(tmp_path: Path, masked: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "q.fasta").write_text(">q1 x\nMK<mask><mask>TV\n>whole\nMKV\n>q2\n<MASK>AA*\n")
    out = tmp_path / "o.fasta"
    assert main([masked, str(out), "--fill", str(tmp_path / "q.fasta"), "--num", "2"]) == 3
    records = read_fasta(out)
    assert [facts_of(header)["name"] for header, _ in records] == ["q1_1", "q1_2", "q2_1", "q2_2"]
    assert all(re.fullmatch(r"MK[A-Y]{2}TV|[A-Y]AA", residues) for _, residues in records)
    facts = facts_of(records[0][0])
    assert list(facts) == [
        "name",
        "length",
        "perplexity",
        "filled",
        "steps",
        "temperature",
        "seed",
        "checkpoint",
    ]
    assert (facts["length"], facts["filled"], facts["steps"]) == ("6", "2", "2")
    assert "whole\t\tno_mask" in (tmp_path / "o.fasta.skipped.tsv").read_text()
    assert "record 'whole' (3 residues) has nothing to fill; allowed: one <mask>" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["1", "100000"])
def test_filling_is_the_same_whatever_the_budget(
    tmp_path: Path, masked: str, budget: str, capsys: pytest.CaptureFixture[str]
):
    texts = ["MKV<mask>" * count for count in (1, 5, 9)]
    fasta = write_fasta(tmp_path / "q.fasta", [(f"p{i}", text) for i, text in enumerate(texts)])
    assert main([masked, "--fill", fasta, "--num", "3", "--toks-per-batch", budget]) == 0
    output = capsys.readouterr().out
    assert main([masked, "--fill", fasta, "--num", "3"]) == 0
    assert output == capsys.readouterr().out


def test_each_kind_of_model_names_what_it_can_do(tmp_path: Path, causal: str, masked: str):
    fasta = write_fasta(tmp_path / "q.fasta", [("a", "MK<mask>V")])
    for argv, named in (([masked], "--fill"), ([causal, "--fill", fasta], "--prompt")):
        with pytest.raises(ValueError, match=named) as caught:
            main(argv)
        assert "\n" not in str(caught.value)
        assert "(`" not in str(caught.value)


def test_no_memory_is_one_line(causal: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(self, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB")

    monkeypatch.setattr(ProteinModel, "onward", refuse)
    with pytest.raises(ValueError, match=r"out of memory.*lower --batch") as caught:
        main([causal])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("no.fasta", "--prompt 'no.fasta': no such file, and as residues: '.' at residue 3"),
        ("MKV", "prompt 1 has 3 residues; allowed: fewer than max_length, 3"),
    ],
)
def test_prompts_that_cannot_be(causal: str, prompt: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        main([causal, "--prompt", prompt, "--max-length", "3"])


def test_failure_leaves_nothing(tmp_path: Path, causal: str, sample_path: Path):
    whole = sample_path.read_bytes()
    (tmp_path / "p.fasta.gz").write_bytes(whole[:3000])
    argv = [
        causal,
        str(tmp_path / "o.fasta"),
        "--prompt",
        str(tmp_path / "p.fasta.gz"),
        "--max-length",
        "2000",
    ]
    with pytest.raises(FormatError, match="truncated"):
        main([*argv, "--num", "1", "--min-length", "1", "--top-k", "1"])
    (tmp_path / "p.fasta.gz").write_bytes(gzip.compress(b">a\nM-V\n"))
    with pytest.raises(ValueError, match="no record is left"):
        main(argv)
    assert os.listdir(tmp_path) == ["p.fasta.gz"]


def test_a_prompt_may_be_longer_than_a_name_of_a_file(causal: str, capsys: pytest.CaptureFixture[str]):
    assert main([causal, "--prompt", "MKVL" * 100, "--num", "1", "--max-length", "401"]) == 0
    assert "".join(capsys.readouterr().out.splitlines()[1:]).startswith("MKVL" * 100)


def test_what_is_there_is_never_replaced_unasked(tmp_path: Path, causal: str):
    out = tmp_path / "o.fasta"
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"o\.fasta: exists already"):
        main([causal, str(out)])
    assert out.read_text() == "mine"
    assert main([causal, str(out), "--force", "--num", "1", "--max-length", "5"]) == 0
    for argv in ([causal, str(out), "--prompt", str(out)], [causal, causal]):
        with pytest.raises(ValueError, match=r"(o\.fasta|best\.ckpt): is an input"):
            main([*argv, "--force"])


def test_a_model_that_never_learned_to_end_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = save_checkpoint(wide_model("relu"), tmp_path / "m.ckpt", ask_eos=False)
    assert main([str(path), "--num", "1", "--max-length", "3"]) == 0
    assert "never learned where proteins end" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["m.ckpt", "--num", "0"],
        ["m.ckpt", "--top-p", "1.1"],
        ["m.ckpt", "--temperature", "-1"],
        ["m.ckpt", "--temperature", "0", "--num", "2"],
        ["m.ckpt", "--min-length", "9", "--max-length", "8"],
        ["m.ckpt", "--steps", "3"],
        ["m.ckpt", "--fill", "a.fasta", "--batch", "3"],
        ["m.ckpt", "--fill", "a.fasta", "--prompt", "MKV"],
        ["m.ckpt", "--seed", "-1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_status_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_defaults():
    options = parse(["m.ckpt"])
    assert (options.out, options.num, options.batch, options.max_length) == ("-", 10, 16, 1024)
    assert parse(["m.ckpt", "--temperature", "0"]).num == 1
    assert (parse(["m.ckpt", "--fill", "-"]).num, parse(["m.ckpt", "--fill", "-"]).steps) == (1, 32)


def test_the_page_on_generating_is_true(
    tmp_path: Path,
    causal: str,
    masked: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Its commands run, at a smaller length, as does its Python; its headers have the keys that are written."""
    page = (REPOSITORY / "docs" / "generating.md").read_text()
    page = page.replace("runs/causal", causal).replace("runs/demo", masked)
    shell, python = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("bash", "python"))
    files, lines = shell
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-euc", files], check=True)
    commands = [shlex.split(line, comments=True) for line in lines.splitlines()]
    assert [parse(words[2:]).num for words in commands] == [100, 5, 3, 5]
    for words in commands:
        assert main([*words[2:], *([] if "--fill" in words else ["--max-length", "20"])]) == 0
    assert sorted(os.listdir()) == [
        "generated.fasta",
        "holes.fasta",
        "more.fasta",
        "starts.fasta",
        "whole.fasta",
    ]
    capsys.readouterr()
    for block in python:
        exec(block.replace("300", "20"), {})
        assert len(capsys.readouterr().out.splitlines()) == 11
    headers = [facts_of(line.strip()) for line in re.findall(r"^    >.*$", page, re.MULTILINE)]
    assert list(headers[0]) == [
        "name",
        "length",
        "perplexity",
        "ended",
        "temperature",
        "top_p",
        "seed",
        "checkpoint",
    ]
    assert list(headers[1]) == [
        "name",
        "length",
        "perplexity",
        "filled",
        "steps",
        "temperature",
        "seed",
        "checkpoint",
    ]


def run(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run the module in a process of its own, with code before it."""
    script = f"import sys\n{code}\nfrom protperf.generate import main\nsys.exit(main())"
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, **options)


def test_command_reads_stdin_writes_stdout_and_opens_no_network(masked: str):
    guard = """
import socket
def refuse(*arguments, **options): raise AssertionError("network")
socket.socket.connect = socket.getaddrinfo = refuse
"""
    done = run(guard, masked, "--fill", "-", input=b">a\nMK<mask>V\n")
    assert done.returncode == 0, done.stderr.decode()
    header, residues = done.stdout.decode().splitlines()
    assert header.startswith(">a_1 length=4 ")
    assert re.fullmatch("MK[A-Y]V", residues)
    assert b"1 protein filled, 1 residue drawn" in done.stderr


def test_the_output_may_stand_behind_options(tmp_path: Path, causal: str, masked: str):
    """As in README: `printf ... | protperf generate RUN --fill - filled.fasta`."""
    filled = tmp_path / "filled.fasta"
    done = run("", masked, "--fill", "-", str(filled), input=b">a\nMK<mask>V\n")
    assert done.returncode == 0, done.stderr.decode()
    assert filled.read_text().startswith(">a_1 length=4 ")
    assert main([causal, "--num", "2", str(tmp_path / "new.fasta"), "--max-length", "5"]) == 0
    assert len(read_fasta(tmp_path / "new.fasta")) == 2


def test_the_summary_says_how_many_were_cut_and_no_rate_of_a_moment(
    causal: str, capsys: pytest.CaptureFixture[str]
):
    assert main([causal, "--num", "8", "--max-length", "6", "--top-p", "0.9"]) == 0
    output, log = capsys.readouterr()
    cut = output.count("ended=max_length")
    assert f"8 proteins generated, {cut} of them cut at --max-length 6, " in log
    assert float(re.search(r"([\d.]+) seconds", log)[1]) >= 1 or "residues/s" not in log


def test_help_does_not_import_torch():
    done = run("import atexit; atexit.register(lambda: print('torch' in sys.modules))", "--help")
    assert done.returncode == 0
    assert done.stdout.endswith(b"False\n")
    assert b"--temperature" in done.stdout
