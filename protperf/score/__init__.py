"""`protperf score`: how likely a model finds proteins, and what it makes of mutations."""
