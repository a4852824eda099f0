"""protperf: protein language models on long sequences."""

from importlib.metadata import version

__version__ = version("protperf")
