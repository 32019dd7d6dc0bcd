"""torch.compile: few graphs however deep the model and long the sentences, and nothing else changes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilize.model import EncoderDecoder
from stabilize.model.layer import compiled_run
from stabilize.strategies import LayerEpsilon, Norm, PostNorm, PowerNorm, Stabilizer
from stabilize.strategies.menu import menu
from tests.models import SOURCE, STABILIZERS, TARGET, assert_equal, disturb, model_of, sentences

MOST_GRAPHS = 4
SIZES = (4, 4, 4), (5, 7, 9), (1, 6, 7), (6, 12, 8), (3, 1, 5)
"""Rows, source and target length; equal at first, and one here and there."""

# Dynamo looks at the gradient of every tensor that comes in, and torch warns about those that keep none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Graphs:
    """A back end that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Layers compile with a counting back end, from nothing."""
    backend = Graphs()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    forget()
    yield backend
    forget()


def forget() -> None:
    torch._dynamo.reset()
    compiled_run.cache_clear()


def compiled(model: EncoderDecoder) -> EncoderDecoder:
    for layer in model.layers:
        layer.compiled = True
    return model


def seeded(model: EncoderDecoder, source: Tensor, target: Tensor) -> Tensor:
    """The output with the same random numbers at each call."""
    torch.manual_seed(7)
    return model(source, target)


OF_EACH_KIND = ("post_norm", "realformer_mean", "dynamic_hyper_connections", "dlcl_post", "mix_norm", "value_residual")
"""Nothing but the stream, scores, several streams, all layers, another norm in each, the first layer's values."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.soak) for name in STABILIZERS]
)
def test_18_layers_a_stack_share_four_graphs(name: str, graphs: Graphs) -> None:
    """`fullgraph` is set where layers compile, so a break in a graph would be an error here."""
    model = model_of(name, 18, 18).train()
    batches = [(sentences(rows, source), sentences(rows, target)) for rows, source, target in SIZES]
    eager = [seeded(model, *batch) for batch in batches]
    compiled(model)
    for batch, expected in zip(batches, eager, strict=True):
        assert_equal(seeded(model, *batch), expected)
    assert graphs.count <= MOST_GRAPHS


NORMS = [norm() for norm in menu(Norm) if norm.__module__.startswith("stabilize.")]


@pytest.mark.parametrize(
    "norm",
    [pytest.param(norm, marks=() if isinstance(norm, PowerNorm) else pytest.mark.soak) for norm in NORMS],
    ids=repr,
)
def test_an_epsilon_of_its_own_costs_a_layer_no_graph(norm: Norm, graphs: Graphs) -> None:
    """And is the one it was given: on streams this small it decides the output."""
    epsilons = [1.0, 0.1, 1e-2, 1e-5]
    model = model_of(Stabilizer(PostNorm(), norm=norm, epsilon=LayerEpsilon(epsilons, epsilons[::-1])), 4, 4).train()
    rows, source, target = SIZES[0]
    batch = sentences(rows, source), sentences(rows, target)
    expected = seeded(model, *batch)
    assert_equal(seeded(compiled(model), *batch), expected, 3e-6)
    assert graphs.count <= MOST_GRAPHS


@pytest.mark.parametrize("name", ["b2t", pytest.param("realformer_mean", marks=pytest.mark.soak)])
def test_fifty_lengths_share_four_graphs(name: str, graphs: Graphs) -> None:
    model = compiled(model_of(name, dropout=0.1, attention_dropout=0.1).train())
    for length in range(5, 55):
        rows = 3 + length % 7
        model(sentences(rows, length), sentences(rows, 60 - length))
    assert graphs.count <= MOST_GRAPHS


@pytest.mark.parametrize("name", [pytest.param("mix_norm", marks=pytest.mark.soak), "realformer_mean"])
def test_training_and_evaluation_have_their_own_four_graphs(name: str, graphs: Graphs) -> None:
    """Under torch's own limit of eight graphs a run would end where it wants a ninth."""
    model = compiled(model_of(name, 4, 4, dropout=0.1))
    for train in (True, False, True, False):
        with torch.set_grad_enabled(train):
            for rows, source, target in SIZES:
                model.train(train)(sentences(rows, source), sentences(rows, target))
    assert graphs.count <= 2 * MOST_GRAPHS


def test_hooks_fire_once_a_layer(graphs: Graphs) -> None:
    model, seen = compiled(model_of("post_norm").train()), []

    def remember(layer: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(layer)

    for layer in model.layers:
        layer.register_forward_hook(remember)
    for checkpointed in (False, True):
        for layer in model.layers:
            layer.checkpointed = checkpointed
        seen.clear()
        model(SOURCE, TARGET).sum().backward()
        assert seen == model.layers
    assert graphs.count


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_compiled_layers_are_computed_again_with_the_same_dropout(name: str, graphs: Graphs) -> None:
    model, found = compiled(model_of(name, dropout=0.2, attention_dropout=0.2, activation_dropout=0.2).train()), []
    for checkpointed in (False, True):
        for layer in model.layers:
            layer.checkpointed = checkpointed
        model.zero_grad()
        seeded(model, SOURCE, TARGET).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0]
    assert found[0].keys() == found[1].keys()
    for parameter, gradient in found[0].items():
        assert_equal(found[1][parameter], gradient)
    assert graphs.count


def test_weights_go_between_compiled_and_plain(graphs: Graphs) -> None:
    plain, other = model_of("b2t"), compiled(model_of("b2t"))
    keys, modules = list(plain.state_dict()), [name for name, _ in plain.named_modules()]
    for saved, loaded in itertools.product((plain, other), (model_of("b2t"), compiled(model_of("b2t")))):
        disturb(saved)
        expected = saved(SOURCE, TARGET)
        loaded.load_state_dict(saved.state_dict(), strict=True)
        assert_equal(loaded(SOURCE, TARGET), expected)
        assert list(loaded.state_dict()) == keys
        assert [name for name, _ in loaded.named_modules()] == modules
    assert graphs.count


def test_a_copy_of_a_compiled_model_runs_on_its_own_weights(graphs: Graphs) -> None:
    model = compiled(model_of("pre_norm"))
    before, twin = model(SOURCE, TARGET), copy.deepcopy(model)
    disturb(twin)
    found = twin(SOURCE, TARGET)
    assert model(SOURCE, TARGET).equal(before)
    for layer in twin.layers:
        layer.compiled = False
    assert_equal(found, twin(SOURCE, TARGET))
    assert not found.equal(before)
