"""What each layer is worth once the model is trained."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from stabilize import stats
from stabilize.callbacks.layer_monitor import OURS
from stabilize.callbacks.layers import find_layers
from stabilize.callbacks.monitor import step_of
from stabilize.errors import UserError


class SkipCosts(pl.Callback):
    """Log at each validation what nll would be without each layer: near zero is a layer that nobody would miss.

    | key                              | what                                                                        |
    |----------------------------------|-----------------------------------------------------------------------------|
    | `skip_cost/{stack}/layer_001` ...| nll a token without layer 001, less that of the whole model                 |
    | `effective_depth/{stack}`        | how many layers cost more than the threshold                                |

    On the first validation batch, which has the longest sentences, and on the first process; nothing is trained in
    between (Sun et al. 2025, arXiv:2502.05795). A forward pass for each layer.

    Args:
        threshold: nats a token, above which a layer would be missed.
        sentences: of the batch that are looked at, at most.

    Raises:
        UserError: if there is to be no sentence.
    """

    def __init__(self, threshold: float = 0.01, sentences: int = 32) -> None:
        if sentences < 1:
            raise UserError(f"sentences of SkipCosts is {sentences}; 1 is the least that will do")
        self.threshold = threshold
        self.sentences = sentences

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx or trainer.sanity_checking or not trainer.is_global_zero:
            return
        metrics: dict[str, float] = {}
        few = batch.first(self.sentences)

        def nll() -> Any:
            with trainer.precision_plugin.forward_context():
                _, summed, tokens = pl_module.loss(few)
            return summed / max(tokens, 1)

        for stack, layers in find_layers(pl_module, OURS).items():
            costs = stats.skip_costs(layers, nll)
            metrics |= {f"skip_cost/{stack}/layer_{i:03d}": cost for i, cost in enumerate(costs.tolist(), start=1)}
            metrics[f"effective_depth/{stack}"] = float(stats.effective_depth(costs, self.threshold))
        step = step_of(trainer) - (trainer.state.fn == TrainerFn.FITTING)  # a checkpoint's own is the number of updates
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
