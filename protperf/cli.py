"""The front door: a table of commands, and one line instead of a traceback when the input is at fault.

A command runs as `__main__`, so that Lightning can start the other ranks of a distributed run by running it again.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys

from protperf.formats import one_line

COMMANDS = {
    "prepare": ("data_prep.prepare", "UniProt FASTA -> shards of concatenated windows"),
    "train": ("protperf.train", "train a masked or causal protein language model (Hydra)"),
    "evaluate": ("protperf.evaluate", "perplexity and accuracy beside the n-gram floors"),
    "embed": ("protperf.embed", "embeddings of proteins of any length"),
    "score": ("protperf.score", "likelihood of proteins, effects of mutations"),
    "generate": ("protperf.generate", "new proteins; masked residues filled in"),
    "maps": ("protperf.maps", "attention maps, similarity of amino acids, contacts"),
    "convert": (
        "protperf.convert",
        "a folder to share, from a checkpoint or from BERT, RoBERTa, ESM-2, Sapiens",
    ),
    "bench": (
        "protperf.bench",
        "time, memory and error of attention; training; reading; embedding; the paper's experiments",
    ),
    "plot": ("protperf.plot", "training curves; a map of embeddings"),
    "completion": ("protperf.completion", "what makes bash, zsh or fish complete all this at a TAB"),
}
"""Command -> module that runs it, and what it does. Modules are named, not imported: `--help` stays fast."""

DEBUG = "PROTPERF_DEBUG"
"""Variable that is set with `--debug`, for other processes of the run."""

USAGE_ERROR = 2
CLOSED_PIPE = 141
"""What a shell gives for a program that SIGPIPE ended."""


def main() -> int:
    """Run the command named by the first argument; return the exit status.

    Where whoever reads stdout stopped early (`| head`), it ends without a word.
    """
    if "_ARGCOMPLETE" in os.environ:  # a shell asks at a TAB
        from protperf.completion import complete

        complete(COMMANDS)
    try:
        try:
            return _run()
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except OSError as error:
        closed = isinstance(error, BrokenPipeError) and _is_closed_pipe(1)
        if not closed and os.environ.get(DEBUG):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter flushes at its end
        if not closed:
            print(f"protperf: <stdout>: {error.strerror}", file=sys.stderr)
        return CLOSED_PIPE if closed else 1


def _run() -> int:
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        from protperf import __version__

        print(__version__)
        return 0
    command = arguments[0]
    if command not in COMMANDS:
        print(f"protperf: no command {command!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE_ERROR
    sys.argv = [f"protperf {command}", *arguments[1:]]
    if debug:
        os.environ[DEBUG] = "1"
    if command != "train":  # which saves first
        signal.signal(signal.SIGTERM, _terminate)
    try:
        runpy.run_module(COMMANDS[command][0], run_name="__main__", alter_sys=True)
    except (ValueError, OSError) as error:
        if debug or (isinstance(error, BrokenPipeError) and _is_closed_pipe(1)):
            raise
        print(
            f"protperf {command}: {one_line(str(error))}", file=sys.stderr
        )  # it may quote a file or its name
        return 1
    except MemoryError:
        print(f"protperf {command}: out of memory; --help tells which sizes can be lowered", file=sys.stderr)
        return 1
    except Exception as error:
        if debug:
            raise
        text = one_line(" ".join(str(error).split()))
        print(
            f"protperf {command}: internal error: {type(error).__name__}: {text}; --debug shows where",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"protperf {command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _is_closed_pipe(descriptor: int) -> bool:
    """Tell whether nobody reads any more what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _terminate(number: int, frame: object) -> None:
    """End by an exception, so that temporary files are removed."""
    raise SystemExit(128 + number)


def usage() -> str:
    """Return the text of `protperf --help`."""
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    head = "usage: protperf COMMAND ...\n\nProtein language models on long sequences.\n\ncommands:"
    tail = "`protperf COMMAND --help` tells more; `--debug` shows a traceback instead of one line."
    return "\n".join([head, *lines, "", tail])


if __name__ == "__main__":
    sys.exit(main())
