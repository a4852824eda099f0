"""What happens around training steps: seeds, redraws, reports. One callback each."""

from protperf.callbacks.report import Report
from protperf.callbacks.steps import Redraw, StepSeeds

__all__ = ["Redraw", "Report", "StepSeeds"]
