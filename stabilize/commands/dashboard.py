"""`stabilize dashboard`: a saved workspace in Weights & Biases for the runs of a project."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import wandb

from stabilize.commands.words import Parser
from stabilize.errors import UserError

ABOUT = """Build a workspace in Weights & Biases: translations and their scores, stability, gradient, similarity and
scale of each layer, heat maps, and a table of runs with verdict, worst ratio and best score. Needs the extra
`dashboard`."""

UPDATES = "trainer/global_step"
"""The axis of every curve."""
STACKS = ("encoder", "decoder")
COLUMNS = (
    "stability/verdict",
    "stability/worst_ratio",
    "stability/diverged_at",
    "stability/spike_score/loss",
    "best/val_bleu",
    "best/val_nll",
    "best/bleu_signature",
)
"""Of the table of runs: what `summary.json` has too."""


def _each_layer(title: str, key: str, **options: Any) -> list[dict[str, Any]]:
    """For each stack the curves of all its layers."""
    return [{"title": f"{title}, {stack}", "metric_regex": f"^{key}/{stack}/layer_.*$", **options} for stack in STACKS]


CURVES: dict[str, list[dict[str, Any]]] = {
    "Translation": [
        {"title": "BLEU", "y": ["val/bleu"]},
        {"title": "chrF", "y": ["val/chrf"]},
        {"title": "nll per token, validation", "y": ["val/nll"]},
        {"title": "nll per token, training", "y": ["train/nll"]},
    ],
    "Stability": [
        {"title": "gradient norm before clipping", "y": ["gradient_norm/total"], "log_y": True},
        {"title": "gradient norm after clipping", "y": ["gradient_norm/total_clipped"], "log_y": True},
        {"title": "SpikeScore", "y": ["stability/spike_score/loss", "stability/spike_score/gradient_norm"]},
        {"title": "dropped updates, rollbacks", "y": ["stability/skipped_updates", "stability/rollbacks"]},
        {"title": "learning rate", "y": ["lr"]},
    ],
    "Gradient": [
        {"title": "first layer over last", "y": [f"gradient_ratio/{s}/first_to_last" for s in STACKS], "log_y": True},
        *_each_layer("layer over last", "gradient_ratio", log_y=True),
    ],
    "Similarity": [
        {"title": "mean cosine of neighbours", "y": [f"layer_similarity/{s}/mean" for s in STACKS]},
        {"title": "the same centred", "y": [f"layer_similarity_centered/{s}/mean" for s in STACKS]},
        *_each_layer("layer and the next", "layer_similarity"),
    ],
    "Scale": [
        *_each_layer("RMS of the output", "activation_rms", log_y=True),
        *_each_layer("update over weights", "update_ratio", log_y=True),
        *_each_layer("share near epsilon", "epsilon_audit"),
    ],
}
"""By section: of keys, or of all keys that a pattern fits."""

MAPS = (
    "gradient_ratio",
    "layer_similarity",
    "layer_similarity_centered",
    "similarity_matrix",
    "similarity_matrix_centered",
    "activation_rms",
    "update_ratio",
    "epsilon_audit",
)
"""Pictures of all layers, by update or of the last record; one of each stack."""


def build(words: list[str]) -> int:
    """Carry out `stabilize dashboard`."""
    parser = Parser("dashboard", ABOUT)
    parser.add_argument(
        "--project", default=os.environ.get("WANDB_PROJECT", "stabilize"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--entity", default=os.environ.get("WANDB_ENTITY"), help="user or team (default: who is logged in)"
    )
    parser.add_argument("--name", default="stabilize", help="what the workspace is called (default: %(default)s)")
    parser.add_argument("--spec", type=Path, help="write what would be sent into a JSON file, and send nothing")
    chosen = parser.parse_args(words)
    workspaces = _library()
    if chosen.spec:
        workspace = _workspace(workspaces, chosen.entity or "nobody", chosen.project, chosen.name)
        try:
            chosen.spec.write_text(json.dumps(workspace._spec, indent=1), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--spec {chosen.spec} cannot be written: {error.strerror}") from error
        print(f"spec: {chosen.spec}")
        return 0
    if not wandb.login(prompt=False, verify=False):
        raise UserError("dashboard: nobody is logged in to Weights & Biases; wandb login, or --spec FILE, would do")
    entity = chosen.entity or wandb.Api().default_entity
    if not entity:
        raise UserError("dashboard: it is not known whose project this is; --entity TEAM would do")
    print(_workspace(workspaces, entity, chosen.project, chosen.name).save().url)
    return 0


def _library() -> Any:
    try:
        import wandb_workspaces.workspaces
    except ImportError as error:
        raise UserError("dashboard needs wandb-workspaces; pip install 'stabilize-nmt[dashboard]' would do") from error
    return wandb_workspaces.workspaces


def _workspace(library: Any, entity: str, project: str, name: str) -> Any:
    from wandb_workspaces import expr
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser, RunComparer, WeavePanelSummaryTable

    sections: dict[str, list[Any]] = {
        title: [LinePlot(x=UPDATES, **curve) for curve in curves] for title, curves in CURVES.items()
    }
    sections["Translation"].append(WeavePanelSummaryTable(table_name="samples"))
    pictures = {f"{kind.replace('_', ' ')}, {stack}": f"figures/{kind}_{stack}" for kind in MAPS for stack in STACKS}
    sections["Heat maps"] = [MediaBrowser(media_keys=[key], title=title) for title, key in pictures.items()]
    sections["Runs"] = [RunComparer()]
    return library.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[library.Section(name=title, panels=panels, is_open=True) for title, panels in sections.items()],
        settings=library.WorkspaceSettings(x_axis=UPDATES, group_by_prefix="first"),
        runset_settings=library.RunsetSettings(
            pinned_columns=[f"summary:{column}" for column in COLUMNS],
            order=[expr.Ordering(expr.Summary("best/val_nll"), ascending=True)],
        ),
    )
