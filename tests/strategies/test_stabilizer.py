"""Which answers go together, what is said aloud, and how a stabiliser is written down."""

from __future__ import annotations

import enum
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stabilize.card import arguments
from stabilize.errors import UserError
from stabilize.model import Sizes
from stabilize.strategies import (
    B2T,
    DLCL,
    DeepNormResidual,
    HybridNorm,
    HyperConnections,
    MixNorm,
    NoNorm,
    NoWarmup,
    Placement,
    PostNorm,
    PrecisionEpsilon,
    PreNorm,
    QKNorm,
    ResiDual,
    Residual,
    RMSNorm,
    ScaledSum,
    Stabilizer,
)
from stabilize.strategies.strategy import from_spec
from tests.models import DEEP_NORM, STABILIZERS, every_stabilizer


def warnings(stabilizer: Stabilizer, depth: int = 12) -> list[str]:
    sizes = Sizes(depth, depth)
    return [
        warning
        for stack in ("encoder", "decoder")
        for warning in stabilizer.warnings(sizes.site(stack, 1, "layer"), "32-true")
    ]


@pytest.mark.parametrize("placement", [PostNorm(), B2T(), ResiDual()], ids=lambda placement: type(placement).__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_several_streams_under_a_norm_of_the_stream_are_refused(placement: Placement, dynamic: bool) -> None:
    with pytest.raises(UserError) as caught:
        Stabilizer(placement, HyperConnections(dynamic=dynamic))
    message = str(caught.value)
    assert "HyperConnections" in message
    assert type(placement).__name__ in message
    assert "\n" not in message


@pytest.mark.parametrize("placement", [PreNorm(), NoNorm()])
def test_several_streams_go_with_norms_inside_the_branch(placement: Placement) -> None:
    Stabilizer(placement, HyperConnections())


def test_no_stream_at_all_is_refused() -> None:
    with pytest.raises(UserError, match=r"residual\.streams is 0"):
        HyperConnections(0)


def test_deep_post_norm_without_help_is_warned_about_in_each_stack() -> None:
    found = warnings(Stabilizer(PostNorm()))
    assert len(found) == 2
    for stack, warning in zip(("encoder", "decoder"), found, strict=True):
        assert "PostNorm" in warning
        assert f"12 layers of the {stack}" in warning
        assert "arXiv:" in warning


@pytest.mark.parametrize("stabilizer", [DEEP_NORM, Stabilizer(B2T()), Stabilizer(PreNorm())])
def test_depth_with_help_is_not(stabilizer: Stabilizer) -> None:
    assert warnings(stabilizer) == []


def test_six_layers_of_post_norm_are_not() -> None:
    assert warnings(Stabilizer(PostNorm()), depth=6) == []


@pytest.mark.parametrize(
    ("stabilizer", "named"),
    [
        (Stabilizer(PostNorm(), ScaledSum()), "ScaledSum under PostNorm"),
        (Stabilizer(PostNorm(), warmup=NoWarmup()), "NoWarmup under PostNorm"),
    ],
)
def test_what_the_literature_warns_about_is_said(stabilizer: Stabilizer, named: str) -> None:
    assert [warning for warning in warnings(stabilizer, depth=2) if named in warning] == warnings(stabilizer, depth=2)
    assert len(warnings(stabilizer, depth=2)) == 2


def test_a_scaled_sum_says_what_it_leaves_of_a_deep_skip_path() -> None:
    """24 sums of the encoder leave 2^-12 = 2.4e-4 of the skip path, the decoder's 36 leave 2^-18."""
    encoder, decoder = warnings(Stabilizer(PreNorm(), ScaledSum()))
    assert "2.4e-04" in encoder
    assert "3.8e-06" in decoder


def test_a_scaled_sum_counts_the_sums_between_norms() -> None:
    """At 12+12 a quarter of post-norm leaves nine layers: 18 sums of the encoder, 2^-9, and 27 of the decoder."""
    encoder, decoder = warnings(Stabilizer(MixNorm(0.25), ScaledSum()))
    assert "18 sums of the encoder" in encoder
    assert "2.0e-03" in encoder
    assert "27 sums of the decoder" in decoder
    assert "8.6e-05" in decoder


@pytest.mark.parametrize("placement", [B2T(), HybridNorm()])
def test_a_scaled_sum_is_neither_lost_nor_piled_up_between_norms(placement: Placement) -> None:
    """In B2T it weighs the layer's input against all else, in HybridNorm a norm stands in each layer."""
    assert warnings(Stabilizer(placement, ScaledSum())) == []


def test_a_scaled_sum_takes_numbers_too() -> None:
    x, f = torch.randn(2, 3), torch.randn(2, 3)
    assert ScaledSum(0.25).write(x, f).equal(0.25 * (x + f))


@every_stabilizer
def test_a_spec_is_plain_and_says_it_all(name: str) -> None:
    for stabilizer in STABILIZERS[name]:
        file = io.BytesIO()
        torch.save(stabilizer.spec(), file)
        file.seek(0)
        again = Stabilizer.from_spec(torch.load(file, weights_only=True))
        assert again.spec() == stabilizer.spec()
        assert [type(part) for part in again.axes.values()] == [type(part) for part in stabilizer.axes.values()]


def test_a_spec_keeps_the_arguments() -> None:
    chosen = Stabilizer(
        residual=HyperConnections(3, dynamic=True),
        norm=RMSNorm(),
        epsilon=PrecisionEpsilon(float16=1e-4),
        attention=QKNorm("projection"),
    )
    again = Stabilizer.from_spec(chosen.spec())
    assert (again.residual.streams, again.residual.dynamic) == (3, True)
    assert again.epsilon.float16 == 1e-4
    assert again.attention.over == "projection"
    assert Stabilizer.from_spec(Stabilizer(residual=DLCL("sum")).spec()).residual.normalize == "sum"


class Colour(enum.Enum):
    RED = 1


class Chain(Residual):
    """Takes whatever it is given."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def write(self, stream: Any, branch: Tensor) -> Any:
        return stream + branch


def test_a_spec_goes_into_lists_and_dicts() -> None:
    given = Chain([ScaledSum(0.5), {"last": (DeepNormResidual(), torch.float16, None, "text")}])
    file = io.BytesIO()
    torch.save(given.spec(), file)
    file.seek(0)
    first, others = from_spec(torch.load(file, weights_only=True)).parts
    assert (type(first), first.sum_scale) == (ScaledSum, 0.5)
    assert type(others["last"][0]) is DeepNormResidual
    assert others["last"][1:] == (torch.float16, None, "text")


def test_a_card_shows_lists_and_dicts() -> None:
    given = Chain([ScaledSum(0.5), {"last": (DeepNormResidual(), 3)}])
    assert arguments(given.spec()) == "parts: [ScaledSum(sum_scale: 0.5), {last: [DeepNormResidual(), 3]}]"


@pytest.mark.parametrize("value", [Path("weights"), Colour.RED, object(), [np.float64(1.0)]])
def test_what_no_checkpoint_can_hold_is_refused_by_name(value: object) -> None:
    with pytest.raises(UserError, match=r"^Chain\.parts is a \w+, .* which a checkpoint cannot hold"):
        Chain(value).spec()


def test_a_spec_of_something_else_is_refused() -> None:
    spec = Stabilizer().spec()
    spec["norm"]["class_path"] = "os.system"
    with pytest.raises(TypeError):
        Stabilizer.from_spec(spec)
