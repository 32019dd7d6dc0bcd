"""The rules that make sentences of results."""

from __future__ import annotations

from stabilize.study.answer import EPSILON, PRECISION, RULES, WARMUP
from tests.study.rows import row

KEYS = ["strategy", "depth", "learning_rate"]


def told(rule: str, rows: list[dict[str, str]], keys: list[str]) -> str:
    return "\n".join(RULES[rule](rows, keys))


def test_who_trains_where_and_who_is_best() -> None:
    rows = []
    for seed in (1, 2, 3):
        for depth in (3, 12):
            rows.append(row(seed=seed, strategy="good", depth=depth, learning_rate=1e-3, val_nll=2 + seed / 100))
            rows.append(row(seed=seed, strategy="near", depth=depth, learning_rate=1e-3, val_nll=2.05 - seed / 100))
            rows.append(row(seed=seed, strategy="worse", depth=depth, learning_rate=1e-3, val_nll=3 + seed / 100))
        rows.append(row(seed=seed, strategy="post", depth=3, learning_rate=1e-3, val_nll=2.5 + seed / 100))
        fate = "stuck" if seed < 3 else "trained"
        rows.append(row(seed=seed, outcome=fate, strategy="post", depth=12, learning_rate=1e-3, val_nll=5))
        rows.append(row(seed=seed, outcome="stuck", strategy="post", depth=18, learning_rate=1e-3, val_nll=5))
    said = told("strategies", rows, KEYS)
    assert said.startswith("good, near and worse train with every seed at every point of the grid.")
    assert (
        "post trains at depth 3; no seed does at depth 18, 3 stuck of 3 (44% to 100%); not every seed does at" in said
    )
    assert "; not every seed does at depth 12, 2 stuck of 3 (21% to 94%)." in said
    assert (
        "depth 12: the lowest nll is that of good, 2.02 ± 0.0248 (next near, 2.03 ± 0.0248); near is not told" in said
    )


def test_the_largest_stable_learning_rate() -> None:
    fates = {3: ("trained", "trained", "diverged"), 12: ("stuck", "stuck", "diverged")}
    rows = [
        row(seed=seed, outcome=fate, strategy="a", depth=depth, learning_rate=rate, val_nll=rate)
        for seed in (1, 2)
        for depth, outcomes in fates.items()
        for rate, fate in zip((0.0005, 0.001, 0.002), outcomes, strict=True)
    ]
    assert told("frontier", rows, KEYS) == (
        "a: the largest learning rate at which every seed trains is 0.001 at 3 layers (lowest nll at 5e-4) and none at "
        "12 layers (stuck and diverged)."
    )


def test_how_short_a_warmup_may_be() -> None:
    def some(depth: int, updates: int, fate: str, nll: float) -> list[dict[str, str]]:
        values = {"strategy": "a", "depth": depth, WARMUP: updates}
        return [row(seed=seed, outcome=fate, val_nll=nll, **values) for seed in (1, 2)]

    rows = some(3, 1, "trained", 2.5) + some(3, 100, "trained", 2.0)
    rows += some(6, 1, "stuck", 5.0) + some(6, 100, "trained", 2.0)
    rows += some(12, 1, "stuck", 5.0) + some(12, 100, "stuck", 5.0)
    assert told("warmup", rows, ["strategy", "depth", WARMUP]) == (
        "a: at 3 layers it does without (nll 2.5 ± 0, with 100 2 ± 0); at 6 layers it needs 100 updates; "
        "at 12 layers it fails with each that was tried."
    )


def test_where_epsilon_acts() -> None:
    rows = [
        row(seed=seed, strategy="a", val_nll=nll + seed / 100, encoder_epsilon_share=share)
        | {EPSILON: epsilon, PRECISION: "32-true"}
        for seed in (1, 2, 3)
        for epsilon, nll, share in (("1e-05", 2.0, 0.0), ("1e-12", 2.001, 0.0), ("0.001", 2.5, 0.25))
    ]
    keys = ["strategy", EPSILON, PRECISION]
    said = told("epsilon", rows, keys)
    assert said.startswith(
        "a, precision 32-true: nll from 2.02 ± 0.0248 (epsilon 1e-05) to 2.52 ± 0.0248 (0.001), more"
    )
    assert said.endswith("epsilon acts at 25% at 0.001 of the positions of a layer.")
    for one in rows:
        if one[EPSILON] == "1e-12":  # now the seeds do not agree on which is better
            one["val_nll"] = str(2.05 - int(one["seed"]) / 100)
    said = told("epsilon", [one for one in rows if one[EPSILON] != "0.001"], keys)
    assert said.endswith("which the seeds do not tell apart; epsilon acts nowhere.")


def test_training_against_evaluation() -> None:
    rows = [row(seed=seed, strategy="b", val_nll=3 + seed, train_nll=3, batch=1) for seed in (1, 2)]
    assert told("batch_norm", rows, ["strategy", "batch"]) == "batch 1: b nll 4.5 ± 6.35, 1.5 ± 6.35 above training's."


def test_a_study_without_results_has_no_answer() -> None:
    for rule in RULES.values():
        assert rule([], ["strategy", "depth", "learning_rate"]) == []
