"""What holds for every stabiliser: it trains, decodes with a cache, ignores padding, checkpoints, copies, loads."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from stabilize.decoding import BeamSearch
from stabilize.model import Cache, EncoderDecoder, Layer, Sizes
from stabilize.strategies import AXES, Part, Stabilizer
from stabilize.strategies.menu import menu
from stabilize.tokens import BEGIN, END
from tests.models import (
    PAD,
    SOURCE,
    STABILIZERS,
    STARTS,
    TARGET,
    VOCABULARY,
    assert_equal,
    disturb,
    every_stabilizer,
    every_start,
    gradients,
    model_of,
    sentences,
)

REAL = TARGET != PAD

precisions = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
TOLERANCE = {"32-true": 1e-6, "bf16-mixed": 3e-2}
"""bfloat16 has eight bits; the order of a sum then shows in the second digit."""


def autocast(precision: str) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


def disturbed(name: str, **options: float | str) -> EncoderDecoder:
    model = model_of(name, **options)
    disturb(model)
    return model


def test_every_strategy_of_the_menu_is_tested() -> None:
    chosen = {type(part) for one in itertools.chain(*(STABILIZERS | STARTS).values()) for part in one.axes.values()}
    ours = {s for base in AXES.values() for s in menu(base) if s.__module__.startswith("stabilize.")}
    assert chosen >= ours


def loss_of(model: EncoderDecoder) -> Tensor:
    """Cross-entropy of each next token."""
    logits = model.project(model(SOURCE, TARGET[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1).float(), TARGET[:, 1:].flatten(), ignore_index=PAD)


@every_start
@precisions
def test_five_updates(name: str, precision: str) -> None:
    model = model_of(name, precision=precision, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    start, losses = copy.deepcopy(model.state_dict()), []
    parts = [part for part in model.modules() if isinstance(part, Part)]
    for update in range(1, 6):
        with autocast(precision):
            loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        for part in parts:
            part.after_update(update)
        losses.append(loss.detach())
    assert torch.stack(losses).isfinite().all()
    assert all(not value.equal(start[key]) for key, value in model.state_dict().items() if value.is_floating_point())


@every_start
@precisions
def test_cached_decoding_equals_full_decoding(name: str, precision: str) -> None:
    model, cache = disturbed(name, precision=precision), Cache()
    with autocast(precision):
        memory = model.encode(SOURCE)
        pieces = [model.decode(piece, memory, cache) for piece in TARGET.split([1, 1, 2, 1], dim=1)]
        whole = model.decode(TARGET, memory)
    assert cache.length == TARGET.size(1)
    assert_equal(torch.cat(pieces, 1)[REAL], whole[REAL], TOLERANCE[precision])


@every_stabilizer
def test_a_cache_follows_its_rows(name: str) -> None:
    model, rows = disturbed(name), torch.tensor([1, 0, 1])
    memory, cache = model.encode(SOURCE), Cache()
    model.decode(TARGET[:, :2], memory, cache)
    cache.select(rows)
    found = model.decode(TARGET[rows, 2:], memory.select(rows), cache)
    assert_equal(found[REAL[rows, 2:]], model(SOURCE, TARGET)[rows, 2:][REAL[rows, 2:]])


LINES = [[5, 6, 7, 8, 9, 10, END], [11, END], [12, 5, 13, END], [14, 15, 16, 17, END]]
LIMIT = 8


def plain_search(model: EncoderDecoder, line: list[int], beam: int) -> list[tuple[list[int], float]]:
    """The beam search that `BeamSearch` describes, of one sentence, without cache, and always on to the limit: finished
    hypotheses and then those that were cut, each with the mean of its log p."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, LIMIT + 1):
        source = torch.tensor([line]).expand(len(live), -1)
        logits = model.project(model(source, torch.tensor([[BEGIN, *ids] for _, ids in live]))[:, -1])
        log_p = logits.double().log_softmax(-1).tolist()
        grown = [
            (so_far + step[token], [*ids, token])
            for (so_far, ids), step in zip(live, log_p, strict=True)
            for token in range(END, VOCABULARY)
        ]
        grown = sorted(grown, reverse=True)[: beam - len(finished)]
        finished += [(ids[:-1], p / length) for p, ids in grown if ids[-1] == END]
        live = [(p, ids) for p, ids in grown if ids[-1] != END]
        if not live:
            break
    cut = [(ids, p / LIMIT) for p, ids in live]
    return [found for part in (finished, cut) for found in sorted(part, key=lambda one: -one[1])]


@pytest.mark.parametrize(
    "name", sorted(STABILIZERS.keys() - {"no_residual"})
)  # to which all prefixes are much the same
@pytest.mark.parametrize("beam", [1, 4])
@torch.no_grad()
def test_beam_search_finds_what_a_search_without_cache_finds(name: str, beam: int) -> None:
    model = disturbed(name)
    disturb(model, 0.15)  # so that the prefix matters, and the order of two tokens does
    model.target_embedding.weight[END] *= 3.0  # so that some hypotheses end, and leave the beam to others
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(line) for line in LINES], batch_first=True)
    found = BeamSearch(beam=beam, maximum_ratio=0, maximum_extra=LIMIT).n_best(model, source, beam)
    for several, line in zip(found, LINES, strict=True):
        expected = plain_search(model, line, beam)
        assert [one.ids for one in several] == [ids for ids, _ in expected]
        assert [one.score for one in several] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-4)


@every_stabilizer
@torch.no_grad()
def test_beam_search_in_bfloat16_knows_the_score_of_what_it_finds(name: str) -> None:
    """That of the whole sentence, forced; which is found depends on the rounding."""
    model = disturbed(name, precision="bf16-mixed")
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(line) for line in LINES], batch_first=True)
    with autocast("bf16-mixed"):
        found = BeamSearch(beam=4, maximum_ratio=0, maximum_extra=LIMIT)(model, source)
        for one, line in zip(found, LINES, strict=True):
            target = one.ids if one.truncated else [*one.ids, END]
            hidden = model(torch.tensor([line]), torch.tensor([[BEGIN, *target[:-1]]]))
            steps = model.project(hidden)[0].float().log_softmax(-1)[range(len(target)), target]
            assert one.score == pytest.approx(steps.mean().item(), abs=TOLERANCE["bf16-mixed"])


@every_start
@precisions
def test_more_padding_changes_nothing(name: str, precision: str) -> None:
    model = disturbed(name, precision=precision)
    with autocast(precision):
        padded = model(F.pad(SOURCE, (0, 3)), F.pad(TARGET, (0, 2)))[:, : TARGET.size(1)]
        assert_equal(padded[REAL], model(SOURCE, TARGET)[REAL], TOLERANCE[precision])


@every_start
@pytest.mark.parametrize("side", ["encoder", "decoder"])
@torch.no_grad()
def test_a_stack_in_bfloat16_is_the_one_in_float32(name: str, side: str) -> None:
    """What is held against the equations in float32 holds in bfloat16 too."""
    model = disturbed(name, precision="bf16-mixed")
    found = []
    for precision in TOLERANCE:
        with autocast(precision):
            memory = model.encode(SOURCE)
            found.append(memory.states[SOURCE != PAD] if side == "encoder" else model.decode(TARGET, memory)[REAL])
    exact, half = found
    assert (half - exact).norm() < 3e-2 * exact.norm()


@every_stabilizer
def test_the_future_changes_nothing(name: str) -> None:
    model, other = disturbed(name), TARGET.clone()
    other[:, 3:] = sentences(2, 2)
    assert_equal(model(SOURCE, other)[:, :3], model(SOURCE, TARGET)[:, :3])


@every_stabilizer
@precisions
def test_checkpointed_gradients_are_the_same(name: str, precision: str) -> None:
    """The same masks, and what autocast makes half is half again."""
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
    model = disturbed(name, precision=precision, **rates).train()
    found = []
    for checkpointed in (False, True):
        for layer in model.layers:
            layer.checkpointed = checkpointed
        torch.manual_seed(3)
        with autocast(precision):
            loss = loss_of(model)
        found.append(gradients(loss, model))
    plain, again = found
    assert plain.keys() == again.keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in plain.items():
        assert_equal(again[parameter], gradient)


def fired(model: EncoderDecoder, watched: EncoderDecoder) -> list[Layer]:
    """The layers of `watched` whose hooks are called when `model` runs."""
    seen: list[Layer] = []

    def remember(layer: nn.Module, inputs: tuple[object, ...], output: tuple[object, ...]) -> None:
        states, real = layer.observe(inputs, output)
        assert states.shape == (*real.shape, 16)
        seen.append(layer)

    handles = [layer.register_forward_hook(remember) for layer in watched.layers]
    model(SOURCE, TARGET)
    for handle in handles:
        handle.remove()
    return seen


@every_stabilizer
@pytest.mark.parametrize("checkpointed", [False, True])
def test_hooks_see_each_layer_once_in_order(name: str, checkpointed: bool) -> None:
    model = model_of(name)
    for layer in model.layers:
        layer.checkpointed = checkpointed
    assert fired(model, model) == model.layers


@every_stabilizer
def test_a_copy_goes_its_own_way(name: str) -> None:
    model = disturbed(name)
    before, twin = model(SOURCE, TARGET), copy.deepcopy(model)
    assert twin(SOURCE, TARGET).equal(before)

    disturb(twin)
    assert not twin(SOURCE, TARGET).equal(before)
    assert model(SOURCE, TARGET).equal(before)
    assert fired(twin, twin) == twin.layers
    assert fired(model, twin) == []


@every_start
@precisions
def test_a_saved_model_comes_back(name: str, precision: str) -> None:
    model, file = disturbed(name, precision=precision), io.BytesIO()
    specs = [stabilizer.spec() for stabilizer in (STABILIZERS | STARTS)[name]]
    torch.save({"specs": specs, "weights": model.state_dict()}, file)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    made = [Stabilizer.from_spec(spec) for spec in saved["specs"]]
    again = EncoderDecoder(VOCABULARY, Sizes(2, 3, 16, 2, 32), *made, precision=precision).eval()
    again.load_state_dict(saved["weights"])
    with autocast(precision):
        assert again(SOURCE, TARGET).equal(model(SOURCE, TARGET))


@every_stabilizer
def test_templates_stay_untouched(name: str) -> None:
    """Every part of a model is a copy of its template, with parameters of its own."""
    model_of(name)
    templates = [part for stabilizer in STABILIZERS[name] for part in stabilizer.axes.values()]
    assert not any(list(part.parameters()) for part in templates if isinstance(part, nn.Module))
    first, second = model_of(name), model_of(name)
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}


@every_stabilizer
def test_weights_and_buffers_can_be_averaged(name: str) -> None:
    """As Lightning's WeightAveraging does: a running mean of everything, whatever its type."""
    model = model_of(name)
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    disturb(model)
    average.update_parameters(model)
    assert average.module(SOURCE, TARGET).isfinite().all()
