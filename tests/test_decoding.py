"""Beam search against enumeration, paper and pencil, and a search that never stops early (FIELD_REPORTS 4.9, 4.10)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stabilize.decoding import BeamSearch, Hypothesis
from stabilize.errors import UserError
from stabilize.model import Cache, EncoderDecoder, Memory, Sizes
from stabilize.strategies import Stabilizer
from stabilize.tokens import BEGIN, END, PAD, UNKNOWN

A, B, C = 4, 5, 6
VOCABULARY = 7

Table = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[float]]
"""Source tokens and target prefix, both without marks -> logits of the next token."""


def whole(cache: Cache, new: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """The hypotheses `[rows, length]` up to and with their new tokens, for models that keep nothing else in the cache,
    and the sentence of each."""
    mask = cache.extend(len(memory.states), 1, new.device)[:, 0]  # [sentences, places, columns]
    written = cache.by_sentence(new)[:, None, :, None]
    tokens = cache.append((1, "tokens"), written, written)[0][:, 0, :, 0]  # [sentences, columns]
    sentence = torch.arange(len(mask))[:, None].expand(mask.shape[:2])
    places = zip(sentence.flatten().tolist(), mask.flatten(0, 1), strict=True)
    own = torch.stack([tokens[number][seen] for number, seen in places])
    return cache.by_row(own[:, None])[:, 0], cache.by_row(sentence)[:, 0]


class TableModel:
    """A model that looks its logits up."""

    def __init__(self, table: Table, dtype: torch.dtype = torch.float32) -> None:
        self.table, self.dtype, self.steps, self.longest = table, dtype, 0, None

    def encode(self, source: Tensor) -> Memory:
        return Memory(source, source != PAD)

    def decode(self, target: Tensor, memory: Memory, cache: Cache) -> Tensor:
        self.steps += 1
        assert target.size(1) == 1, "one new token for each hypothesis"
        prefixes, sentence = whole(cache, target, memory)
        rows = zip(memory.states[sentence].tolist(), prefixes.tolist(), strict=True)
        logits = [self.table(tuple(t for t in source if t not in (PAD, END)), tuple(row[1:])) for source, row in rows]
        return torch.tensor(logits, dtype=self.dtype)[:, None]

    def project(self, hidden: Tensor) -> Tensor:
        return hidden


def padded(source: list[list[int]]) -> Tensor:
    """A batch of sources given without end mark."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor([*s, END]) for s in source], batch_first=True)


def search(model: object, source: list[list[int]], **arguments: Any) -> list[Hypothesis]:
    """The best hypothesis of each source."""
    return BeamSearch(**arguments)(model, padded(source))


def n_best(model: object, source: list[list[int]], count: int, **arguments: Any) -> list[list[Hypothesis]]:
    """The best hypotheses of each source."""
    return BeamSearch(**arguments).n_best(model, padded(source), count)


def random_table(seed: int, spread: float = 2.0) -> Table:
    """Logits drawn once for each source and prefix."""

    def table(source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, source, prefix)) % 2**63)
        return (spread * torch.randn(VOCABULARY, generator=generator)).tolist()

    return table


def log_probabilities(table: Table, source: Sequence[int], prefix: tuple[int, ...]) -> list[float]:
    return torch.tensor(table(tuple(source), prefix), dtype=torch.float64).log_softmax(0).tolist()


Divisor = Callable[[int], float]
"""Length -> what log p is divided by."""

PENALTIES: dict[str, tuple[dict[str, Any], Divisor]] = {
    "none": ({"length_penalty": 0.0}, lambda length: 1.0),
    "average": ({"length_penalty": 1.0}, lambda length: length),
    "average, a power": ({"normalization": "average", "length_penalty": 0.6}, lambda length: length**0.6),
    "GNMT": ({"normalization": "gnmt", "length_penalty": 0.6}, lambda length: (5 + length) ** 0.6 / 6**0.6),
    "GNMT, a power": ({"normalization": "gnmt", "length_penalty": 2.0}, lambda length: (5 + length) ** 2 / 36),
}
every_penalty = pytest.mark.parametrize(("arguments", "divisor"), PENALTIES.values(), ids=PENALTIES.keys())


def exhaustive(table: Table, source: Sequence[int], limit: int, divisor: Divisor) -> list[tuple[float, list[int]]]:
    """All hypotheses of at most `limit` tokens, end mark included, the best first."""
    found = []
    for length in range(limit):
        for ids in itertools.product((A, B, C), repeat=length):
            steps = [log_probabilities(table, source, ids[:i])[token] for i, token in enumerate((*ids, END))]
            found.append((sum(steps) / divisor(length + 1), list(ids)))
    return sorted(found, reverse=True)


def patient(table: Table, source: Sequence[int], beam: int, limit: int, divisor: Divisor) -> list[Hypothesis]:
    """Beam search in plain Python that always goes on to the limit: finished hypotheses, then those that were cut."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        grown = [
            (log_p + step[token], (*ids, token))
            for log_p, ids in live
            for step in [log_probabilities(table, source, ids)]
            for token in (END, A, B, C)
        ]
        grown = sorted(grown, reverse=True)[: beam - len(finished)]
        finished += [Hypothesis(list(ids[:-1]), p / divisor(length), False) for p, ids in grown if ids[-1] == END]
        live = [(p, ids) for p, ids in grown if ids[-1] != END]
    cut = [Hypothesis(list(ids), p / divisor(limit), True) for p, ids in live]
    return [hypothesis for part in (finished, cut) for hypothesis in sorted(part, key=lambda h: -h.score)]


def assert_same(found: Hypothesis, expected: Hypothesis) -> None:
    assert found.ids == expected.ids
    assert found.truncated == expected.truncated
    assert found.score == pytest.approx(expected.score, abs=1e-5)


@every_penalty
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 5))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all(
    arguments: dict[str, Any], divisor: Divisor, seed: int, limit: int
) -> None:
    """Its seven best, of up to 121."""
    table = random_table(seed)
    arguments = arguments | {"beam": 1000, "maximum_ratio": 0.0, "maximum_extra": limit}
    (found,) = n_best(TableModel(table), [[A]], 7, **arguments)
    for one, (score, ids) in zip(found, exhaustive(table, [A], limit, divisor), strict=False):
        assert_same(one, Hypothesis(ids, score, False))
    assert search(TableModel(table), [[A]], **arguments) == found[:1]


@every_penalty
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), beam=st.integers(1, 5), limit=st.integers(1, 8), data=st.data())
def test_stopping_early_changes_nothing(
    arguments: dict[str, Any], divisor: Divisor, seed: int, beam: int, limit: int, data: st.DataObject
) -> None:
    table, count = random_table(seed), data.draw(st.integers(1, beam))
    arguments = arguments | {"beam": beam, "maximum_ratio": 0.0, "maximum_extra": limit}
    (found,) = n_best(TableModel(table), [[A, B]], count, **arguments)
    expected = patient(table, [A, B], beam, limit, divisor)[:count]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_beam_of_one_is_greedy(seed: int) -> None:
    table, greedy = random_table(seed), []
    while len(greedy) < 9:
        step = log_probabilities(table, [A, A], tuple(greedy))
        token = max((END, A, B, C), key=lambda token: step[token])
        if token == END:
            break
        greedy.append(token)
    (found,) = search(TableModel(table), [[A, A]], beam=1, maximum_ratio=2.0, maximum_extra=3)
    assert found.ids == greedy
    assert found.truncated == (len(greedy) == 9)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    beam=st.integers(1, 4),
    source=st.lists(st.lists(st.sampled_from([UNKNOWN, A, B, C]), max_size=4), min_size=1, max_size=8),
)
def test_a_sentence_does_not_see_the_others(seed: int, beam: int, source: list[list[int]]) -> None:
    model = TableModel(random_table(seed))
    together = search(model, source, beam=beam, maximum_ratio=1.5, maximum_extra=2)
    for found, sentence in zip(together, source, strict=True):
        (alone,) = search(model, [sentence], beam=beam, maximum_ratio=1.5, maximum_extra=2)
        assert_same(found, alone)


@pytest.mark.parametrize(
    ("normalization", "penalty", "ids", "score"),
    [
        ("average", 0.0, [], math.log(0.4)),  # -0.92; then -1.20, -1.61, -2.30
        ("average", 0.6, [A], math.log(0.3) / 2**0.6),  # -0.79; the others -0.92, -0.83, -1.00
        ("average", 1.0, [A, A], math.log(0.2) / 3),  # -0.54; the others -0.92, -0.60, -0.58
        ("gnmt", 0.6, [], math.log(0.4)),  # -0.92; then -1.10, -1.35, -1.81
        ("gnmt", 2.0, [A], math.log(0.3) / (7 / 6) ** 2),  # -0.885; the others -0.916, -0.905, -1.02
        ("gnmt", 3.0, [A, A], math.log(0.2) / (8 / 6) ** 3),  # -0.679; the others -0.916, -0.758, -0.682
    ],
)
def test_example_on_paper(normalization: str, penalty: float, ids: list[int], score: float) -> None:
    """The four hypotheses: nothing 0.4, a 0.6 * 0.5 = 0.3, a a 0.6 * 0.5 * 2/3 = 0.2, a a a 0.1.

    Were the begin mark counted as well, the empty one would win at 0.6.
    """
    end = [0.4, 0.5, 2 / 3, 1.0]

    def table(source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        p = end[len(prefix)]
        return [math.log(p) if t == END else math.log(1 - p) if t == A and p < 1 else -math.inf for t in range(6)]

    arguments = {"normalization": normalization, "length_penalty": penalty, "maximum_extra": 4}
    (found,) = search(TableModel(table), [[A]], beam=4, **arguments)
    assert_same(found, Hypothesis(ids, score, False))


def constant(**logits: float) -> Table:
    """The same logits everywhere, by the token's name; -20 for the tokens not named."""
    names = ("pad", "unknown", "begin", "end", "a", "b")
    return lambda source, prefix: [logits.get(name, -20.0) for name in names]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_model_that_never_ends_is_cut_at_the_limit(beam: int) -> None:
    model = TableModel(constant(a=1.0, b=0.0, end=-math.inf))
    found = search(model, [[A] * 3, [], [A] * 5], beam=beam, maximum_ratio=1.5, maximum_extra=2)
    assert [h.ids for h in found] == [[A] * 8, [A] * 3, [A] * 11]  # 1.5 * (4, 1, 6 with end mark), rounded down, + 2
    assert all(h.truncated for h in found)
    step = 1.0 - math.log(math.e + 1)
    assert [h.score for h in found] == pytest.approx([step] * 3, abs=1e-5)


def test_what_finished_is_preferred_to_what_was_cut() -> None:
    (found,) = search(TableModel(constant(a=5.0, end=0.0)), [[A]], beam=2, length_penalty=0.0, maximum_extra=4)
    assert_same(found, Hypothesis([], -math.log1p(math.exp(5.0)), False))


@pytest.mark.parametrize("beam", [1, 3])
def test_a_model_that_ends_at_once_gives_empty_hypotheses(beam: int) -> None:
    model = TableModel(constant(end=20.0))
    assert [h.ids for h in search(model, [[A] * 30, []], beam=beam)] == [[], []]
    assert model.steps == 1


def test_a_search_that_cannot_be_won_any_more_ends() -> None:
    """With no length penalty the first finished hypothesis, of 0.7, is out of reach for what is left of the beam."""
    model = TableModel(constant(end=math.log(0.7), a=math.log(0.2), b=math.log(0.1)))
    search(model, [[A] * 30], length_penalty=0.0)
    assert model.steps == 1


def test_a_live_hypothesis_that_can_still_win_keeps_the_search_going() -> None:
    """An empty hypothesis of 0.6 finishes first; the other, 0.4, goes on without loss and wins at length 10."""

    def table(source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        if not prefix:
            return [-math.inf] * 3 + [math.log(0.6), math.log(0.4), -math.inf]
        return constant(end=20.0)(source, prefix) if len(prefix) == 9 else constant(a=20.0)(source, prefix)

    (found,) = search(TableModel(table), [[A]], beam=2)
    assert found.ids == [A] * 9
    assert found.score == pytest.approx(math.log(0.4) / 10, abs=1e-5)


def test_more_hypotheses_keep_the_search_going() -> None:
    """As above, with no length penalty: the first finished hypothesis wins, but the second best is still unknown."""
    model = TableModel(constant(end=math.log(0.7), a=math.log(0.2), b=math.log(0.1)))
    ((first, second),) = n_best(model, [[A] * 30], 2, length_penalty=0.0)
    assert (first.ids, second.ids) == ([], [A])
    assert second.score == pytest.approx(math.log(0.2 * 0.7), abs=1e-5)
    assert model.steps == 2


def test_what_finished_comes_before_what_was_cut() -> None:
    ((*found,),) = n_best(TableModel(constant(a=5.0, end=0.0)), [[A]], 3, beam=3, maximum_ratio=0.0, maximum_extra=2)
    assert [(h.ids, h.truncated) for h in found] == [([A], False), ([], False), ([A, A], True)]
    assert found[2].score > found[0].score > found[1].score


def test_there_may_be_fewer_than_were_asked_for() -> None:
    """The end mark, and each token that is cut after itself."""
    (found,) = n_best(TableModel(constant(a=1.0)), [[A]], 5, beam=5, maximum_ratio=0.0, maximum_extra=1)
    assert [h.ids for h in found] == [[], [A], [B]]
    assert n_best(TableModel(constant(a=math.nan)), [[A]], 5, beam=5) == [[Hypothesis([], -math.inf, True)]]


@pytest.mark.parametrize("count", [0, 4])
def test_no_more_hypotheses_than_the_beam_holds(count: int) -> None:
    with pytest.raises(UserError, match=f"{count} hypotheses .* with a beam of 3; 1 to 3 would do"):
        n_best(TableModel(constant()), [[A]], count, beam=3)


@pytest.mark.parametrize("beam", [1, 2])
def test_pad_begin_and_unknown_are_never_produced(beam: int) -> None:
    """The others' log p is what it is beside them, not what is left."""
    model = TableModel(constant(pad=9.0, begin=9.0, unknown=9.0, a=1.0, end=-math.inf))
    (found,) = search(model, [[A]], beam=beam, maximum_extra=3)
    assert set(found.ids) == {A}
    assert found.score == pytest.approx(1.0 - math.log(3 * math.exp(9.0) + math.e), abs=1e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_minimum_length(beam: int) -> None:
    (found,) = search(TableModel(constant(end=9.0, a=0.0)), [[A]], beam=beam, minimum_length=4)
    assert found.ids == [A] * 3  # and the end mark is the fourth


@pytest.mark.parametrize("beam", [1, 3])
def test_a_model_that_diverged_gives_empty_hypotheses(beam: int) -> None:
    found = search(TableModel(constant(a=math.nan)), [[A], [B]], beam=beam)
    assert found == [Hypothesis([], -math.inf, True)] * 2


def test_scores_are_summed_in_float32_whatever_the_model_computes_in() -> None:
    """In bfloat16 thirty equal steps would round to multiples of 1/16 on their way."""
    model = TableModel(constant(a=1.0, b=0.0), dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = search(model, [[A]], beam=2, length_penalty=0.0, maximum_ratio=0.0, maximum_extra=30)
    assert found.score == pytest.approx(30 * (1.0 - math.log(math.e + 1)), rel=1e-6)


def test_no_sentences() -> None:
    assert BeamSearch()(TableModel(constant()), torch.zeros(0, 4, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam": 0},
        {"length_penalty": -0.5},
        {"normalization": "median"},
        {"maximum_ratio": math.inf},
        {"maximum_extra": 0},
        {"minimum_length": 0},
    ],
)
def test_arguments_that_cannot_be(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} of BeamSearch is {wrong[name]}"):
        BeamSearch(**wrong)


class Uncached:
    """The same model, decoding every prefix from its start."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.model, self.encode, self.project, self.longest = model, model.encode, model.project, model.longest

    def decode(self, target: Tensor, memory: Memory, cache: Cache) -> Tensor:
        prefixes, sentence = whole(cache, target, memory)
        return self.model.decode(prefixes, memory.select(sentence))


@pytest.fixture
def transformer() -> EncoderDecoder:
    """Weights far from their start, so that source and prefix both matter to what comes next."""
    model = EncoderDecoder(12, Sizes(2, 2, width=16, heads=2, hidden=32, dropout=0.3), Stabilizer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.eval()


SENTENCES = [[4, 5, 6, 7], [], [8, 9], [4, 11, 10, 9, 8, 7], [1], [5, 5, 5]]


@pytest.mark.parametrize("beam", [1, 4])
def test_cached_search_equals_uncached_search(transformer: EncoderDecoder, beam: int) -> None:
    cached, uncached = search(transformer, SENTENCES, beam=beam), search(Uncached(transformer), SENTENCES, beam=beam)
    assert len({tuple(h.ids) for h in cached}) > 2, "or this would show nothing"
    for one, other in zip(cached, uncached, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_does_not_see_the_others_in_a_transformer(transformer: EncoderDecoder, beam: int) -> None:
    for found, sentence in zip(search(transformer, SENTENCES, beam=beam), SENTENCES, strict=True):
        (alone,) = search(transformer, [sentence], beam=beam)
        assert_same(found, alone)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_batch_of_64_gives_the_tokens_that_each_sentence_gives_alone(transformer: EncoderDecoder, beam: int) -> None:
    random = Random(beam)
    sentences = [random.choices(range(4, 12), k=random.randrange(12)) for _ in range(64)]
    source = torch.nn.functional.pad(padded(sentences), (0, 9), value=PAD)
    together = BeamSearch(beam=beam).n_best(transformer, source, beam)
    assert len({tuple(h.ids) for found in together for h in found}) > 32, "or this would show nothing"
    for found, sentence in zip(together, sentences, strict=True):
        (alone,) = n_best(transformer, [sentence], beam, beam=beam)
        assert [h.ids for h in found] == [h.ids for h in alone]


@pytest.mark.parametrize("beam", [1, 4])
def test_score_is_that_of_the_whole_sentence_forced(transformer: EncoderDecoder, beam: int) -> None:
    for found, sentence in zip(search(transformer, SENTENCES, beam=beam), SENTENCES, strict=True):
        target = found.ids if found.truncated else [*found.ids, END]
        hidden = transformer(torch.tensor([[*sentence, END]]), torch.tensor([[BEGIN, *target[:-1]]]))
        steps = transformer.project(hidden)[0].log_softmax(-1)[range(len(target)), target]
        assert found.score == pytest.approx(steps.mean().item(), abs=1e-5)


def test_training_goes_on_after_a_search(transformer: EncoderDecoder) -> None:
    transformer.train()
    search(transformer, SENTENCES)
    assert transformer.training
    transformer(torch.tensor([[4, END]]), torch.tensor([[BEGIN, 5]])).sum().backward()


def test_learned_positions_end_the_search() -> None:
    sizes = Sizes(1, 1, width=16, heads=2, hidden=32, positions="learned", maximum_length=7)
    model = EncoderDecoder(12, sizes, Stabilizer()).eval()
    for found in search(model, SENTENCES, beam=3, maximum_extra=99, minimum_length=90):
        assert found.truncated
        assert len(found.ids) == 7


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_scores_are_float32_whatever_the_default(default: torch.dtype, transformer: EncoderDecoder) -> None:
    """Lightning's true half precision changes torch's default type."""
    expected = search(transformer, SENTENCES, beam=3)
    torch.set_default_dtype(default)
    try:
        assert search(transformer, SENTENCES, beam=3) == expected
    finally:
        torch.set_default_dtype(torch.float32)
