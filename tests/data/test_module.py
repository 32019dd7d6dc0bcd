"""From lines to batches: what is dropped, what is kept, and how Lightning takes the loaders."""

from __future__ import annotations

import gzip
import html
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from stabilize.data import Batch, ParallelText, SyntheticCorpus, Tokenizer, TranslationData
from stabilize.data.loader import BatchLoader
from stabilize.data.pairs import Pairs
from stabilize.errors import UserError
from stabilize.tokens import BEGIN, END, PAD
from tests.checkout import ROOT
from tests.tasks import Sentences

ENGLISH = [f"a line with {'many ' * (k % 7)}words {k}" for k in range(60)]
GERMAN = [f"eine Zeile mit {'vielen ' * (k % 5)}Wörtern {k}" for k in range(60)]


def write(folder: Path, name: str, english: list[str], german: list[str]) -> None:
    for language, lines in (("en", english), ("de", german)):
        (folder / f"{name}.{language}").write_bytes("".join(f"{line}\n" for line in lines).encode())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, count in (("train", 60), ("validation", 20), ("test", 9)):
        write(tmp_path, name, ENGLISH[:count], GERMAN[:count])
    return tmp_path


def data(folder: Path, **options: Any) -> ParallelText:
    paths = {name: str(folder / f"{name}.{{lang}}") for name in ("train", "validation", "test")}
    return ParallelText(**({**paths, "vocabulary": 100} | options))


def ready(folder: Path, **options: Any) -> ParallelText:
    module = data(folder, **options)
    module.setup(None)
    return module


def lines(loader: BatchLoader) -> list[int]:
    return [int(line) for batch in loader for line in batch.index]


def test_batches_hold_the_ids(corpus: Path) -> None:
    module = ready(corpus)
    for batch in module.train_dataloader():
        assert batch.source.dtype == batch.target.dtype == batch.index.dtype == torch.int64
        assert (batch.source_text, batch.references) == ((), ())
        for source, target, line in zip(*(rows.tolist() for rows in batch[:3]), strict=True):
            ids = [*module.tokenizer.encode(ENGLISH[line]), END]
            assert source == ids + [PAD] * (batch.source.size(1) - len(ids))
            ids = [BEGIN, *module.tokenizer.encode(GERMAN[line]), END]
            assert target == ids + [PAD] * (batch.target.size(1) - len(ids))
        assert (batch.source[:, -1] != PAD).any()
        assert (batch.target[:, -1] != PAD).any()
    assert sorted(lines(module.train_dataloader())) == list(range(60))


def test_the_entropy_of_words_is_what_their_frequencies_cost(corpus: Path) -> None:
    module = data(corpus)
    assert module.word_entropy is None
    module.setup("fit")
    counts = Counter(token for line in GERMAN for token in [*module.tokenizer.encode(line), END])
    costs = [-count * math.log(count / counts.total()) for count in counts.values()]
    assert module.word_entropy == pytest.approx(sum(costs) / counts.total())


def test_evaluation_carries_the_text(corpus: Path) -> None:
    module = ready(corpus, validation_pairs=7)
    assert sorted(lines(module.val_dataloader())) == list(range(7))
    assert sorted(lines(module.test_dataloader())) == sorted(lines(module.predict_dataloader())) == list(range(9))
    for batch in module.test_dataloader():
        assert batch.source_text == tuple(ENGLISH[line] for line in batch.index)
        assert batch.references == tuple((GERMAN[line],) for line in batch.index)


def test_a_text_may_have_several_references() -> None:
    """The first is the one that is learnt and whose tokens are scored; a part of the text has its part of all."""
    text = Pairs(list(ENGLISH), list(GERMAN), (GERMAN[::-1], ["x"] * len(GERMAN))).first(5)
    module = Sentences({"test": text})
    module.setup("test")
    (batch,) = module.test_dataloader()
    assert sorted(batch.index.tolist()) == list(range(5))
    for line, references, target in zip(batch.index.tolist(), batch.references, batch.target.tolist(), strict=True):
        assert references == (GERMAN[line], GERMAN[::-1][line], "x")
        ids = [BEGIN, *module.tokenizer.encode(GERMAN[line]), END]
        assert target == ids + [PAD] * (len(target) - len(ids))


def test_blank_pairs_are_dropped_together_and_counted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    english, german = ENGLISH.copy(), GERMAN.copy()
    english[3], english[5], german[5], german[8] = "", " \t", "", "\u3000"
    write(corpus, "train", english, german)
    module = ready(corpus)
    assert module.account["train"]["rules"]["blank"] == {"pairs": 3, "first_line": 4, "done": "dropped"}
    assert sorted(lines(module.train_dataloader())) == [k for k in range(60) if k not in (3, 5, 8)]
    said = capsys.readouterr().out
    assert "train 57," in said
    assert re.search(r"blank +3 \(4\) +dropped", said)


@pytest.mark.parametrize("unescape", [False, True])
def test_references_that_were_training_text_are_written_as_the_model_writes(corpus: Path, unescape: bool) -> None:
    """With entities as characters, where it has learnt these; a text of its own is scored as it stands."""
    raw, read = "das ist &apos;s &amp;quot;", "das ist 's &quot;"
    write(corpus, "train", ENGLISH, [*GERMAN[:-4], *[raw] * 4])
    write(corpus, "test", ENGLISH[:4], [raw] * 4)
    module = ready(corpus, validation=None, validation_pairs=2, unescape=unescape)
    for loader, expected in ((module.val_dataloader(), read if unescape else raw), (module.test_dataloader(), raw)):
        (batch,) = loader
        assert {*batch.references} == {(expected,)}
    (held_out,) = module.val_dataloader()
    echo = {module.tokenizer.decode(ids) for ids in held_out.target.tolist()}
    assert echo == {read if unescape else raw}, "a model that knows them all scores 100"


def test_evaluation_keeps_blank_lines(corpus: Path) -> None:
    write(corpus, "test", ["", "a line", "", "a line", ""], ["", "eine Zeile", "", "", "eine Zeile"])
    (batch,) = ready(corpus).test_dataloader()
    assert sorted(batch.index.tolist()) == [0, 1, 2, 3, 4]
    row = batch.index.tolist().index(0)
    assert batch.source[row].tolist() == [END] + [PAD] * (batch.source.size(1) - 1)
    assert batch.target[row, :2].tolist() == [BEGIN, END]
    assert batch.source_text[row] == ""


def test_the_limit_counts_the_end_token(corpus: Path) -> None:
    tokenizer = ready(corpus).tokenizer
    longest = max(len(tokenizer.encode(line)) + 1 for line in ENGLISH + GERMAN)
    for limit, dropped in ((longest, False), (longest - 1, True)):
        module = ready(corpus, maximum_length=limit)
        kept = [k for k in range(60) if max(len(tokenizer.encode(side[k])) for side in (ENGLISH, GERMAN)) + 1 <= limit]
        assert (len(kept) < 60) == dropped == ("too_long" in module.account["train"]["rules"])
        assert sorted(lines(module.train_dataloader())) == kept
        assert module.account["train"]["pairs"] == len(kept)
        assert sorted(lines(module.test_dataloader())) == list(range(9)), "evaluation drops nothing"


def test_a_line_of_a_million_characters_is_read_to_the_limit(corpus: Path) -> None:
    """It would be decoded for hours; its place, text and reference stay what they are."""
    endless = "many words " * 90_000
    write(corpus, "test", ["a line", endless, "a line", "a line"], ["eine Zeile", "eine Zeile", endless, "eine Zeile"])
    module = ready(corpus, evaluation_maximum_length=30)
    assert module.account["test"]["rules"]["cut"] == {
        "pairs": 2,
        "first_line": 2,
        "done": "cut",
    }
    assert "cut" not in module.account["validation"]["rules"]
    assert module.longest_line == max(30, *(len(row) for batch in module.train_dataloader() for row in batch.source))
    (batch,) = module.test_dataloader()
    rows = dict(zip(batch.index.tolist(), range(4), strict=True))
    read = batch.source[rows[1]].tolist()
    assert read == [*module.tokenizer.encode("many words " * 30)[:29], END]
    assert (batch.source_text[rows[1]], batch.references[rows[2]]) == (endless, (endless,))
    assert batch.target[rows[2]].tolist() == [BEGIN, *read]
    assert module.tokenizer.decode(batch.source[rows[3]].tolist()) == "a line"


def test_a_line_above_the_budget_is_a_batch(corpus: Path) -> None:
    module = ready(corpus, batch_tokens=3, evaluation_batch_tokens=3)
    assert [len(batch.index) for batch in module.test_dataloader()] == [1] * 9
    assert sorted(lines(module.train_dataloader())) == list(range(60))


def test_nothing_left_to_train_on(corpus: Path) -> None:
    with pytest.raises(UserError, match="no training pair is left of 60: 60 too_long"):
        ready(corpus, maximum_length=1)


def test_all_ways_of_writing_a_file_give_the_same_ids(corpus: Path) -> None:
    plain = ready(corpus)
    ids = [batch.source.tolist() for batch in plain.train_dataloader()]
    for language in ("en", "de"):
        path = corpus / f"train.{language}"
        raw = path.read_bytes()
        half = raw.index(b"\n", len(raw) // 2) + 1
        for name, other in {
            "zip": gzip.compress(raw),
            "members": gzip.compress(raw[:half]) + gzip.compress(raw[half:]),
            "mark": b"\xef\xbb\xbf" + raw,
            "windows": raw.replace(b"\n", b"\r\n"),
        }.items():
            (corpus / f"{name}.{language}").write_bytes(other)
    for name in ("zip", "members", "mark", "windows"):
        module = ready(corpus, train=str(corpus / f"{name}.{{lang}}"))
        assert module.tokenizer.hash == plain.tokenizer.hash
        assert [batch.source.tolist() for batch in module.train_dataloader()] == ids


def test_faults_show_before_training(corpus: Path) -> None:
    write(corpus, "test", ENGLISH[:9], GERMAN[:8])
    with pytest.raises(UserError, match=r"test\.en has 9 lines but .*test\.de has 8"):
        data(corpus).setup("fit")


def test_without_test_text(corpus: Path) -> None:
    module = ready(corpus, test=None)
    with pytest.raises(UserError, match="gives no test text"):
        module.test_dataloader()


@pytest.mark.parametrize("name", ["vocabulary", "batch_tokens", "evaluation_batch_tokens", "maximum_length"])
def test_numbers_that_cannot_be(name: str, corpus: Path) -> None:
    with pytest.raises(UserError, match=rf"data\.{name} is 0; 1 is the least"):
        data(corpus, **{name: 0})


def test_a_given_tokenizer_is_used(corpus: Path) -> None:
    given = Tokenizer.train(ENGLISH, vocabulary=40)
    module = data(corpus)
    module.given_tokenizer = given
    (corpus / "train.en").unlink()
    module.setup("test")
    assert module.tokenizer is given
    assert sorted(lines(module.test_dataloader())) == list(range(9)), "the training text is not needed"


def test_setup_twice_is_setup_once(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = ready(corpus)
    tokenizer = module.tokenizer
    module.setup("fit")
    module.setup("test")
    assert module.tokenizer is tokenizer
    assert capsys.readouterr().out.count("pairs:") == 1


def test_baselines_on_request() -> None:
    options = {"train_pairs": 200, "validation_pairs": 5, "test_pairs": 7, "vocabulary": 150}
    assert SyntheticCorpus(**options).baseline_translations() == {}
    translations = SyntheticCorpus(**options, baselines=True).baseline_translations()
    assert set(translations) == {"word_by_word", "nearest_neighbour"}
    assert {len(hypotheses) for hypotheses in translations.values()} == {7}


def test_workers_give_the_same_batches(corpus: Path) -> None:
    alone, helped = ready(corpus, batch_tokens=100), ready(corpus, batch_tokens=100, workers=2)
    state = torch.random.get_rng_state()
    pairs = list(zip(alone.train_dataloader(), helped.train_dataloader(), strict=True))
    assert len(pairs) > 5
    assert all(torch.equal(a.target, b.target) for a, b in pairs)
    assert torch.equal(torch.random.get_rng_state(), state), "the order of data draws nothing from the model's numbers"


def test_a_pass_that_was_left_early_starts_again(corpus: Path) -> None:
    loader = ready(corpus, batch_tokens=100).train_dataloader()
    first = next(iter(loader)).index.tolist()
    assert next(iter(loader)).index.tolist() == first
    assert lines(loader) == lines(loader)


def test_the_place_counts_batches_handed_out(corpus: Path) -> None:
    module = ready(corpus, batch_tokens=100, workers=2)
    loader = module.train_dataloader()
    whole = [batch.index.tolist() for batch in loader]
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    assert state["position"] == 3
    resumed = module.train_dataloader()
    resumed.load_state_dict(state)
    assert [batch.index.tolist() for batch in resumed] == whole[3:]
    assert [batch.index.tolist() for batch in resumed] == whole


class Recorder(LightningModule):
    """Notes which lines it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.index.tolist()))
        return self.weight.sum()

    def validation_step(self, batch: Batch, index: int) -> None:
        assert isinstance(batch.source_text, tuple)
        self.validated += batch.index.tolist()

    def predict_step(self, batch: Batch, index: int) -> list[int]:
        return batch.index.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=folder, **({**quiet, "enable_checkpointing": False} | options))


def record(folder: Path, module: TranslationData, ckpt_path: str | None = None, **options: Any) -> Recorder:
    recorder = Recorder()
    trainer(folder, **options).fit(recorder, datamodule=module, ckpt_path=ckpt_path)
    return recorder


def test_lightning_shuffles_each_epoch_anew(corpus: Path, tmp_path: Path) -> None:
    recorder = record(tmp_path / "run", data(corpus, batch_tokens=100), max_epochs=3)
    epochs = [[line for epoch, batch in recorder.seen if epoch == e for line in batch] for e in range(3)]
    assert all(sorted(epoch) == list(range(60)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert sorted(recorder.validated[-20:]) == list(range(20))
    saved = Tokenizer.load(tmp_path / "run" / "tokenizer.model")
    assert saved.encode(ENGLISH[0])


@pytest.mark.parametrize("stop", [1, 4, "epoch", "epoch + 1"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_sees_the_rest_of_the_data(corpus: Path, tmp_path: Path, stop: int | str, workers: int) -> None:
    def module() -> ParallelText:
        return data(corpus, batch_tokens=100, workers=workers)

    per_epoch = len(ready(corpus, batch_tokens=100).train_dataloader())
    steps = {"epoch": per_epoch, "epoch + 1": per_epoch + 1}.get(stop, stop)
    whole = record(tmp_path, module(), max_steps=2 * per_epoch + 2)
    keep = ModelCheckpoint(tmp_path, filename="stopped", every_n_train_steps=steps)
    options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True}
    first = record(tmp_path, module(), max_steps=steps, **options)
    rest = record(tmp_path, module(), max_steps=2 * per_epoch + 2, ckpt_path=keep.best_model_path, **options)
    assert first.seen + rest.seen == whole.seen


def test_each_validation_starts_at_the_first_line(corpus: Path, tmp_path: Path) -> None:
    module = data(corpus, batch_tokens=100, evaluation_batch_tokens=40)
    recorder = record(tmp_path, module, max_steps=4, val_check_interval=2, limit_val_batches=2)
    count = len(recorder.validated) // 3
    sanity, first, second = (recorder.validated[k * count : (k + 1) * count] for k in range(3))
    assert sanity == first == second
    assert 0 < count < 20


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_repeats_the_same_batches(corpus: Path, tmp_path: Path) -> None:
    recorder = record(tmp_path, data(corpus, batch_tokens=100), max_epochs=2, overfit_batches=2)
    assert [batch for _, batch in recorder.seen[:2]] == [batch for _, batch in recorder.seen[2:]]


def test_lightning_predicts_the_test_lines(corpus: Path, tmp_path: Path) -> None:
    module = data(corpus, evaluation_batch_tokens=40)
    predicted = trainer(tmp_path).predict(Recorder(), datamodule=module)
    assert predicted is not None
    assert sorted(line for batch in predicted for line in batch) == list(range(9))


def test_real_text(shared_data: Path) -> None:
    folder = shared_data / "multi30k"
    module = ParallelText(
        train=str(folder / "train.{lang}.gz"),
        validation=str(folder / "val.{lang}.gz"),
        test=str(folder / "test_2016_flickr.{lang}.gz"),
        vocabulary=2000,
    )
    module.setup("fit")
    pairs = [module.account[split]["pairs"] for split in ("train", "validation", "test")]
    assert pairs == [29_000, 1_014, 1_000]
    assert module.tokenizer.vocabulary == 2000
    text = Pairs.of(module.read("test")).target
    assert all(module.tokenizer.decode(module.tokenizer.encode(line)) == line for line in text)
    targets = [batch.target[:, 1:] for batch in module.train_dataloader()]
    assert sum(int((target == PAD).sum()) for target in targets) < 0.02 * sum(target.numel() for target in targets)


def test_real_dirt(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of WMT that Moses has tokenised, without a validation set; what was counted by hand is what is told."""
    given = yaml.safe_load((ROOT / "configs" / "experiments" / "wmt_subset.yaml").read_text())["data"]["init_args"]
    (tmp_path / "shared").symlink_to(shared_data.parent)
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    module = ParallelText(**given)
    module.setup("fit")
    sides = [
        gzip.decompress((shared_data / "wmt" / f"wmt-mix-10k.train.{language}.gz").read_bytes()).decode().split("\n")
        for language in ("en", "de")
    ]
    pairs = list(zip(*sides, strict=True))[:9500]
    rules = module.account["train"]["rules"]
    assert rules["escaped_entity"]["pairs"] == sum(html.unescape(a + b) != a + b for a, b in pairs)
    assert rules["blank"]["pairs"] == sum(not (a.strip() and b.strip()) for a, b in pairs)
    assert rules["copied"]["pairs"] == sum(a == b for a, b in pairs)
    dropped = sum(met["pairs"] for met in rules.values() if met["done"] == "dropped")
    assert module.account["train"]["pairs"] == 9500 - dropped
    assert module.account["validation"]["pairs"] == 500
    assert module.account["test"]["pairs"] == 2037
    (longest, *_) = module.val_dataloader()
    for line, text in zip(longest.index.tolist(), longest.source_text, strict=True):
        assert text == sides[0][9500 + line]
    assert "&apos;" not in "".join(map(module.tokenizer.decode, next(iter(module.train_dataloader())).source.tolist()))
