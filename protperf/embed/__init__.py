"""`protperf embed`: embeddings of proteins of any length, in the order and under the ids of the input.

The way of a record: reader -> `blocks` (in the order read, identical sequences once) -> `workers` (this process, or one a
device) -> `outputs` (a file a kind and layer) -> a commit after each block, from which a killed run goes on.
"""
