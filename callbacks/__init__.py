"""Lightning callbacks that watch each layer, and how a run shows its progress: one a file, named after the class."""

from stabilize.callbacks.gradient_ratio import GradientRatio
from stabilize.callbacks.layer_similarity import LayerSimilarity
from stabilize.callbacks.progress_bar import ProgressBar
from stabilize.callbacks.progress_lines import ProgressLines

__all__ = ["GradientRatio", "LayerSimilarity", "ProgressBar", "ProgressLines"]
