"""`protperf bench`: time, memory and error of attention, and of a whole training step, against their peers.

Timings of one table come from one run in which the contestants take turns, so that what disturbs the machine disturbs
all of them; medians over rounds. Numbers of different runs or machines are compared as ratios only.
"""
