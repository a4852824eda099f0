"""Preparation of datasets; stands beside protperf and uses its vocabulary and formats, never torch."""
