"""The configuration that a run left in its folder, read back: nothing in it is run, resolved or unfolded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from protperf.formats import FormatError
from protperf.formats.bounded import read_within

LARGEST_CONFIG = 1 << 18
"""Bytes; that of a run has some 3,000."""

_UNFOLDING = (yaml.AliasToken, yaml.AnchorToken, yaml.TagToken)


def read_run_config(path: Path, *, remedy: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a `config.yaml`, each with its keys; what else it holds is left out.

    Values are as they stand there: `${oc.env:NAME}` stays these letters, so that no file reads the environment into a log.

    Args:
        path: the file.
        remedy: what to do about one that is none, for the message.

    Raises:
        FormatError: not YAML, too large, or with aliases, by which a few lines would unfold to gigabytes.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        too_large = (
            f"{path}: more than {LARGEST_CONFIG >> 10} KiB, too large for a run's configuration; {remedy}"
        )
        data = read_within(LARGEST_CONFIG, file, refusal=too_large)
    try:
        text = data.decode()
        if any(isinstance(token, _UNFOLDING) for token in yaml.scan(text, yaml.SafeLoader)):
            raise FormatError(f"{path}: not a run's configuration (it holds aliases or tags); {remedy}")
        content = OmegaConf.to_container(OmegaConf.create(text))
    except FormatError:
        raise
    except Exception as error:  # readers of YAML fail in any way
        raise FormatError(f"{path}: not a run's configuration ({type(error).__name__}); {remedy}") from error
    sections = content.items() if isinstance(content, dict) else ()
    return {str(name): dict(section) for name, section in sections if isinstance(section, dict)}
