"""The page: one section after the other, each a function of the runs."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stabilize.card import Answer
from stabilize.findings import LAYER, Finding, number
from stabilize.report.markup import Markup, join, tag
from stabilize.report.run_folder import Point, Run
from stabilize.report.style import style
from stabilize.report.svg import Colouring, Line, around_one, chart, colour, from_lowest, heat_map
from stabilize.strategies import AXES, Stabilizer

STACKS = ("encoder", "decoder")

CURVES: dict[str, tuple[str, bool, float | None]] = {
    "train/nll": ("nll a token: training (line), validation (circles)", False, None),
    "val/bleu": ("BLEU on the validation text", False, None),
    "gradient_ratio/decoder/first_to_last": ("decoder: gradient of layer 1 over the last layer's", True, 1.0),
    "gradient_ratio/encoder/first_to_last": ("encoder: gradient of layer 1 over the last layer's", True, 1.0),
    "gradient_norm/total": ("gradient norm, before clipping", True, None),
    "lr": ("learning rate", False, None),
    "layer_similarity_centered/decoder/mean": ("decoder: similarity of neighbouring layers, centred", False, None),
    "layer_similarity_centered/encoder/mean": ("encoder: similarity of neighbouring layers, centred", False, None),
    "train/loss": ("training loss", False, None),
}
"""What is drawn first: key -> title, whether the axis is logarithmic, a value to compare with."""

BESIDE = {"train/nll": "val/nll"}
"""What is drawn as circles in the same picture."""

MAPS = {
    "gradient_ratio": "gradient of each layer over the last layer's",
    "layer_similarity_centered": "similarity of each layer's output with the next one's, centred",
}
"""What is drawn by layer first."""

NAMED = 3
"""Settings that the name of a run tells, at most."""

USUAL = {(axis, type(part).__name__) for axis, part in Stabilizer().axes.items() if axis != "placement"}
"""What goes without saying in the name of a run."""

OPENED = "similarity_matrix_centered"
"""The pictures of the run folder that are seen at once."""


def page(runs: Sequence[Run]) -> str:
    """The whole page, one string without any reference to elsewhere."""
    names = labels(runs)
    updates = max((run.updates for run in runs), default=0)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs side by side"
    return document(
        title,
        tag("p", " · ".join(dict.fromkeys(_sizes(run) for run in runs)), class_="dim"),
        join(
            _headline(runs, names),
            _comparable(runs),
            _legend(names) if len(runs) > 1 else "",
            tag("main", *(section(runs, names, updates) for section in SECTIONS)),
        ),
        "Written by stabilize report from the run folder alone. The axis is the number of updates.",
    )


def document(title: str, about: Markup, content: Markup, footer: str) -> str:
    """A page in the style of the report, which asks for nothing from elsewhere."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        ),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} · stabilize"),
        tag("style", Markup(style())),
    )
    body = tag("body", tag("h1", title), about, content, tag("footer", footer))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its placement, and what else it differs in from the others."""
    settings = [run.settings for run in runs]
    keys = dict.fromkeys(itertools.chain.from_iterable(settings))
    differing = [key for key in keys if len({one.get(key, "") for one in settings}) > 1]
    told = differing[:NAMED] if len(runs) > 1 else ["placement", "residual"]
    names = []
    for run, one in zip(runs, settings, strict=True):
        words = [_word(key, one[key]) for key in told if one.get(key) and (key, one[key]) not in USUAL]
        names.append(", ".join(words) or one.get("placement") or run.name)
    twice = {name for name in names if names.count(name) > 1}
    return [f"{name} ({run.name})" if name in twice else name for run, name in zip(runs, names, strict=True)]


def _word(key: str, value: str) -> str:
    if key in AXES:
        return value
    stack, _, axis = key.partition(" ")
    return f"{stack} {value}" if axis in AXES else f"{key.removesuffix(' with')} {value}"


def _sizes(run: Run) -> str:
    if run.card is not None:
        return run.card.title
    known = ("encoder layers", "decoder layers", "width", "precision")
    encoder, decoder, width, precision = (run.settings.get(name, "?") for name in known)
    return f"{encoder}+{decoder} layers, width {width}, precision {precision}"


# ---------------------------------------------------------------------- the table at the top


def _headline(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    columns: dict[str, Callable[[Run], Markup]] = {
        "verdict": _verdict,
        "validation nll": _validation,
        "BLEU": _bleu,
        "gradient of layer 1 over last": lambda run: _by_stack(run, "gradient_ratio/{}/first_to_last"),
        "similarity, centred": lambda run: _by_stack(run, "layer_similarity_centered/{}/mean"),
        "worst ratio": _worst,
        "strategy": lambda run: _strategy(run, runs),
    }
    rows = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        cells = [tag("td", tag("div", cell(run)), data_name=column) for column, cell in columns.items()]
        rows.append(tag("tr", tag("th", _swatch(place), name, scope="row"), *cells))
    head = tag("tr", *(tag("th", column, scope="col") for column in ("run", *columns)))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="runs")


def _verdict(run: Run) -> Markup:
    verdict = run.diary.verdict
    kind = "good" if verdict == "healthy" else "" if verdict in ("no numbers", "no fault seen") else "bad"
    return join(
        tag("span", verdict, class_=f"verdict {kind}"),
        tag("small", _progress(run)),
    )


def _progress(run: Run) -> str:
    """How far it got, of how far it was to get."""
    if run.cut_short is not None:
        return f"{run.updates:,} of {run.cut_short:,} updates"
    return f"{run.updates:,} update{'s' * (run.updates != 1)}"


def _validation(run: Run) -> Markup:
    last, best = run.last("val/nll"), run.diary.best.get("val/nll")
    if last is None:
        return tag("span", "none", class_="dim")
    aside = f"best {number(best[0])}, update {best[1]:,}" if best is not None and best[0] < last else ""
    return join(number(last), tag("small", aside) if aside else "")


def _bleu(run: Run) -> Markup:
    """The test score if there is one, else the best on the validation text; with the signature."""
    test, best = run.last("test/bleu"), run.diary.best.get("val/bleu")
    signature = run.signature or "signature not in the folder"
    if test is not None:
        return join(score(test), tag("small", f"test{run.tested_part}"), tag("small", signature))
    if best is not None:
        return join(score(best[0]), tag("small", f"validation, update {best[1]:,}"), tag("small", signature))
    return tag("span", "none", class_="dim")


def score(value: float) -> str:
    """BLEU as it is written."""
    return f"{value:.1f}" if math.isfinite(value) else number(value)


def _by_stack(run: Run, key: str) -> Markup:
    found = {stack: run.last(key.format(stack)) for stack in STACKS}
    shown = [f"{stack} {number(value)}" for stack, value in found.items() if value is not None]
    return join(*(tag("div", words) for words in shown)) if shown else tag("span", "not measured", class_="dim")


def _worst(run: Run) -> Markup:
    if run.diary.worst is None:
        return tag("span", "not measured", class_="dim")
    value, where = run.diary.worst
    return join(number(value), tag("small", where))


def _strategy(run: Run, runs: Sequence[Run]) -> Markup:
    """The strategies in one line; what not all runs share stands out."""
    chosen = {key: name for key, name in run.settings.items() if key.split()[-1] in AXES}
    if not chosen:
        return tag("span", "unknown", class_="dim")
    parts: list[str] = []
    for key, name in chosen.items():
        differs = any(other.settings.get(key) != name for other in runs)
        words = f"decoder: {name}" if key.startswith("decoder ") else name
        parts += [" · ", tag("b", words) if differs else words]
    return tag("small", *parts[1:])


def _comparable(runs: Sequence[Run]) -> Markup:
    """A caution where numbers of different text stand side by side."""
    texts = {repr(sorted(_text_settings(run.config).items(), key=str)) for run in runs if run.config}
    if len(texts) < 2:
        return Markup()
    words = "These runs read different text or another vocabulary: their nll and BLEU cannot be compared."
    return tag("p", words, class_="worth")


def _text_settings(config: dict[str, Any]) -> dict[str, Any]:
    data = config.get("data")
    data = data if isinstance(data, dict) else {}
    options = data.get("init_args")
    left_out = ("batch_tokens", "evaluation_batch_tokens", "seed", "workers", "baselines")
    kept = {key: value for key, value in (options if isinstance(options, dict) else {}).items() if key not in left_out}
    return {"class": data.get("class_path"), **kept}


def _legend(names: Sequence[str]) -> Markup:
    runs = [tag("span", _swatch(place), name) for place, name in enumerate(names)]
    return tag("nav", *runs, class_="legend", aria_label="colours of the runs")


def _swatch(place: int) -> Markup:
    return tag("span", class_=f"swatch {colour(place)}", aria_hidden="true")


# ---------------------------------------------------------------------- sections


def _in_words(runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    parts = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        told = [_finding(finding) for finding in run.diary.all]
        if not told:
            fine = "Nothing of note in what was measured." if run.updates else "There are no numbers to speak of."
            told = [tag("li", fine)]
        warnings = [
            _item("note", "warned at the start", warning, "") for warning in (run.card.warnings if run.card else [])
        ]
        missing = [_item("", "", sentence, "") for sentence in run.missing]
        parts += [
            tag("h3", _swatch(place), name) if len(runs) > 1 else Markup(),
            tag("ul", *told, *warnings, *missing, class_="findings"),
        ]
    return tag("section", tag("h2", "In words"), *parts)


def _finding(finding: Finding) -> Markup:
    kind = "" if finding.passed else "grave" if finding.grave else "note"
    return _item(kind, finding.when, finding.sentence, finding.remedy)


def _item(kind: str, when: str, sentence: str, remedy: str) -> Markup:
    aside = [tag("small", f"{remedy[:1].upper()}{remedy[1:]}.")] if remedy else []
    since = tag("span", f"{when}: ", class_="dim") if when else ""
    return tag("li", since, tag("b", sentence) if kind == "grave" else sentence, *aside, class_=kind or None)


def _curves(runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    keys = {key for run in runs for key in run.curves if not LAYER.fullmatch(key)}
    first = [_curve(key, *CURVES[key], runs, names, updates) for key in CURVES if key in keys]
    rest = sorted(keys - set(CURVES) - set(BESIDE.values()) - {key for key in keys if key.startswith("test/")})
    more = [_curve(key, key, _spreads(key, runs), None, runs, names, updates) for key in rest]
    if not first and not more:
        return tag("section", tag("h2", "Curves"), tag("p", "No numbers were logged.", class_="dim"))
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("div", *first, class_="grid"),
        tag("details", tag("summary", f"{len(more)} more curves"), tag("div", *more, class_="grid")) if more else "",
    )


def _curve(
    key: str,
    title: str,
    logarithmic: bool,
    mark: float | None,
    runs: Sequence[Run],
    names: Sequence[str],
    updates: int,
) -> Markup:
    lines = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        lines += [Line(name, place, run.curves[key])] if key in run.curves else []
        beside = BESIDE.get(key, "")
        lines += [Line(f"{name}, {beside}", place, run.curves[beside], dots=True)] if beside in run.curves else []
    absent = [name for run, name in zip(runs, names, strict=True) if run.records and key not in run.curves]
    caption = tag("figcaption", title, tag("small", f"not there: {'; '.join(absent)}") if absent else "")
    return tag("figure", caption, chart(lines, title, updates, logarithmic, mark))


def _spreads(key: str, runs: Sequence[Run]) -> bool:
    """Whether a metric that nobody knows is best seen on a logarithmic axis."""
    values = [value for run in runs for _, value in run.curves.get(key, ()) if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


def _layers(runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    """Heat maps, one kind after the other, runs side by side."""
    kinds: dict[str, dict[str, None]] = {}
    for run in runs:
        for key in run.curves:
            if (found := LAYER.fullmatch(key)) is not None:
                kinds.setdefault(found[1], {})[found[2]] = None
    if not kinds:
        words = "Nothing was recorded by layer."
        return tag("section", tag("h2", "Layer by layer"), tag("p", words, class_="dim"))
    shown = [_maps(kind, MAPS[kind], list(kinds[kind]), runs, names, updates) for kind in MAPS if kind in kinds]
    more = [
        _maps(kind, kind.replace("_", " "), list(kinds[kind]), runs, names, updates)
        for kind in kinds
        if kind not in MAPS
    ]
    rest = tag("details", tag("summary", f"{len(more)} more by layer"), *more) if more else ""
    return tag("section", tag("h2", "Layer by layer"), *shown, rest)


def _maps(kind: str, title: str, stacks: list[str], runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    rows = [{stack: _rows(run, kind, stack) for stack in stacks} for run in runs]
    colours = _colours(
        kind, (value for run in rows for stack in run.values() for row in stack.values() for _, value in row)
    )
    figures = []
    for stack in stacks:
        for place, (run, name) in enumerate(zip(rows, names, strict=True)):
            picture = (
                heat_map(run[stack], f"{name}, {stack}: {title}", updates, colours)
                if run[stack]
                else tag("p", "not recorded", class_="dim")
            )
            figures.append(tag("figure", _caption(runs, place, name, stack), picture))
    return join(tag("h3", f"{title[:1].upper()}{title[1:]}"), colours.legend, tag("div", *figures, class_=_grid(runs)))


def _grid(runs: Sequence[Run]) -> str:
    """The classes of pictures side by side: smaller where there is one a run."""
    return "small grid" if len(runs) > 1 else "grid"


def _rows(run: Run, kind: str, stack: str) -> dict[int, list[Point]]:
    """The points of each layer."""
    found = {}
    for key, points in run.curves.items():
        match = LAYER.fullmatch(key)
        if match is not None and match[1] == kind and match[2] == stack:
            found[int(match[3])] = points
    return found


def _colours(kind: str, values: Iterable[float]) -> Colouring:
    if kind.startswith(("gradient_ratio", "activation_gradient_ratio")):
        return around_one(values)
    return from_lowest(values, high=1.0 if "similarity" in kind else None)


def _pictures(runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    """The pictures in the run folder that the numbers in metrics.csv do not give, such as similarity matrices."""
    kinds: dict[str, list[Markup]] = {}
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        for file, picture in run.figures.items():
            kind, _, stack = file.rpartition("_")
            if not _rows(run, kind, stack):
                source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
                image = tag("img", src=source, alt=f"{file.replace('_', ' ')} of {name}, the last that was drawn")
                kinds.setdefault(kind or file, []).append(tag("figure", _caption(runs, place, name, stack), image))
    if not kinds:
        return tag("section", tag("h2", "Pictures"), tag("p", "The run folders have none.", class_="dim"))
    parts = []
    for kind, figures in sorted(kinds.items(), reverse=True):
        grid = tag("div", *figures, class_=_grid(runs))
        parts.append(tag("details", tag("summary", kind.replace("_", " ")), grid, open=kind == OPENED))
    words = "The last that were drawn, when training ended or some records before it was killed; each has its scale."
    return tag("section", tag("h2", "Pictures"), tag("p", words, class_="dim"), *parts)


def _caption(runs: Sequence[Run], place: int, name: str, what: str) -> Markup:
    """What a picture is of; the run's name and colour only where there are several."""
    if len(runs) == 1:
        return tag("figcaption", what)
    return tag("figcaption", _swatch(place), f"{name}, {what}")


def _translations(runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    """Sentence by sentence, all runs that translated it below each other."""
    sentences: dict[tuple[str, str, int], list[Markup]] = {}
    origins: dict[str, None] = {}
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        if run.samples:
            origins[run.samples_of] = None
        for line, sample in enumerate(run.samples):
            # Without a source, only the number of the line says what is translated.
            at = (sample.source, sample.reference, -1 if sample.source or sample.reference else line)
            words = sample.translation or "(nothing)"
            of = tag("dt", _swatch(place), name) if len(runs) > 1 else tag("dt", "translation")
            sentences.setdefault(at, []).append(join(of, tag("dd", words)))
    if not sentences:
        return tag("section", tag("h2", "Translations"), tag("p", "There are none.", class_="dim"))
    blocks = []
    for (source, reference, _), translations in sentences.items():
        known = [
            join(tag("dt", what), tag("dd", text))
            for what, text in (("source", source), ("reference", reference))
            if text
        ]
        blocks.append(tag("dl", *known, *translations, class_="sample"))
    origin = f"Of the {' and the '.join(origins)}."
    return tag("section", tag("h2", "Translations"), tag("p", origin, class_="dim"), tag("div", *blocks, class_="grid"))


def _cards(runs: Sequence[Run], names: Sequence[str], updates: int) -> Markup:
    parts = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        if run.card is None:
            content = tag("p", "The card cannot be made again; see above.", class_="dim")
        else:
            content = join(*(_stack(stack, answers) for stack, answers in run.card.stacks.items()))
        config = tag("details", tag("summary", "config.yaml"), tag("pre", run.config_text)) if run.config_text else ""
        title = tag("summary", _swatch(place) if len(runs) > 1 else "", f"{name}: {_sizes(run)}")
        where = tag("p", "run ", tag("code", run.name), class_="dim")
        parts.append(tag("details", title, where, content, config, open=len(runs) == 1))
    return tag("section", tag("h2", "Strategies"), *parts)


def _stack(stack: str, answers: Sequence[Answer]) -> Markup:
    rows = []
    for answer in answers:
        also = f"Also: {answer.also}" if answer.also else ""
        equation = tag("code", answer.equation) if answer.equation else ""
        lines = [tag("small", line) for line in (answer.options, answer.constants, also, answer.paper) if line]
        rows.append(join(tag("dt", answer.axis), tag("dd", tag("b", answer.name), " ", equation, *lines)))
    return join(tag("h3", stack) if stack else Markup(), tag("dl", *rows, class_="card"))


SECTIONS = (_in_words, _curves, _layers, _pictures, _translations, _cards)
