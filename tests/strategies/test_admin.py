"""Admin's profile: what it measures, that it leaves no trace, and that a resumed run does not take it again."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import Part, PostNorm, PreNorm, Stabilizer, Sum
from stabilize.strategies.residual import AdminResidual, StochasticDepth
from stabilize.task import TranslationTask
from tests.models import assert_equal
from tests.tasks import fit, sentence_batch, small_task, small_trainer, weights

BATCH = sentence_batch(0, 1, 2, 3)
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}


def model_with(encoder: Stabilizer, decoder: Stabilizer | None = None, **options: float) -> EncoderDecoder:
    sizes = Sizes(3, 2, width=16, heads=2, hidden=32, **DROPOUT | options)
    return EncoderDecoder(60, sizes, encoder, decoder)


def admin(profile: str = "paper") -> Stabilizer:
    return Stabilizer(PostNorm(), AdminResidual(profile))


def prepare(model: nn.Module) -> None:
    """As the task does at the start of a run."""
    for part in model.modules():
        if isinstance(part, Part):
            part.prepare(model, BATCH)


def omegas(stack: nn.Module) -> Tensor:
    """Of a stack's branches, bottom first; each is one number all over."""
    found = torch.stack([omega for name, omega in stack.named_parameters() if name.endswith("omega")]).detach()
    assert found.eq(found[:, :1]).all()
    return found[:, 0]


def branch_variances(model: EncoderDecoder) -> dict[str, list[Tensor]]:
    """Var f of all branches of plain post-norm by stack, from hooks on the branches themselves, dropout left out."""
    found: dict[str, list[Tensor]] = {}

    def remember(stack: str, branch: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, None]) -> None:
        found.setdefault(stack, []).append(output[0].var(correction=0))

    for stack in ("encoder", "decoder"):
        for layer in getattr(model, stack).layers:
            for branch in layer.branches:
                branch.function.register_forward_hook(functools.partial(remember, stack))
    with torch.no_grad():
        model(BATCH.source, BATCH.target[:, :-1])
    return found


def test_the_papers_profile_sums_the_variances_of_the_branches_below() -> None:
    model, plain = model_with(admin(), **dict.fromkeys(DROPOUT, 0.0)), model_with(Stabilizer(PostNorm(), Sum()))
    plain.load_state_dict(model.state_dict(), strict=False)
    prepare(model)
    for stack, variances in branch_variances(plain.eval()).items():
        expected = torch.stack([torch.tensor(1.0), *torch.stack(variances[:-1]).cumsum(0).sqrt()])
        assert_equal(omegas(getattr(model, stack)), expected)


def test_the_released_profile_carries_the_skips_variance() -> None:
    """The norms' outputs have variance one, so omega_(i+1)^2 = omega_i^2 + Var f_i above the first branch."""
    model = model_with(admin("released"), **dict.fromkeys(DROPOUT, 0.0))
    prepare(model)
    embedded = model.source_embedding(BATCH.source)
    found, variances = omegas(model.encoder), branch_variances(model.eval())["encoder"]
    below = embedded.var(correction=0)
    for omega, next_omega, variance in zip(found[:-1], found[1:], variances[:-1], strict=True):
        assert_equal(next_omega, (below + variance).sqrt(), 1e-4)  # epsilon keeps a norm's variance just below one
        below = next_omega**2
        assert next_omega > omega


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace(training: bool) -> None:
    model = model_with(admin()).train(training)
    model.encoder.layers[0].eval()
    for layer in model.layers:
        layer.compiled = layer.checkpointed = True
    modes = [module.training for module in model.modules()]
    before = {name: p.clone() for name, p in model.named_parameters() if not name.endswith("omega")}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    prepare(model)
    assert torch.get_rng_state().equal(state)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert all(p.equal(before[name]) for name, p in model.named_parameters() if name in before)
    assert all(vars(part).get("write") is None for part in model.modules())
    assert not omegas(model.encoder)[1:].eq(1).any()


def test_the_profile_has_the_dropout_of_training_and_the_seeds_numbers() -> None:
    model, found = model_with(admin()).eval(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        prepare(model)
        found.append(omegas(model.decoder))
    assert found[0].equal(found[1])
    assert not found[0].equal(found[2])


def test_stacks_may_differ_and_wrap_it() -> None:
    wrapped = Stabilizer(PostNorm(), StochasticDepth(AdminResidual("released"), 0.5))
    for encoder, decoder in ((admin(), wrapped), (Stabilizer(PreNorm()), wrapped), (wrapped, Stabilizer(PreNorm()))):
        model = model_with(encoder, decoder)
        prepare(model)
        for stack, chosen in ((model.encoder, encoder), (model.decoder, decoder)):
            if isinstance(chosen.placement, PostNorm):
                assert omegas(stack)[0] == 1
                assert not omegas(stack)[1:].eq(1).any()


def test_it_measures_in_half_precision() -> None:
    full = model_with(admin(), **dict.fromkeys(DROPOUT, 0.0))
    half = copy.deepcopy(full).bfloat16()
    prepare(full)
    prepare(half)
    assert half.encoder.layers[0].branches[1].residual.omega.dtype == torch.bfloat16
    assert_equal(omegas(half.encoder).float(), omegas(full.encoder), 0.02)


def test_a_resumed_run_keeps_its_profile(tmp_path: Path) -> None:
    batches = [sentence_batch(0, 1), sentence_batch(2, 3)]
    task, resumed = (small_task(admin(), encoder_layers=2) for _ in range(2))
    fit(small_trainer(tmp_path / "whole", max_epochs=2), task, batches)
    profiled = task.model.encoder.layers[0].branches[1].residual.omega
    assert (profiled - 1).abs().min() > 0.1

    trainer = small_trainer(tmp_path / "half", max_epochs=1)
    fit(trainer, resumed, batches)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = small_task(admin(), encoder_layers=2)
    fit(small_trainer(tmp_path / "resumed", max_epochs=2), resumed, batches, ckpt_path=tmp_path / "half.ckpt")
    for name, tensor in weights(task).items():
        assert_equal(dict(resumed.named_parameters())[name].detach(), tensor)


def test_weights_that_were_trained_are_not_profiled_again(tmp_path: Path) -> None:
    """Fine-tuning from a checkpoint is a run of its own, with an update number of its own; omega has learnt."""
    trainer = small_trainer(tmp_path / "first", max_epochs=1)
    fit(trainer, small_task(admin(), encoder_layers=2), [sentence_batch(0, 1)])
    trainer.save_checkpoint(tmp_path / "first.ckpt")

    task = TranslationTask.load_from_checkpoint(
        tmp_path / "first.ckpt", optimizer=functools.partial(torch.optim.SGD, lr=0.0)
    )
    before = weights(task)
    fit(small_trainer(tmp_path / "second", max_epochs=1), task.train(), [sentence_batch(2, 3)])
    assert all(value.equal(before[name]) for name, value in weights(task).items())
