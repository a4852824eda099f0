"""A run: the task, the data and the trainer that settings describe, and the checkpoint that it goes on from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import OmegaConf
from pytorch_lightning.loggers import Logger

from protperf.callbacks import AttentionImages, Divergence, EarlyStop, Progress, Redraw, Report, StepSeeds
from protperf.callbacks.images import NUM_PROTEINS, choose_proteins
from protperf.checkpoint import (
    BEST_NAME,
    MODEL_DIR,
    TrainedModel,
    check_resumable,
    describe,
    load_model,
    read_checkpoint,
    step_checkpoints,
    step_of,
)
from protperf.checkpoint.export import export_model
from protperf.checkpoint.facts import CONFIG_NAME
from protperf.checkpoint.saving import Checkpoints
from protperf.checkpoint.stopping import StopRequest
from protperf.config import to_dict
from protperf.data import WindowData
from protperf.formats import FormatError, one_line
from protperf.formats.commit import commit_bytes
from protperf.formats.manifest import check_lengths
from protperf.formats.metrics_file import METRICS_NAME, read_metrics
from protperf.formats.run_config import read_run_config
from protperf.loggers import CheckpointSender, build_loggers
from protperf.model import ProteinModel
from protperf.task import LanguageModelTask
from protperf.train.settings import SECTIONS, Settings
from protperf.train.trainers import build_trainer, resolve

log = logging.getLogger("protperf")

_ATTENTION_KEYS = (
    "attention",
    "num_features",
    "projection",
    "projection_norms",
    "projection_seed",
    "features",
    "rfa_gate",
    "linformer_rank",
    "linformer_length",
    "lsh_rounds",
    "lsh_buckets",
    "softmax_layers",
)
"""Keys of the model that decide what its attention has of its own."""

_FREE_KEYS = (*_ATTENTION_KEYS, "lsh_window", "dropout", "activation_checkpointing")
"""Keys of the model that a run may change where it begins with trained weights; any other makes them mean something else."""


@dataclass(frozen=True)
class Run:
    """All that one training run is made of; `settings` say what `auto` became."""

    settings: Settings
    task: LanguageModelTask
    data: WindowData
    trainer: pl.Trainer
    checkpoint: Path | None


def build_run(settings: Settings, stop: StopRequest | None = None) -> Run:
    """Build the task, the data and the trainer that the settings describe.

    Args:
        settings: of the run.
        stop: through which the process is told to stop; by default it is not.

    Raises:
        ValueError: the data do not fit, or the run folder holds a run that should not go on.
    """
    settings = replace(settings, trainer=resolve(settings.trainer))
    seed = settings.trainer.seed
    _check_batch(settings)
    pl.seed_everything(seed, verbose=False)
    data = WindowData(settings.data, settings.objective, seed=seed)
    _check_lengths(settings, data)
    begun_with = load_model(settings.init_from) if settings.init_from else None
    description = describe(
        settings.model,
        settings.objective,
        attend_across_documents=settings.data.attend_across_documents,
        dataset_digest=data.digest,
        origin=begun_with.origin if begun_with else "",
    )
    checkpoint = _find_start(settings, description)
    task = LanguageModelTask(
        settings.model,
        settings.objective,
        settings.optim,
        attend_across_documents=settings.data.attend_across_documents,
        window=data.window,
        valid_sets=settings.data.valid_sets,
        test_sets=tuple(data.test_shards),
        compile_blocks=settings.trainer.compile,
        windows_at_once=settings.trainer.windows_at_once,
    )
    if begun_with and checkpoint is None:
        _begin_with(begun_with, task.model)
    stop = stop or StopRequest()
    loggers = build_loggers(
        settings.logger, run_dir=settings.run_dir, name=settings.name, settings=_origin(settings, data)
    )
    callbacks = build_callbacks(settings, task, data, description, stop, loggers)
    return Run(settings, task, data, build_trainer(settings, callbacks, loggers), checkpoint)


def _begin_with(trained: TrainedModel, model: ProteinModel) -> None:
    """Give a new model the weights of a trained one; features too, unless its attention is another.

    Raises:
        ValueError: they do not fit; the message says which.
    """
    mine, theirs = (
        [each.config.attention_of(layer) == "reformer" for layer in range(each.config.num_layers)]
        for each in (model, trained.model)
    )
    if len(mine) == len(theirs) and mine != theirs:
        raise ValueError(
            f"{trained.path}: has attention {trained.model.config.attention!r}, this run {model.config.attention!r}; queries of "
            "'reformer' are its keys, so that neither can begin with the weights of the other: choose another model.attention"
        )
    for key, value in to_dict(model.config).items():
        found = getattr(trained.model.config, key)
        if value != found and key not in _FREE_KEYS:
            raise ValueError(
                f"{trained.path}: its weights were made with model.{key}={found}, this run has {value}; leave the key out "
                f"(allowed to change: {', '.join(_FREE_KEYS)})"
            )
    same = all(getattr(model.config, key) == getattr(trained.model.config, key) for key in _ATTENTION_KEYS)
    if model.config.attention == "rfa" and model.causal != trained.model.causal:
        same = False  # one direction alone has gates
    weights = trained.model.state_dict()
    model.load_weights(weights, place=str(trained.path), projections="load" if same else "draw")
    log.info("begins with the weights of %s%s", trained.path, "" if same else ", with features of its own")


def _origin(settings: Settings, data: WindowData) -> dict[str, Any]:
    """Return what decides a run's results, for loggers: the configuration and the datasets' digests."""
    values = {name: to_dict(getattr(settings, name)) for name in SECTIONS}
    paths = (settings.data.path, *settings.data.more_paths)
    digests = [shards.manifest.digest for shards in data.train_shards.sets]
    return {**values, "dataset_digests": dict(zip(paths, digests, strict=True))}


def _check_lengths(settings: Settings, data: WindowData) -> None:
    """Raise if a dataset may hold proteins that the model does not take."""
    paths = (settings.data.path, *settings.data.more_paths)
    for path, shards in zip(paths, data.train_shards.sets, strict=True):
        check_lengths(
            shards.manifest,
            path,
            window=data.window,
            across=settings.data.attend_across_documents,
            most=settings.model.max_length,
        )


def _check_batch(settings: Settings) -> None:
    """Raise unless the ranks can share a batch evenly."""
    size, ranks = settings.data.batch_size, settings.trainer.devices * settings.trainer.num_nodes
    if size % ranks:
        raise ValueError(
            f"data.batch_size is {size} windows, of all {ranks} ranks together; give a multiple of {ranks}, such as "
            f"data.batch_size={-(-size // ranks) * ranks}"
        )


def build_callbacks(
    settings: Settings,
    task: LanguageModelTask,
    data: WindowData,
    description: dict[str, Any],
    stop: StopRequest,
    loggers: list[Logger],
) -> list[pl.Callback]:
    """Return the callbacks in their order: what changes state before what saves it."""
    trainer = settings.trainer
    monitor = f"{settings.data.valid_sets[0]}/loss"
    divergence = Divergence(task.model, last_checkpoint=lambda: _last(settings.checkpoint_dir))
    return [
        Redraw(task.model, every=trainer.redraw_every, at_once=trainer.windows_at_once),
        StepSeeds(data.position.start, seed=trainer.seed),
        data.position,
        *_build_images(settings, task, data),  # before the report, whose clock stands still until then
        divergence,
        Report(
            task.model,
            task.train_metrics,
            task.results,
            every=trainer.log_every,
            position=data.position.start,
            precision=trainer.precision,
            diverged=divergence.error,
        ),
        Progress(),
        EarlyStop(task.results, monitor=monitor, patience=trainer.early_stop_after),
        Checkpoints(
            settings.checkpoint_dir,
            every=trainer.checkpoint_every,
            validate_every=trainer.validate_every,
            keep=trainer.keep_checkpoints,
            description=description,
            results=task.results,
            monitor=monitor,
            stop=stop,
            diverged=divergence.error,
            saved=CheckpointSender(loggers),
        ),
    ]


def _last(folder: Path) -> Path | None:
    return max(step_checkpoints(folder), key=step_of, default=None)


def _build_images(settings: Settings, task: LanguageModelTask, data: WindowData) -> list[AttentionImages]:
    """Return the callback that draws attention maps of the first validation set's first proteins, if asked for."""
    every = settings.logger.attention_images_every * settings.trainer.validate_every
    if not every:
        return []
    shards = data.valid_shards[settings.data.valid_sets[0]]
    proteins = choose_proteins(shards.read_many(range(min(NUM_PROTEINS, len(shards)))))
    return [AttentionImages(task.model, proteins, every=every, folder=settings.run_dir / "images")]


def _find_start(settings: Settings, description: dict[str, Any]) -> Path | None:
    """Return the latest whole checkpoint, to go on from; `None` at the first start."""
    checkpoints = step_checkpoints(settings.checkpoint_dir)
    best = settings.checkpoint_dir / BEST_NAME
    if (
        not checkpoints and best.is_file()
    ):  # a run that was killed between its first validation and its first checkpoint
        checkpoints = [best]
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


def test_best(run: Run) -> None:
    """Test the best checkpoint of a run that is at its end, unless that is recorded already; all ranks take part."""
    best = run.settings.checkpoint_dir / BEST_NAME
    trainer, step = run.trainer, run.trainer.global_step
    names = [f"{prefix}/loss" for prefix in run.task.test_prefixes]
    is_due = False
    if trainer.is_global_zero:
        metrics_path = run.settings.run_dir / METRICS_NAME
        try:
            recorded = read_metrics(metrics_path) if metrics_path.exists() else {}
        except (FormatError, OSError) as error:  # the other ranks wait for the answer
            log.warning("%s; testing in any case", error)
            recorded = {}
        is_due = any(step not in recorded.get(name, {}) for name in names) and _is_whole(best)
    if trainer.strategy.broadcast(is_due):
        if trainer.is_global_zero:
            log.info("testing %s", best)
        trainer.test(run.task, run.data, ckpt_path=best, verbose=False, weights_only=True)


def share_best(run: Run) -> None:
    """Write the best model's folder, to be shared, into the run's; call it on the first rank.

    A run that has trained is not worse for a full disk now: that costs a warning.
    """
    best, folder = run.settings.checkpoint_dir / BEST_NAME, run.settings.run_dir / MODEL_DIR
    if not best.is_file():
        return
    try:
        export_model(load_model(best), folder)
    except (ValueError, OSError, MemoryError) as error:
        log.warning("%s; the best model has no folder, `protperf convert` makes one", error)
    else:
        log.info("the best model, to be shared: %s", folder)


def _is_whole(best: Path) -> bool:
    """Tell whether there is a best checkpoint to test; say why not."""
    try:
        read_checkpoint(best)
    except (FormatError, OSError) as error:
        log.warning("%s; there is no best model to test", error)
        return False
    return True


def describe_start(run: Run) -> str:
    """Return what is about to happen, for the log."""
    if run.checkpoint is None:
        return f"{len(run.data.train_shards):,} training windows of {run.data.window:,} tokens; first start"
    step, wanted = read_checkpoint(run.checkpoint)["global_step"], run.trainer.max_steps
    done = f"; trainer.max_steps={wanted} is reached already" if step >= wanted else ""
    return f"going on from {run.checkpoint}{done}"


def record_settings(settings: Settings) -> None:
    """Keep the configuration of an accepted start in the run's folder; log what differs from the start before."""
    values = {name: to_dict(getattr(settings, name)) for name in SECTIONS}
    path = settings.run_dir / CONFIG_NAME
    try:
        changes = _changes(path, values) if path.exists() else []
    except FormatError as error:
        log.warning("%s", error)
        changes = []
    except OSError as error:
        log.warning("%s: %s; it is written anew", path, error.strerror or error)
        changes = []
    if changes:
        log.info("other settings than at the last start: %s", ", ".join(changes))
    try:
        commit_bytes(path, OmegaConf.to_yaml(OmegaConf.create(values)).encode())
    except OSError as error:
        log.warning("%s: %s; training goes on without this record", path, error.strerror or error)


def _changes(path: Path, values: dict[str, Any]) -> list[str]:
    """Return what differs from the configuration of the start before."""
    before = read_run_config(path, remedy="it is written anew")
    return [
        one_line(f"{section}.{key} {old} -> {new}")
        for section, keys in values.items()
        for key, new in keys.items()
        if (old := before.get(section, {}).get(key)) != (list(new) if isinstance(new, tuple) else new)
    ]
