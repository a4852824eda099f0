"""The configuration that a run left in its folder, read back: nothing in it is run, resolved or unfolded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

_LARGEST = 1 << 18
_UNFOLDING = (yaml.AliasToken, yaml.AnchorToken, yaml.TagToken)


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a `config.yaml`, each with its keys; what else it holds is left out.

    Values are as they stand there: `${oc.env:NAME}` stays these letters, so that no file reads the environment into a log.

    Raises:
        ValueError: not YAML, too large, or with aliases, by which a few lines would unfold to gigabytes.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"{path}: too large for a configuration")
    try:
        text = data.decode()
        if any(isinstance(token, _UNFOLDING) for token in yaml.scan(text, yaml.SafeLoader)):
            raise ValueError("it holds aliases or tags")
        content = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:  # readers of YAML fail in any way
        raise ValueError(f"{path}: not a configuration ({type(error).__name__})") from error
    sections = content.items() if isinstance(content, dict) else ()
    return {str(name): dict(section) for name, section in sections if isinstance(section, dict)}
