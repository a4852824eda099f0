"""Weights & Biases: one run for a run folder, whatever number of starts; never a question, never a failure."""

from __future__ import annotations

import logging
import netrc
import os
import re
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
from pytorch_lightning.utilities import rank_zero_only

from protperf.config import LoggerConfig
from protperf.formats.commit import commit_bytes
from protperf.loggers.guarded import GuardedLogger

if TYPE_CHECKING:
    from wandb import Run

log = logging.getLogger("protperf")

STEP_NAME = "trainer/global_step"
"""The optimizer step, the x-axis of all metrics: W&B's own step starts at 0 again with each offline start."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID_NAME = "wandb_id"
_SECONDS_TO_CONNECT = 5
_SECONDS_TO_START = 30


class WandbRun(GuardedLogger):
    """Logs to W&B: online if a key is there and the server answers, else offline, for `wandb sync` later.

    Args:
        config: project, team, which checkpoints.
        run_dir: the run's folder; the id in it lets every start continue the same W&B run.
        name: of the run.
        settings: what the run was started with, as plain values, for W&B's table of runs.
    """

    def __init__(self, config: LoggerConfig, *, run_dir: Path, name: str, settings: dict[str, Any]) -> None:
        super().__init__("W&B")
        self._config = config
        self._run_dir = run_dir
        self._run_name = name
        self._settings = settings
        self._run: Run | None = None

    @property
    def experiment(self) -> Run | None:
        """Return W&B's run on the first rank, started when first asked for; elsewhere, or if that failed, `None`.

        Lightning asks when every process knows its rank: before, each node would take its first for the run's.
        """
        if self._run is None and not self._has_failed and not rank_zero_only.rank:  # type: ignore[attr-defined]
            with self._guarded():
                self._run = self._start()
        return self._run

    @rank_zero_only
    def log_checkpoint(self, path: Path, *, is_best: bool) -> None:
        """Send a checkpoint as an artifact, if such are asked for; W&B copies the file before this returns.

        Args:
            path: a whole file.
            is_best: whether validation never went better; its alias is then `best`, else `latest`.
        """
        wanted = self._config.artifacts == "all" or (self._config.artifacts == "best" and is_best)
        run = self.experiment if wanted else None
        if run is None:
            return
        with self._guarded():
            import wandb

            artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"file": path.name})
            artifact.add_file(str(path), name="model.ckpt", policy="mutable", skip_cache=True)
            run.log_artifact(artifact, aliases=["best" if is_best else "latest"])

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if (run := self.experiment) is not None:
            run.log({**metrics, STEP_NAME: step})

    def _log_images(self, key: str, images: list[np.ndarray], step: int) -> None:
        if (run := self.experiment) is not None:
            import wandb

            run.log({key: [wandb.Image(image) for image in images], STEP_NAME: step})

    def _close(self) -> None:
        """Finish the run with the status that this process is about to end with."""
        run, self._run = self._run, None
        if run is None:
            return
        status = _exit_status(sys.exc_info()[1])
        try:
            if status == os.EX_TEMPFAIL:
                run.mark_preempting()
            run.finish(exit_code=status)
        except Exception:
            _stop_service(status)  # its hook at the end of the process would print a traceback
            raise

    def _start(self) -> Run:
        if os.environ.get("WANDB_MODE", "online") != "online":
            return self._init(None)
        reason = _reason_to_stay_offline()
        if reason is None:
            try:
                return self._init(None)
            except Exception as error:
                reason = " ".join(str(error).split())
                _stop_service(1)  # it would hold on to the run's id
        sync = f"wandb sync {self._run_dir}/wandb/offline-run-*"
        log.info("W&B is offline: %s; `%s` sends the run later", reason, sync)
        return self._init("offline")

    def _init(self, mode: Any) -> Run:
        import wandb

        logging.getLogger("opentelemetry").setLevel(
            logging.CRITICAL
        )  # W&B's reports on itself, which may fail
        run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            name=self._run_name,
            id=_run_id(self._run_dir),
            resume="allow",
            dir=str(self._run_dir),
            mode=mode,
            settings=wandb.Settings(
                silent=mode == "offline",  # the log says it in one line
                init_timeout=_SECONDS_TO_START,
                finish_timeout=self._config.finish_seconds,
            ),
        )
        run.define_metric(STEP_NAME)
        run.define_metric("*", step_metric=STEP_NAME, step_sync=True)
        run.config.update(self._settings, allow_val_change=True)
        return run


def has_wandb_key() -> bool:
    """Tell whether W&B can log in without asking: a key in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(_server()[0]) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def reaches_wandb() -> bool:
    """Tell whether W&B's server, or the proxy on the way to it, answers."""
    try:
        socket.create_connection(first_stop(), timeout=_SECONDS_TO_CONNECT).close()
    except OSError:
        return False
    return True


def _reason_to_stay_offline() -> str | None:
    if not has_wandb_key():
        return "no API key (WANDB_API_KEY, or `wandb login` once)"
    if not reaches_wandb():
        return f"{':'.join(map(str, first_stop()))} does not answer"
    return None


def _url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def _server() -> tuple[str, int]:
    return _address(_url())


def first_stop() -> tuple[str, int]:
    """Return what W&B's client connects to first: a proxy if the environment names one for the server."""
    proxy = getproxies().get(urlsplit(_url()).scheme)
    if proxy is None or proxy_bypass(_server()[0]):
        return _server()
    return _address(proxy if "//" in proxy else f"http://{proxy}")


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def _stop_service(status: int) -> None:
    import wandb

    with suppress(Exception):
        wandb.teardown(exit_code=status)


def _exit_status(error: BaseException | None) -> int:
    """Return the status that a process ends with for this exception."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 0 if error is None else 1


def _run_id(run_dir: Path) -> str:
    """Return the run's W&B id, kept in its folder so that every start continues the same run."""
    path = run_dir / _ID_NAME
    known = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    if not _ID.fullmatch(known):
        if path.exists():
            log.warning("%s: holds no id of a W&B run; a new run begins there", path)
        known = secrets.token_hex(4)
        commit_bytes(path, known.encode())
    return known
