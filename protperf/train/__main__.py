"""`protperf train`: build what the configuration says, go on from the last checkpoint if there is one, train."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.utilities import rank_zero_only

from protperf.checkpoint import remove_unfinished
from protperf.checkpoint.stopping import StopRequest
from protperf.formats import one_line
from protperf.formats.commit import lock_folder
from protperf.loggers import close_loggers
from protperf.train.failures import explain_failure
from protperf.train.runs import build_run, describe_start, record_settings, share_best, test_best
from protperf.train.settings import Settings, explain, read_settings
from protperf.train.trainers import resolve

log = logging.getLogger("protperf")


def main() -> None:
    """Run Hydra on the command line; errors leave as `ValueError` with one line."""
    logging.raiseExceptions = False  # a full disk costs lines of train.log, not a traceback for each
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then passes exceptions on instead of printing them
    try:
        train()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error)) from error


@hydra.main(version_base="1.3", config_path="pkg://protperf.conf", config_name="train")
def train(config: DictConfig) -> None:
    """Train one model; a user's mistake ends the process with one line (Hydra would add its own to an exception)."""
    with StopRequest() as stop:
        try:
            settings = _in_sweep(read_settings(config, HydraConfig.get().overrides.task))
            with _lock_run(settings.run_dir), ExitStack() as at_end:
                _run(settings, stop, at_end)
        except (ValueError, OSError) as error:
            if os.environ.get("PROTPERF_DEBUG") or _is_job_of_sweep():
                raise  # Hydra takes a job's exception to the command that waits for the sweep
            raise SystemExit(_from_rank(f"protperf train: {one_line(str(error))}")) from error


def _run(settings: Settings, stop: StopRequest, at_end: ExitStack) -> None:
    """Build, train, test; print the run's folder."""
    if not cast(Any, rank_zero_only).rank:
        remove_unfinished(settings.checkpoint_dir)
    run = build_run(settings, stop)
    at_end.callback(close_loggers, run.trainer.loggers)
    parameters = sum(parameter.numel() for parameter in run.task.model.parameters())
    is_first = run.trainer.is_global_zero
    if is_first:
        log.info("%s parameters; %s", f"{parameters:,}", describe_start(run))
        # once the checkpoint is taken: a start that is refused leaves no trace
        accepted = LambdaCallback(on_train_start=lambda *_: record_settings(run.settings))
        cast(Any, run.trainer).callbacks.append(accepted)
    try:
        run.trainer.fit(run.task, run.data, ckpt_path=run.checkpoint, weights_only=True)
        if stop.agreed(at_once=True):
            stop.end(step=run.trainer.global_step, is_first_rank=is_first)
        test_best(run)
        stop.settle()
    except SystemExit:
        if stop.is_forced:  # Lightning has made a failure of it
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    except (RuntimeError, MemoryError) as error:
        known = explain_failure(error, run.settings)
        if known is None or os.environ.get("PROTPERF_DEBUG"):
            raise
        line, status = known
        if _is_job_of_sweep():
            raise ValueError(line) from error
        print(_from_rank(f"protperf train: {line}"), file=sys.stderr)
        raise SystemExit(status) from error
    if is_first:
        share_best(run)
        print(settings.run_dir)


def _from_rank(line: str) -> str:
    """Say which rank speaks, unless it is the first."""
    rank = cast(Any, rank_zero_only).rank
    return f"[rank {rank}] {line}" if rank else line


def _is_sweep() -> bool:
    """Tell whether this is one run of several that `--multirun` makes."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def _is_job_of_sweep() -> bool:
    """Tell whether submitit runs this, which waits for ever for a job that ends without a result or an exception."""
    return "SUBMITIT_EXECUTOR" in os.environ


def _in_sweep(settings: Settings) -> Settings:
    """Give each run of `--multirun` its own folder below the sweep's.

    Raises:
        ValueError: a sweep here over several processes, each of which would run the whole sweep again. In jobs of its own
            (submitit) SLURM starts the processes of each run.
    """
    if not _is_sweep():
        return settings
    trainer = resolve(settings.trainer)
    if trainer.devices * trainer.num_nodes > 1 and not _is_job_of_sweep():
        raise ValueError(
            "--multirun trains each run with one process: trainer.devices=1 trainer.num_nodes=1; for more, "
            "hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N starts them in jobs of SLURM"
        )
    return replace(settings, run_dir=Path(HydraConfig.get().runtime.output_dir))


def _lock_run(run_dir: Path) -> AbstractContextManager[Any]:
    """Keep a second process out of the run's folder; the ranks of one run share the first one's lock."""
    is_first_node = os.environ.get("NODE_RANK", "0") == "0"
    if cast(Any, rank_zero_only).rank or not is_first_node:
        return nullcontext()
    busy = f"{run_dir}: another process trains there; wait for it, or give another name"
    return lock_folder(run_dir / ".lock", busy=busy)


if __name__ == "__main__":
    main()
