"""Scores and translations of a pass over evaluation text (FIELD_REPORTS 4.2 to 4.5, 4.8, 4.10)."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stabilize.callbacks import ProgressLines
from stabilize.commands.results import results
from stabilize.data.batch import Batch
from stabilize.data.module import Split
from stabilize.data.pairs import Pairs
from stabilize.decoding import BeamSearch, Hypothesis
from stabilize.errors import UserError
from stabilize.evaluation import Evaluation
from stabilize.metrics import ScoreName, corpus_scores
from stabilize.task import TranslationTask
from stabilize.tokens import END, UNKNOWN
from tests.tasks import ENGLISH, GERMAN, Sentences, rows, small_task, small_trainer

REFERENCES = (*GERMAN, "Er sagte: „Nein, um 3.5 Uhr!“", "", "12 % der 1.000 Äpfel — naïve Œuvre", "東京は大きい。")
SCORES: tuple[ScoreName, ...] = ("bleu", "chrf", "chrf++", "ter")
TRANSLATIONS = (*GERMAN[1:], "die Katze", 'Er sagte: "Nein, um 3.5 Uhr!"', "nichts", "12% der 1.000 Äpfel", "東京 。")


def lines(*numbers: int) -> tuple[Batch, list[str], list[bool]]:
    """A batch of these lines, their translations, and that none was cut."""
    ids = torch.zeros(len(numbers), 1, dtype=torch.long)
    references = tuple((REFERENCES[k],) for k in numbers)
    batch = Batch(ids, ids, torch.tensor(numbers), tuple(f"source {k}" for k in numbers), references)
    return batch, [TRANSLATIONS[k] for k in numbers], [False] * len(numbers)


@given(order=st.permutations(range(len(REFERENCES))), cuts=st.sets(st.integers(1, len(REFERENCES) - 1)))
def test_no_cut_or_order_changes_a_score_or_a_line(order: list[int], cuts: set[int]) -> None:
    """The scores are sacreBLEU's for the whole corpus, the lines back in the order of the text."""
    evaluation = Evaluation(corpus_scores(SCORES))
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(order)], strict=True):
        evaluation.add(*lines(*order[start:end]))
    scores, _, found, _ = evaluation.finish()
    assert scores["bleu"] == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score
    assert scores["chrf++"] == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES], word_order=2).score
    assert scores["ter"] == sacrebleu.corpus_ter(TRANSLATIONS, [REFERENCES]).score
    assert list(found) == list(range(len(REFERENCES)))
    assert tuple(line.translation for line in found.values()) == TRANSLATIONS
    assert [line.references for line in found.values()] == [(reference,) for reference in REFERENCES]


def test_the_files_give_the_scores_back(tmp_path: Path) -> None:
    """To the sacrebleu command, which knows nothing but the two files."""
    evaluation = Evaluation(corpus_scores(SCORES))
    batch, translations, cut = lines(*range(len(REFERENCES)))
    evaluation.add(batch._replace(references=tuple(zip(REFERENCES, REFERENCES[::-1], strict=True))), translations, cut)
    found = evaluation.finish()
    found.write(tmp_path, "test", update=7)
    files = {"reference": REFERENCES, "other": REFERENCES[::-1]}
    for name, text in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8", newline="\n")
    command = [sys.executable, "-m", "sacrebleu", *files, "-i", "test.txt", "-w", "9", "-m", "bleu", "chrf", "ter"]
    assert (tmp_path / "test.reference.txt").read_bytes() == (tmp_path / "reference").read_bytes()
    facts = json.loads((tmp_path / "test.json").read_text(encoding="utf-8"))
    for words, names in (([], ("bleu", "chrf", "ter")), (["--chrf-word-order", "2"], ("bleu", "chrf++", "ter"))):
        said = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for name, score in zip(names, json.loads(said), strict=True):
            assert f"{facts['scores'][name]:.9f}" == f"{score['score']:.9f}"
            assert facts["signatures"][name] == score["signature"]
            assert "nrefs:2" in score["signature"]
    assert facts["scores"] == found.scores
    assert facts["versions"]["sacrebleu"] == sacrebleu.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["sentencepiece"] == sentencepiece.__version__
    assert (facts["lines"], facts["empty"], facts["truncated"], facts["update"]) == (len(REFERENCES), 0, 0, 7)


def test_a_pass_starts_from_nothing() -> None:
    evaluation = Evaluation(corpus_scores(["bleu", "ter"]))
    evaluation.add(*lines(0, 1))
    evaluation.finish()
    empty = evaluation.finish()
    assert (empty.scores, empty.lines) == ({"bleu": 0.0, "ter": 0.0}, {})


def test_lines_that_were_left_out_are_blank(tmp_path: Path) -> None:
    evaluation = Evaluation({})
    evaluation.add(*lines(3, 1))
    found = evaluation.finish(len(REFERENCES))
    found.write(tmp_path, "test")
    assert (tmp_path / "test.txt").read_text(encoding="utf-8") == f"\n{TRANSLATIONS[1]}\n\n{TRANSLATIONS[3]}\n"
    facts = json.loads((tmp_path / "test.json").read_text())
    assert (facts["lines"], facts["of"]) == (2, len(REFERENCES))
    assert found.part == f"2 of {len(REFERENCES)} lines"
    assert found._replace(total=2).part == found._replace(total=None).part == ""


# ---------------------------------------------------------------------- the task's passes


class Dictated(BeamSearch):
    """A search that finds what it is told: the reference of each source, or nothing."""

    def __call__(self, model: Any, source: torch.Tensor) -> list[Hypothesis]:
        encode = small_task().tokenizer.encode
        known = {tuple(encode(english)): encode(german) for english, german in zip(ENGLISH, GERMAN, strict=True)}
        asked = [tuple(token for token in row if token > 3) for row in source.tolist()]
        return [Hypothesis(known.get(row, [5, 6]), 0.0, row not in known) for row in asked]


class Silent(BeamSearch):
    """A search that finds the end mark at once."""

    def __call__(self, model: Any, source: torch.Tensor) -> list[Hypothesis]:
        return [Hypothesis([], 0.0, False)] * len(source)


def score(folder: Path, task: TranslationTask, data: Sentences | None = None, **options: Any) -> dict[str, float]:
    trainer = small_trainer(folder, **options)
    (scores,) = trainer.test(task, datamodule=data or Sentences(), verbose=False)
    return scores


def written(folder: Path, name: str) -> Sequence[str]:
    """The lines of a file; a line feed alone ends them."""
    *found, rest = (folder / "translations" / name).read_text(encoding="utf-8").split("\n")
    assert rest == ""
    return found


def test_saying_the_reference_scores_a_hundred_whatever_the_batches(tmp_path: Path) -> None:
    """Longest batches come first, so that this also shows that the lines find back to their places."""
    for tokens in (1, 40, 10_000):
        folder = tmp_path / str(tokens)
        scores = score(folder, small_task(search=Dictated()), Sentences(evaluation_batch_tokens=tokens))
        assert scores["test/bleu"] == pytest.approx(100)
        assert scores["test/chrf"] == pytest.approx(100)
        assert written(folder, "test.txt") == list(GERMAN)


def test_a_score_of_good_and_bad_lines_is_no_mean_of_batches(tmp_path: Path) -> None:
    """Every second source is one that the search does not know (FIELD_REPORTS 4.3)."""
    sources = [english if k % 2 else "nobody knows this" for k, english in enumerate(ENGLISH)]
    for tokens in (1, 60, 10_000):
        folder = tmp_path / str(tokens)
        text = Sentences({"test": Pairs(sources, list(GERMAN))}, evaluation_batch_tokens=tokens)
        scores = score(folder, small_task(search=Dictated()), text)
        lines = written(folder, "test.txt")
        whole = sacrebleu.corpus_bleu(lines, [GERMAN]).score
        assert scores["test/bleu"] == pytest.approx(whole, rel=1e-6)
        each = [sacrebleu.corpus_bleu([line], [[german]]).score for line, german in zip(lines, GERMAN, strict=True)]
        assert abs(sum(each) / len(each) - whole) > 5, "else the one could be taken for the other"


class Everything(BeamSearch):
    """A search that finds each token that there is but the end and, as every search, the unknown one."""

    def __call__(self, model: Any, source: torch.Tensor) -> list[Hypothesis]:
        ids = [token for token in range(small_task().tokenizer.vocabulary) if token not in (END, UNKNOWN)]
        return [Hypothesis(ids, 0.0, False)] * len(source)


def test_what_is_written_has_no_marks_of_subwords_nor_special_tokens(tmp_path: Path) -> None:
    score(tmp_path, small_task(search=Everything()))
    for line in written(tmp_path, "test.txt"):
        assert set("".join(GERMAN)) - {" "} <= set(line)
        assert not any(mark in line for mark in ("▁", "@@", "⁇", "<", ">"))


def test_empty_and_truncated_translations_are_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Pairs(["", "nobody knows this", *ENGLISH[2:5], "  "], list(GERMAN))
    data = Sentences({"test": text, "validation": text})
    task = small_task(search=Dictated(), validation_search=Dictated())
    trainer = small_trainer(tmp_path, ProgressLines(), max_steps=1, limit_val_batches=1.0, val_check_interval=1)
    trainer.fit(task, datamodule=data)
    (check,) = [row for row in rows(tmp_path) if "val/bleu" in row]
    assert (check["val/lines"], check["val/empty"], check["val/truncated"]) == (6, 2, 1)
    assert "(2 empty, 1 truncated at the length limit)" in capsys.readouterr().out

    (scores,) = trainer.test(task, datamodule=data, verbose=False)
    assert (scores["test/lines"], scores["test/empty"], scores["test/truncated"]) == (6, 2, 1)
    console = Console(width=200, file=io.StringIO())
    console.print(results(trainer, trainer.callback_metrics))
    said = console.file.getvalue()
    assert "test: 2 empty, 1 truncated at the length limit, of 6 translations" in said
    assert re.search(r"test/truncated +1 ", said)


def test_loss_and_nll_are_means_over_tokens_whatever_the_batches(tmp_path: Path) -> None:
    """A mean over batches would weigh a short last batch like a full one."""
    task = small_task(label_smoothing=0.1)
    data = Sentences()
    data.setup("test")
    batches = list(data.test_dataloader())
    with torch.no_grad():
        sums = torch.tensor([[float(x) for x in task.eval().loss(batch)] for batch in batches]).sum(0)
    for tokens in (1, 40, 10_000):
        scores = score(tmp_path / str(tokens), task, Sentences(evaluation_batch_tokens=tokens))
        assert scores["test/loss"] == pytest.approx(float(sums[0] / sums[2]), rel=1e-5)
        assert scores["test/nll"] == pytest.approx(float(sums[1] / sums[2]), rel=1e-5)


def test_a_blank_line_stays_blank_and_counts(tmp_path: Path) -> None:
    blank = ("", ENGLISH[1], "   ", *ENGLISH[3:5], "")
    text = Sentences({"test": Pairs(list(blank), list(GERMAN))})
    scores = score(tmp_path, small_task(search=Dictated()), text)
    expected = [german if english.strip() else "" for english, german in zip(blank, GERMAN, strict=True)]
    assert written(tmp_path, "test.txt") == expected
    assert scores["test/bleu"] == pytest.approx(sacrebleu.corpus_bleu(expected, [GERMAN]).score, rel=1e-5)
    assert json.loads((tmp_path / "translations" / "test.json").read_text())["empty"] == 3


@pytest.mark.parametrize("search", [Silent(), BeamSearch(beam=1), BeamSearch(beam=3)])
def test_a_model_that_has_learnt_nothing_scores_nothing(tmp_path: Path, search: BeamSearch) -> None:
    scores = score(tmp_path, small_task(search=search))
    assert scores["test/bleu"] < 1
    assert len(written(tmp_path, "test.txt")) == len(ENGLISH)
    facts = json.loads((tmp_path / "translations" / "test.json").read_text())
    if isinstance(search, Silent):
        assert scores["test/bleu"] == 0
        assert facts["empty"] == len(ENGLISH)
    assert facts["search"] == {
        "beam": search.beam,
        "normalization": "average",
        "length_penalty": 1.0,
        "maximum_ratio": 2.0,
        "maximum_extra": 10,
        "minimum_length": 1,
    }


def test_a_limited_pass_scores_the_baselines_on_its_own_lines(tmp_path: Path) -> None:
    """Here nearest-neighbour copying finds every sentence in the training text."""
    data = Sentences(evaluation_batch_tokens=1, baselines=True)
    scores = score(tmp_path, small_task(search=Dictated()), data, limit_test_batches=2)
    assert scores["test/bleu_nearest_neighbour"] == pytest.approx(100)
    assert 0 <= scores["test/bleu_word_by_word"] <= 100
    assert json.loads((tmp_path / "translations" / "test.json").read_text())["lines"] == 2


@pytest.mark.parametrize(("limit", "part"), [(2, "2 of 6 lines"), (1.0, "")])
def test_scores_are_shown_as_the_sacrebleu_command_prints_them(tmp_path: Path, limit: float, part: str) -> None:
    """With two digits, the part of the text that they are of, and signatures."""
    task = small_task(search=Dictated())
    text = Sentences({"test": Pairs(["unheard of", *ENGLISH[1:]], list(GERMAN))}, evaluation_batch_tokens=1)
    trainer = small_trainer(tmp_path, limit_test_batches=limit)
    trainer.test(task, datamodule=text, verbose=False)
    console = Console(width=200, file=io.StringIO())
    console.print(results(trainer, trainer.callback_metrics))
    said = console.file.getvalue()
    found = {k: written(tmp_path, "test.txt")[k] for k in task.evaluated["test"].lines}
    peers = {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF(), "chrf++": sacrebleu.CHRF(word_order=2)}
    for name, peer in {**peers, "ter": sacrebleu.TER()}.items():
        score = peer.corpus_score(list(found.values()), [[GERMAN[k] for k in found]])
        assert re.search(rf"test/{re.escape(name)} +{score.score:.2f} +{part}", said)
        assert f"{name} {peer.get_signature()}" in said
    assert ("of 6 lines" in said) == bool(part)


def test_scores_are_those_that_are_chosen(tmp_path: Path) -> None:
    scores = score(tmp_path, small_task(search=Dictated(), scores=["ter", "bleu"], bleu_tokenizer="char"))
    others = {f"test/{name}" for name in ("loss", "nll", "lines", "empty", "truncated")}
    assert scores.keys() - others == {"test/ter", "test/bleu"}
    assert "tok:char" in json.loads((tmp_path / "translations" / "test.json").read_text())["signatures"]["bleu"]
    with pytest.raises(UserError, match=r"tokeniser of BLEU is words; .*13a.* would do"):
        small_task(bleu_tokenizer="words")


def test_batches_without_a_datamodule_are_enough(tmp_path: Path) -> None:
    data = Sentences()
    data.setup("test")
    (scores,) = small_trainer(tmp_path).test(small_task(search=Dictated()), data.test_dataloader(), verbose=False)
    assert scores["test/bleu"] == pytest.approx(100)


def test_the_check_before_training_leaves_no_trace(tmp_path: Path) -> None:
    """Lightning's sanity check sees a batch or two; the first real check is of all lines, and of no line twice."""
    task = small_task(validation_search=Dictated())
    options = {"num_sanity_val_steps": 2, "limit_val_batches": 1.0, "max_epochs": 1}
    trainer = small_trainer(tmp_path, **options)
    trainer.fit(task, datamodule=Sentences(evaluation_batch_tokens=1))
    checks = [row for row in rows(tmp_path) if "val/bleu" in row]
    assert len(checks) == 1
    assert checks[0]["val/bleu"] == pytest.approx(100)
    assert checks[0]["step"] == trainer.num_training_batches - 1


def test_prediction_writes_what_the_test_does(tmp_path: Path) -> None:
    task = small_task(search=Dictated())
    found = small_trainer(tmp_path).predict(task, datamodule=Sentences(evaluation_batch_tokens=40))
    assert written(tmp_path, "predict.txt") == list(GERMAN)
    assert sorted(line for batch in found for line in batch) == sorted(GERMAN)
    assert json.loads((tmp_path / "translations" / "predict.json").read_text())["scores"] == {}


def test_two_processes_score_what_one_does(tmp_path: Path) -> None:
    """Of very uneven quality by line: a mean of two scores would be another number."""
    text = Pairs(["nobody knows this", *ENGLISH[1:3], "nor that", *ENGLISH[4:]], list(GERMAN))
    found = []
    for folder, options in ((tmp_path / "one", {}), (tmp_path / "two", {"devices": 2, "strategy": "ddp_fork"})):
        score(folder, small_task(search=Dictated()), Sentences({"test": text}), **options)
        found.append((written(folder, "test.txt"), json.loads((folder / "translations" / "test.json").read_text())))
    assert found[0] == found[1]
    assert 0 < found[0][1]["scores"]["bleu"] < 100


class Unlike(Sentences):
    """The second process has the lines in another order, and so cuts other batches."""

    def read(self, split: Split) -> Pairs:
        text = super().read(split)
        second = split == "test" and self.trainer is not None and self.trainer.global_rank
        return Pairs(text.source[::-1], text.target[::-1]) if second else text


def test_a_line_of_two_processes_is_refused(tmp_path: Path) -> None:
    data = Unlike(evaluation_batch_tokens=1)
    with pytest.raises(Exception, match=r"line \d of the evaluation text came to two processes and would count twice"):
        score(tmp_path, small_task(search=Dictated()), data, devices=2, strategy="ddp_fork")
    assert not (tmp_path / "translations").exists()


def test_processes_without_a_batch_take_part_in_a_check_during_training(tmp_path: Path) -> None:
    """There is one batch for three, whose weights DDP has wrapped."""
    options = {"limit_val_batches": 1.0, "max_steps": 2, "val_check_interval": 1, "num_sanity_val_steps": 1}
    task = small_task(validation_search=Dictated(), width=16)
    trainer = small_trainer(tmp_path, devices=3, strategy="ddp_fork", **options)
    trainer.fit(task, datamodule=Sentences(evaluation_batch_tokens=10_000, batch_tokens=20))
    checks = [row for row in rows(tmp_path) if "val/bleu" in row]
    assert [row["val/bleu"] for row in checks] == [pytest.approx(100)] * 2
    assert all(row["val/nll"] > 1 for row in checks)
