"""Hydra configuration of `protperf train`; installed as the package `protperf.conf`."""
