"""`protperf convert`: a checkpoint, or pretrained weights of another program, into a folder that people share.

The way of foreign weights: `files` finds and reads them -> `layouts` knows whose they are -> `bert`, `esm` or `fairseq`
names what becomes what (`tensors`, `tokens`) -> `sources` builds the model -> `program` writes it.
"""

from protperf.convert.program import main

__all__ = ["main"]
