"""Lightning callbacks that watch each layer: one a file, the file named after the class."""

from stabilize.callbacks.gradient_ratio import GradientRatio
from stabilize.callbacks.layer_similarity import LayerSimilarity
from stabilize.callbacks.progress_lines import ProgressLines

__all__ = ["GradientRatio", "LayerSimilarity", "ProgressLines"]
