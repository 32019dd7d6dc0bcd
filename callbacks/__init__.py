"""Lightning callbacks that watch each layer, and how a run shows its progress: one a file, named after the class."""

from stabilize.callbacks.activation_scale import ActivationScale
from stabilize.callbacks.attention_entropy import AttentionEntropy
from stabilize.callbacks.checkpoints import Checkpoints
from stabilize.callbacks.epsilon_audit import EpsilonAudit
from stabilize.callbacks.gradient_ratio import GradientRatio
from stabilize.callbacks.interruption import Interruption
from stabilize.callbacks.layer_similarity import LayerSimilarity
from stabilize.callbacks.progress_bar import ProgressBar
from stabilize.callbacks.progress_lines import ProgressLines
from stabilize.callbacks.skip_costs import SkipCosts
from stabilize.callbacks.spike_guard import SpikeGuard
from stabilize.callbacks.update_ratio import UpdateRatio
from stabilize.callbacks.weight_average import WeightAverage

__all__ = [
    "ActivationScale",
    "AttentionEntropy",
    "Checkpoints",
    "EpsilonAudit",
    "GradientRatio",
    "Interruption",
    "LayerSimilarity",
    "ProgressBar",
    "ProgressLines",
    "SkipCosts",
    "SpikeGuard",
    "UpdateRatio",
    "WeightAverage",
]
