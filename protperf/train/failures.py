"""What ends a run besides mistakes and signals: said in one line, with what to do."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import DistError

from protperf.batches import is_out_of_memory
from protperf.checkpoint import step_checkpoints
from protperf.checkpoint.stopping import TRY_AGAIN
from protperf.train.settings import Settings

_OF_WORKERS = ("DataLoader worker", "DataLoader timed out")
_OF_RANKS = ("gloo", "NCCL", "ncclRemoteError", "Connection closed by peer", "Socket Timeout", "store->get")


def explain_failure(error: BaseException, settings: Settings) -> tuple[str, int] | None:
    """Return a line for people and the exit status, where a failure is of a known kind.

    `TRY_AGAIN` where the same command may well go through: what broke was another process or the network.

    Args:
        error: what ended the run.
        settings: of the run, as resolved.
    """
    if is_out_of_memory(error):
        return _out_of_memory(settings), 1
    text = " ".join(str(error).split())
    if any(part in text for part in _OF_WORKERS):
        line = (
            f"a process that reads data died ({text}); on a machine short of memory lower data.num_workers (it is "
            f"{settings.data.num_workers}); {_goes_on(settings.checkpoint_dir)}"
        )
        return line, TRY_AGAIN
    if isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(part in text for part in _OF_RANKS)
    ):
        line = f"another rank ended, or the network to it broke or is set up wrongly ({text}); {_goes_on(settings.checkpoint_dir)}"
        return line, TRY_AGAIN
    return None


def _out_of_memory(settings: Settings) -> str:
    ranks = settings.trainer.devices * settings.trainer.num_nodes
    share = settings.data.batch_size // ranks
    at_once = min(settings.trainer.windows_at_once or share, share)
    knobs = []
    if at_once > 1:
        knobs.append(f"trainer.windows_at_once={at_once // 2} (it is {at_once}; nothing else changes)")
    if not settings.model.activation_checkpointing:
        knobs.append("model.activation_checkpointing=true")
    if settings.trainer.precision == "32-true" and settings.trainer.accelerator == "gpu":
        knobs.append("trainer.precision=bf16-mixed")
    if settings.trainer.strategy != "fsdp" and ranks > 1:
        knobs.append("trainer=fsdp")
    knobs.append("a shorter data.context_length")
    return f"out of memory; what helps, the first first: {', '.join(knobs)}"


def _goes_on(folder: Path) -> str:
    checkpoints = step_checkpoints(folder)
    where = f"from {checkpoints[-1]}" if checkpoints else "from the start, no checkpoint was written yet"
    return f"the same command goes on {where}"
