"""The Lightning trainer of a run: devices, strategy, precision."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from protperf.checkpoint.saving import CommittedFiles
from protperf.config import TrainerConfig
from protperf.train.launcher import be_patient
from protperf.train.settings import Settings


def resolve(config: TrainerConfig) -> TrainerConfig:
    """Replace `auto` and 0 by what this machine and its launcher have.

    Raises:
        ValueError: a precision that the device does not have.
    """
    accelerator = config.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    precision = config.precision
    if precision == "auto":
        has_bf16 = accelerator == "gpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        precision = "bf16-mixed" if has_bf16 else "32-true"
    if accelerator == "cpu" and precision == "16-mixed":
        raise ValueError("trainer.precision=16-mixed needs a GPU; on a CPU give bf16-mixed or 32-true")
    launched_devices, launched_nodes = _launched()
    here = torch.cuda.device_count() if accelerator == "gpu" else 0
    devices = config.devices or launched_devices or max(1, here)
    num_nodes = config.num_nodes or launched_nodes or 1
    if num_nodes > 1 and not launched_nodes and not {"MASTER_ADDR", "NODE_RANK"} <= os.environ.keys():
        raise ValueError(
            f"trainer.num_nodes={num_nodes}: nobody started this process as one of several nodes; start it with torchrun or "
            "srun (docs/cluster.md), or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each node"
        )
    strategy = config.strategy
    if strategy == "auto" and devices * num_nodes > 1:
        strategy = "ddp"
    return replace(
        config,
        accelerator=accelerator,
        precision=precision,
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
    )


def _launched() -> tuple[int, int]:
    """Return the processes on each node and the nodes that torchrun or srun started; zeros without them."""
    if TorchElasticEnvironment.detect():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if "SLURM_STEP_NUM_TASKS" in os.environ and SLURMEnvironment.detect():
        nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        return int(os.environ["SLURM_STEP_NUM_TASKS"]) // nodes, nodes
    return 0, 0


def build_trainer(settings: Settings, callbacks: list[pl.Callback], loggers: list[Logger]) -> pl.Trainer:
    """Return a Lightning trainer that leaves position, checkpoints, signals and reports to our callbacks.

    One endless epoch (`max_epochs=-1` over a loader without length), so that no epoch boundary can lose a step.

    Args:
        settings: with what `resolve` returned in its trainer's place.
        callbacks: in their order.
        loggers: of the run.
    """
    _quieten_lightning()
    config = settings.trainer
    trainer = _make_trainer(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=_strategy(config),
        plugins=_plugins(),
        precision=config.precision,
        deterministic=config.deterministic,
        max_epochs=-1,
        max_steps=config.max_steps,
        gradient_clip_val=config.gradient_clip or None,
        val_check_interval=config.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        inference_mode=False,  # sharded weights are gathered in place, which inference tensors do not allow
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=loggers,
        default_root_dir=settings.run_dir,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    _leave_signals_to_us(trainer)
    return trainer


def _leave_signals_to_us(trainer: pl.Trainer) -> None:
    """Keep Lightning out of the signals: its handlers speak to other ranks from inside of a step, and may hang there.

    It also asks all ranks before each batch whether the first one was told to stop, which makes a GPU wait.
    """
    cast(Any, trainer)._signal_connector.register_signal_handlers = lambda: None
    cast(Any, trainer.fit_loop.epoch_loop)._broadcast_sigterm_tensor = lambda: None
    be_patient()


def _strategy(config: TrainerConfig) -> str | Strategy:
    """Return how ranks share the work.

    Projections are equal on all ranks by themselves (a function of seed, layer and redraw), so buffers need no broadcast.
    """
    if config.strategy == "ddp":
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    if config.strategy == "fsdp":
        return ModelParallelStrategy(
            data_parallel_size=config.devices * config.num_nodes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,  # one file, which any other strategy goes on from
        )
    return config.strategy


def _plugins() -> list[Any]:
    """Return how checkpoints are written; on SLURM also that Lightning requeues no job: the batch script does that."""
    plugins: list[Any] = [CommittedFiles()]
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))
    return plugins


def _make_trainer(**arguments: Any) -> pl.Trainer:
    """Build the trainer; what this machine does not have is said with the keys that asked for it."""
    try:
        return pl.Trainer(**arguments)
    except (MisconfigurationException, ValueError) as error:
        chosen = {key: arguments[key] for key in ("accelerator", "devices", "num_nodes", "precision")}
        said = " ".join(f"trainer.{key}={value}" for key, value in chosen.items())
        raise ValueError(f"{said}: {' '.join(str(error).split())}") from error


def _quieten_lightning() -> None:
    """Keep what it says of its own choices and products out of the log; warnings of substance stay."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    warnings.filterwarnings("ignore", ".*`broadcast_buffers` is deprecated.*")
    warnings.filterwarnings("ignore", ".*`srun` command is available.*")
