"""Pictures of what was measured per layer, for the run folder and for Weights & Biases."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import WandbLogger
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure  # not pyplot: no global state, no window, and Agg writes the file
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stabilize.callbacks.history import History


def ratio_map(history: History, title: str) -> Figure:
    """Draw ratios, layer by update, as log10: white is one, blue vanishes, red explodes, grey is no number."""
    values = _log10(history)
    extent = np.nanmax(np.abs(values), initial=1.0)
    figure = _image(values, title, "log10 of the ratio", "RdBu_r", CenteredNorm(0.0, float(extent)))
    return _by_update(figure, history)


def scale_map(history: History, title: str) -> Figure:
    """Draw sizes, layer by update, as log10; grey is no number."""
    return _by_update(_image(_log10(history), title, "log10", "viridis", None), history)


def share_map(history: History, title: str) -> Figure:
    """Draw shares, layer by update, from zero to one."""
    return _by_update(_image(np.array(history.rows).T, title, "share", "viridis", Normalize(0.0, 1.0)), history)


def similarity_map(history: History, title: str) -> Figure:
    """Draw similarities, layer by update, up to one."""
    return _by_update(_similarity(np.array(history.rows).T, title), history)


def similarity_matrix(rows: list[list[float]], title: str) -> Figure:
    """Draw the similarity of every pair of layers."""
    figure = _similarity(np.array(rows), title)
    figure.set_size_inches(5.2, 4.2)
    axes = figure.axes[0]
    axes.set(xlabel="layer", aspect="equal")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position + 1:.0f}"))
    return figure


def publish(trainer: pl.Trainer, name: str, figure: Figure) -> None:
    """Write a picture to `figures/<name>.png` in the run folder and log it to Weights & Biases if that is on."""
    path = Path(trainer.default_root_dir) / "figures" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            logger.log_image(key=f"figures/{name}", images=[str(path)], step=step)


def _log10(history: History) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log10(np.array(history.rows).T)
    return np.where(np.isfinite(values), values, np.nan)


def _similarity(values: np.ndarray, title: str) -> Figure:
    lowest = np.nanmin(values, initial=0.99)
    return _image(values, title, "mean cosine", "viridis", Normalize(float(lowest), 1.0))


def _image(values: np.ndarray, title: str, label: str, colours: str, scale: Normalize | None) -> Figure:
    """Draw `values` `[layers, columns]`, layer 1 at the bottom."""
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("0.8")
    image = axes.imshow(values, aspect="auto", origin="lower", interpolation="nearest", cmap=colours, norm=scale)
    figure.colorbar(image, label=label)
    axes.set(title=title, ylabel="layer")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position + 1:.0f}"))
    return figure


def _by_update(figure: Figure, history: History) -> Figure:
    every = math.ceil(len(history.updates) / 8)
    shown = range(every - 1, len(history.updates), every)
    figure.axes[0].set_xticks(shown, [str(history.updates[column]) for column in shown])
    figure.axes[0].set_xlabel("update")
    return figure
