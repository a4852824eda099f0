"""`protperf train`: build what the configuration says, go on from the last checkpoint if there is one, train."""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import hydra
import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.strategies import DDPStrategy, Strategy
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from protperf.callbacks import Redraw, Report, StepSeeds
from protperf.checkpoint import check_resumable, describe, step_checkpoints, step_of
from protperf.checkpoint.saving import Checkpoints
from protperf.config import (
    DataConfig,
    LoggerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainerConfig,
    from_section,
    to_dict,
)
from protperf.data import WindowData
from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes, lock_folder
from protperf.loggers import build_loggers
from protperf.task import LanguageModelTask

log = logging.getLogger("protperf")

CONFIG_NAME = "config.yaml"

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
}
"""Section of the configuration -> the dataclass that types and checks it."""


@dataclass(frozen=True)
class Settings:
    """A whole configuration, typed and checked."""

    model: ModelConfig
    objective: ObjectiveConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    name: str
    run_dir: Path
    resume: bool

    @property
    def checkpoint_dir(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.run_dir / "checkpoints"


@dataclass(frozen=True)
class Run:
    """All that one training run is made of."""

    task: LanguageModelTask
    data: WindowData
    trainer: pl.Trainer
    checkpoint: Path | None


def main() -> None:
    """Run Hydra on the command line; errors leave as `ValueError` with one line."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then passes exceptions on instead of printing them
    try:
        train()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error)) from error


@hydra.main(version_base="1.3", config_path="pkg://protperf.conf", config_name="train")
def train(config: DictConfig) -> None:
    """Train one model; a user's mistake ends the process with one line (Hydra would add its own to an exception)."""
    try:
        settings = _in_sweep(read_settings(config))
        with _lock_run(settings.run_dir):
            run = build_run(settings)
            parameters = sum(parameter.numel() for parameter in run.task.model.parameters())
            if run.trainer.is_global_zero:
                log.info("%s parameters; %s", f"{parameters:,}", _describe_start(run))
                _record_settings(settings)
            run.trainer.fit(run.task, run.data, ckpt_path=run.checkpoint)
    except (ValueError, OSError) as error:
        if os.environ.get("PROTPERF_DEBUG"):
            raise
        raise SystemExit(f"protperf train: {error}") from error
    if run.trainer.is_global_zero:
        print(settings.run_dir)


def _in_sweep(settings: Settings) -> Settings:
    """Give each run of `--multirun` its own folder below the sweep's.

    Raises:
        ValueError: a sweep over several processes, each of which would run the whole sweep again.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        return settings
    if settings.trainer.devices * settings.trainer.num_nodes > 1:
        raise ValueError(
            "--multirun works with trainer.devices=1 trainer.num_nodes=1; start larger runs one by one"
        )
    return replace(settings, run_dir=Path(hydra_config.runtime.output_dir))


def _lock_run(run_dir: Path) -> AbstractContextManager[Any]:
    """Keep a second process out of the run's folder; the ranks of one run share the first one's lock."""
    if cast(Any, rank_zero_only).rank:
        return nullcontext()
    busy = f"{run_dir}: another process trains there; wait for it, or give another name"
    return lock_folder(run_dir / ".lock", busy=busy)


def read_settings(config: DictConfig) -> Settings:
    """Type and check a composed configuration.

    Raises:
        ValueError: a value is missing or not allowed.
    """
    missing = OmegaConf.missing_keys(config)
    if missing:
        key = min(missing)
        raise ValueError(f"{key} is not set; give {key}=VALUE")
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    _check_top(values)
    sections: dict[str, Any] = {
        name: from_section(config_class, values[name]) for name, config_class in SECTIONS.items()
    }
    return Settings(
        **sections, name=str(values["name"]), run_dir=Path(values["run_dir"]), resume=values["resume"]
    )


def _check_top(values: dict[str, Any]) -> None:
    """Check the keys that stand in no section."""
    unknown = values.keys() - SECTIONS.keys() - {"name", "run_dir", "resume"}
    if unknown:
        raise ValueError(
            f"no key {min(unknown)!r} in the configuration; `protperf train --cfg job` lists the keys"
        )
    if not isinstance(values["resume"], bool):
        raise ValueError(f"resume is {values['resume']!r}; allowed: true, false")
    name = str(values["name"] or "")
    if name in ("", ".", "..") or Path(name).is_absolute():
        raise ValueError(
            f"name is {name!r}; give name=NAME: it names the run's folder (run_dir=PATH puts it anywhere)"
        )


def build_run(settings: Settings) -> Run:
    """Build the task, the data and the trainer that the settings describe.

    Raises:
        ValueError: the data do not fit, or the run folder holds a run that should not go on.
    """
    seed = settings.trainer.seed
    pl.seed_everything(seed, verbose=False)
    data = WindowData(settings.data, settings.objective, seed=seed)
    description = describe(
        settings.model,
        settings.objective,
        attend_across_documents=settings.data.attend_across_documents,
        accumulate_batches=settings.trainer.accumulate_batches,
        dataset_digest=data.digest,
    )
    checkpoint = _find_start(settings, description)
    task = LanguageModelTask(
        settings.model,
        settings.objective,
        settings.optim,
        attend_across_documents=settings.data.attend_across_documents,
        valid_sets=settings.data.valid_sets,
    )
    callbacks = build_callbacks(settings, task, data, description)
    return Run(task, data, build_trainer(settings, callbacks), checkpoint)


def build_callbacks(
    settings: Settings, task: LanguageModelTask, data: WindowData, description: dict[str, Any]
) -> list[pl.Callback]:
    """Return the callbacks in their order: what changes state before what saves it."""
    trainer = settings.trainer
    return [
        Redraw(task.model, every=trainer.redraw_every),
        StepSeeds(data.position.start, seed=trainer.seed),
        data.position,
        Report(task.model, task.train_metrics, task.valid_results, every=trainer.log_every),
        Checkpoints(
            settings.checkpoint_dir,
            every=trainer.checkpoint_every,
            keep=trainer.keep_checkpoints,
            description=description,
            results=task.valid_results,
            monitor=f"{settings.data.valid_sets[0]}/loss",
        ),
    ]


def build_trainer(settings: Settings, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Return a Lightning trainer that leaves position, checkpoints and reports to our callbacks.

    One endless epoch (`max_epochs=-1` over a loader without length), so that no epoch boundary can lose a step.
    """
    _quieten_lightning()
    config = settings.trainer
    strategy: str | Strategy = config.strategy
    if config.strategy == "ddp":
        strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = config.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "cpu" and config.precision == "16-mixed":
        raise ValueError("trainer.precision=16-mixed needs a GPU; on a CPU give bf16-mixed or 32-true")
    return _make_trainer(
        accelerator=accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=strategy,
        precision=config.precision,
        max_epochs=-1,
        max_steps=config.max_steps,
        accumulate_grad_batches=config.accumulate_batches,
        gradient_clip_val=config.gradient_clip or None,
        val_check_interval=config.validate_every * config.accumulate_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=build_loggers(
            settings.logger,
            run_dir=settings.run_dir,
            name=settings.name,
            settings={name: to_dict(getattr(settings, name)) for name in SECTIONS},
        ),
        default_root_dir=settings.run_dir,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _make_trainer(**arguments: Any) -> pl.Trainer:
    """Build the trainer; what this machine does not have is said with the keys that asked for it."""
    try:
        return pl.Trainer(**arguments)
    except MisconfigurationException as error:
        chosen = {key: arguments[key] for key in ("accelerator", "devices", "num_nodes", "precision")}
        said = " ".join(f"trainer.{key}={value}" for key, value in chosen.items())
        raise ValueError(f"{said}: {' '.join(str(error).split())}") from error


def explain(error: Exception) -> str:
    """Turn an error of Hydra or OmegaConf into one line, with the nearest key where one was mistyped."""
    text = " ".join(part.strip() for part in str(error).splitlines() if part.strip())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {text}; a value with special characters needs quotes: \"name='a=b'\""
    words = text.split("'")
    if "Could not override" in text and len(words) > 1:
        keys = [f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)]
        near = difflib.get_close_matches(words[1], [*keys, *SECTIONS, "name", "run_dir", "resume"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`protperf train --cfg job` lists the keys"
        return f"no key {words[1]!r} in the configuration; {hint}"
    return text


def _find_start(settings: Settings, description: dict[str, Any]) -> Path | None:
    """Return the latest whole checkpoint, to go on from; `None` at the first start."""
    checkpoints = step_checkpoints(settings.checkpoint_dir)
    if checkpoints and not settings.resume:
        raise ValueError(
            f"{settings.run_dir}: already holds a run; give another name, remove the folder, or resume=true"
        )
    for path in reversed(checkpoints):
        try:
            check_resumable(path, description)
        except FormatError as error:
            if path == checkpoints[0]:
                raise
            log.warning("%s; trying the checkpoint before it", error)
            continue
        return path
    return None


def _describe_start(run: Run) -> str:
    """Return what is about to happen, for the log."""
    if run.checkpoint is None:
        return f"{len(run.data.train_shards):,} training windows of {run.data.window:,} tokens; first start"
    step, wanted = step_of(run.checkpoint), run.trainer.max_steps
    done = f"; trainer.max_steps={wanted} is reached already" if step >= wanted else ""
    return f"going on from {run.checkpoint}{done}"


def _record_settings(settings: Settings) -> None:
    """Keep the configuration of an accepted start in the run's folder; log what differs from the start before."""
    values = {name: to_dict(getattr(settings, name)) for name in SECTIONS}
    path = settings.run_dir / CONFIG_NAME
    if path.exists():
        before = OmegaConf.load(path)
        changes = [
            f"{section}.{key} {old} -> {new}"
            for section, keys in values.items()
            for key, new in keys.items()
            if (old := OmegaConf.select(before, f"{section}.{key}")) != new
        ]
        if changes:
            log.info("other settings than at the last start: %s", ", ".join(changes))
    commit_bytes(path, OmegaConf.to_yaml(OmegaConf.create(values)).encode())


def _quieten_lightning() -> None:
    """Keep what it says of its own choices and products out of the log; warnings of substance stay."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    warnings.filterwarnings("ignore", ".*`broadcast_buffers` is deprecated.*")
    warnings.filterwarnings("ignore", ".*`srun` command is available.*")


if __name__ == "__main__":
    main()
