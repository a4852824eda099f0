"""What happens around training steps: seeds, redraws, reports, images. One callback each."""

from protperf.callbacks.divergence import Divergence
from protperf.callbacks.early_stop import EarlyStop
from protperf.callbacks.images import AttentionImages
from protperf.callbacks.progress import Progress
from protperf.callbacks.report import Report
from protperf.callbacks.steps import Redraw, StepSeeds

__all__ = ["AttentionImages", "Divergence", "EarlyStop", "Progress", "Redraw", "Report", "StepSeeds"]
