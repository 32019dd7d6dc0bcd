"""What numbers say in words: each rule at its threshold, and runs that trained and did not."""

from __future__ import annotations

import io
import math

import pytest
import torch

from stabilize import findings as module
from stabilize.findings import ALIKE, EXPLODING, REMEDIES, VANISHING, Diary, findings, number

NAN, INF = math.nan, math.inf


def profile(stack: str = "decoder", kind: str = "gradient_ratio", *ratios: float) -> dict[str, float]:
    """A record of `ratios`, from the first layer on, whose last layer has a norm too."""
    keys = {f"{kind}/{stack}/layer_{k:03d}": ratio for k, ratio in enumerate(ratios, start=1)}
    return keys | {f"gradient_norm/{stack}/layer_{len(ratios) + 1:03d}": 1.0}


def learning(losses: list[float], every: int = 50) -> list[tuple[int, dict[str, float]]]:
    return [(every * k, {"train/nll": loss}) for k, loss in enumerate(losses, start=1)]


# Recorded by configs/experiments/depth_contrast.yaml, one thread, seed 1.
POST_NORM = [7.48, 6.75, 6.17, 5.94, 5.82, 5.82, 5.70, 5.71, 5.60, 5.63, 5.68, 5.67, 5.61, 5.56, 5.63, 5.59]
B2T = [7.39, 6.59, 5.84, 5.55, 5.35, 5.32, 5.03, 5.00, 4.71, 4.72, 4.70, 4.64, 4.50, 4.36, 4.45, 4.34]


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((2e-6, 0.01, 0.5), ["decoder layer 1 receives 2e-6 of the gradient of layer 4: vanishing"]),
        ((0.3, 340.0, 2.0), ["decoder layer 2 receives 340 times the gradient of layer 4: exploding"]),
        ((1e-3, 200.0), ["decoder layer 1 receives 0.001 of", "decoder layer 2 receives 200 times the"]),
        ((0.0, 1.0), ["decoder layer 1 receives 0 of the gradient of layer 3: vanishing"]),
        ((VANISHING, EXPLODING), []),
        ((0.07, 9.0), []),
    ],
)
def test_a_ratio_is_named_by_its_worst_layer(ratios: tuple[float, ...], said: list[str]) -> None:
    found = Diary().add(50, profile("decoder", "gradient_ratio", *ratios))
    assert len(found) == len(said)
    for finding, start in zip(found, said, strict=True):
        assert finding.sentence.startswith(start)
        assert "arXiv:" in str(finding)


def test_outputs_are_told_from_parameters() -> None:
    (found,) = Diary().add(50, profile("encoder", "activation_gradient_ratio", 1e-5, 0.5))
    assert found.sentence == "the output of encoder layer 1 receives 1e-5 of the gradient of layer 3: vanishing"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("key", ["train/loss", "train/nll", "val/nll"])
def test_no_number_is_divergence(key: str, value: float) -> None:
    diary = Diary()
    (found,) = diary.add(70, {key: value})
    assert f"{key} is {number(value)}" in found.sentence
    assert diary.verdict == "diverged at update 70"
    assert diary.summary()["stability/diverged_at"] == 70
    assert diary.summary()["stability/diverged"] == 1


def test_a_loss_far_above_its_start_is_divergence_and_may_pass() -> None:
    diary = findings(learning([7.0, 5.0, 7.9, 8.1]))
    assert diary.verdict == "diverged at update 200"
    assert diary.all[0].first == 200
    diary.add(250, {"train/nll": 6.0})
    assert diary.verdict == "no fault seen"
    assert "stability/diverged_at" not in diary.summary()


def test_stuck_is_told_from_slow_and_from_done() -> None:
    assert findings(learning(POST_NORM)).verdict == "stuck"
    assert findings(learning(B2T)).verdict == "no fault seen"
    converged = [6.0 * 0.5**k + 0.1 for k in range(40)]
    assert findings(learning(converged)).verdict == "no fault seen"
    assert findings(learning([7.0] * 11)).verdict == "no fault seen"  # too early to say
    assert findings(learning([7.0] * 100, every=1)).verdict == "no fault seen"


def test_the_entropy_of_words_says_what_stuck_means() -> None:
    diary = findings(learning(POST_NORM), entropy=5.6)
    assert "5.6 is the entropy of single words" in str(diary.all[0])
    assert findings(learning(POST_NORM), entropy=8.0).verdict == "no fault seen"  # it knows more than frequencies


def test_layers_alike_are_worth_a_word_but_no_fault() -> None:
    diary = Diary()
    diary.add(50, {"layer_similarity_centered/encoder/mean": ALIKE, **profile("encoder", "gradient_ratio", 1.0)})
    assert not diary.all
    (found,) = diary.add(100, {"layer_similarity_centered/encoder/mean": 0.996})
    assert found.where == "encoder"
    assert not found.grave
    assert diary.verdict == "healthy"


def test_attention_that_collapsed_and_positions_that_drowned() -> None:
    diary = Diary()
    found = diary.add(50, {"attention_entropy/encoder/layer_001": 0.4, "attention_entropy/encoder/layer_002": 0.001})
    assert [finding.sentence for finding in found] == [
        "self-attention of encoder layer 2 has 0.001 of the entropy it could: collapsed"
    ]
    (found,) = diary.add(50, {"cross_attention_entropy/decoder/layer_001": 0.0, "epsilon_audit/decoder/layer_001": 0.1})
    assert found.where == "decoder cross-attention"
    (found,) = diary.add(50, {"epsilon_audit/decoder/layer_001": 0.25, "epsilon_audit/decoder/layer_002": 0.0})
    assert found.sentence.startswith("25% of the positions in decoder layer 1 have a variance within ten times epsilon")
    assert diary.verdict == "no fault seen"


def test_the_spike_guard_is_believed() -> None:
    diary = findings(learning([7.0, 5.0]))
    diary.add(110, {"stability/diverged": 0.0, "stability/spikes": 2.0})
    assert diary.verdict == "no fault seen"
    assert diary.summary()["stability/spikes"] == 2.0
    diary.add(120, {"stability/diverged": 1.0, "stability/diverged_at": 113.0, "stability/spikes": 3.0})
    diary.add(150, {"train/nll": 5.0})
    assert diary.verdict == "diverged at update 113"
    assert diary.summary()["stability/diverged_at"] == 113
    diary.add(160, {"stability/diverged": 0.0, "train/nll": 5.0})
    assert diary.verdict == "no fault seen"
    assert "stability/diverged_at" not in diary.summary()


def test_jumps_are_counted_and_pass() -> None:
    diary = Diary()
    counts = {10: 0.0, 20: 1.0, 30: 1.0, 40: 3.0}
    new = [finding for update, count in counts.items() for finding in diary.add(update, {"stability/spikes": count})]
    assert [str(finding).split(";")[0] for finding in new] == ["the loss or the gradient norm jumped at one update"]
    (found,) = diary.all
    assert found.sentence == "the loss or the gradient norm jumped at 3 updates"
    assert not found.grave
    assert found.when == "since update 20"
    diary.add(50, {"stability/spikes": 3.0})
    assert diary.all[0].when == "update 20 to 40, then passed"


def test_a_lost_update_is_no_fault() -> None:
    diary = Diary()
    (found,) = diary.add(50, {"gradient_norm/total": INF, "train/loss": 5.0})
    assert found.rule == "lost update"
    assert diary.verdict == "no fault seen"


def test_what_goes_on_is_said_once_and_kept_at_its_worst() -> None:
    diary = Diary()
    assert len(diary.add(50, profile("decoder", "gradient_ratio", 1e-3))) == 1
    assert diary.add(100, profile("decoder", "gradient_ratio", 1e-6)) == []
    assert diary.add(150, profile("decoder", "gradient_ratio", 1e-4)) == []
    (found,) = diary.all
    assert (found.first, found.last, found.passed) == (50, 150, False)
    assert "1e-6" in found.sentence
    assert found.when == "since update 50"
    assert diary.verdict == "vanishing (decoder)"
    diary.add(200, {"train/nll": 3.0})
    assert diary.verdict == "vanishing (decoder)"  # nothing was measured in between
    diary.add(250, profile("decoder", "gradient_ratio", 0.5))
    assert diary.all[0].when == "update 50 to 150, then passed"
    assert diary.verdict == "healthy"


def test_the_gravest_comes_first() -> None:
    diary = findings([*learning(POST_NORM), (850, profile("decoder", "gradient_ratio", 1e-7))])
    diary.add(850, profile("encoder", "gradient_ratio", 1e-7))
    assert diary.verdict == "stuck, vanishing (decoder, encoder)"
    assert [finding.rule for finding in diary.all] == ["stuck", "vanishing", "vanishing"]


def test_the_summary_sorts_runs() -> None:
    diary = Diary()
    assert diary.verdict == "no numbers"
    diary.add(50, profile("decoder", "gradient_ratio", 0.05, 2.0) | {"val/bleu": 30.0, "val/nll": 2.0})
    diary.add(100, profile("encoder", "gradient_ratio", 0.5, 15.0) | {"val/bleu": 20.0, "val/nll": 1.5})
    assert diary.summary() == {
        "stability/verdict": "healthy",
        "stability/worst_ratio": 0.05,
        "stability/worst_ratio_of": "decoder layer 1, update 50",
        "best/val_bleu": 30.0,
        "best/val_bleu_update": 50,
        "best/val_nll": 1.5,
        "best/val_nll_update": 100,
    }


def test_every_rule_has_a_remedy_with_its_source() -> None:
    assert set(module.GRAVE) <= set(REMEDIES)
    for rule, remedy in REMEDIES.items():
        assert "arXiv:" in remedy or rule in ("lost update", "drowned")


@pytest.mark.parametrize(
    ("value", "written"),
    {
        0.0: "0",
        2e-6: "2e-6",
        7.29e-7: "7.3e-7",
        0.0651: "0.0651",
        1.0: "1",
        340.2: "340",
        12345.6: "12,346",
        1e9: "1e9",
        -0.05: "-0.05",
        INF: "inf",
        -INF: "-inf",
        NAN: "nan",
    }.items(),
)
def test_a_number_is_short(value: float, written: str) -> None:
    assert number(value) == written


def test_a_diary_goes_on_from_its_state() -> None:
    """As a checkpoint holds it: read without running code, and nothing is found a second time."""
    records = [(update, {"train/nll": 5.0 + update / 9, "val/bleu": update % 7}) for update in range(1, 40)]
    records += [(40, {"gradient_ratio/encoder/layer_001": 1e-7, "stability/spikes": 2.0})]
    whole, first, second = Diary(), Diary(), Diary()
    for update, metrics in records:
        whole.add(update, metrics)
    for update, metrics in records[:25]:
        first.add(update, metrics)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert [found.rule for update, metrics in records[25:] for found in second.add(update, metrics)] == [
        "jumped",
        "vanishing",
    ]
    assert second == whole
    assert "vanishing" in whole.verdict or "diverged" in whole.verdict
