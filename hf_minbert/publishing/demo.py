"""A page to try a model: one or two sentences, the answer of every task, and the words that influenced it.

This file is copied to a Space with its imports (`publishing.space`), and the model brings its own code. It may import
only published libraries and files that are copied too. Tasks are dicts as in a model's config.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..evaluation.attribution import Attribution, Reading, integrated_gradients, read
from ..model.inference import encode_words, length_of, padded, ragged, read_logits, read_words, tagged
from ..model.kinds import KINDS, above_threshold
from ..model.spans import Span, joined, mark_entities, spans, split, words_of

if TYPE_CHECKING:
    import gradio

    from ..model.modeling_minbert import MinBertForMultiTask  # no part of a Space

FILM = ("A tender film, and very funny too.",)
NAMES = ("Ada Lovelace wrote to Charles Babbage from London.",)
#: Inputs of the package's tasks; none stands in a data set.
EXAMPLES = {
    "sst": FILM,
    "cfimdb": FILM,
    "reviews": ("It broke after a week.",),
    "para": ("How do I learn to swim?", "How deep is the lake where I learned to swim?"),
    "sts": ("A cat is asleep on the sofa.", "A kitten sleeps on a couch."),
    "nli": ("A man plays a guitar on the stairs.", "Somebody makes music."),
}
CSS = """
.html-container {padding: 0 !important}
.mb-cards {display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem;
  align-items: start}
.mb-card {border: 1px solid var(--border-color-primary); border-radius: 10px; padding: 1rem; min-width: 0;
  background: var(--block-background-fill); color: var(--body-text-color)}
.mb-card h2 {font-size: 1.1rem; font-weight: 600; margin: 0 0 .75rem}
.mb-card h2 small, .mb-quiet {font-size: .85rem; font-weight: 400;
  color: color-mix(in srgb, var(--body-text-color) 72%, transparent)}
.mb-unread {color: color-mix(in srgb, var(--body-text-color) 45%, transparent)}
.mb-bar {display: grid; grid-template-columns: minmax(0, 8.5rem) 1fr 3.2rem; gap: .6rem; align-items: center;
  margin: .3rem 0; overflow-wrap: anywhere}
.mb-bar b, .mb-bar span {line-height: 1.2}
.mb-number {text-align: right; font-variant-numeric: tabular-nums}
.mb-track {height: .8rem; border-radius: 4px; background: var(--border-color-primary); overflow: hidden}
.mb-fill {display: block; height: 100%; background: #2b7bba}
.mb-score {font-size: 1.6rem; font-weight: 600; font-variant-numeric: tabular-nums}
.mb-ends {display: flex; justify-content: space-between; margin-top: .2rem}
.mb-text {white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; margin: .6rem 0}
.mb-word {border-radius: 4px; padding: .1em .15em; margin: 0 -.05em}
.mb-note {border-left: 4px solid #d97706; padding: .5rem .8rem; margin: 0 0 1rem; color: var(--body-text-color)}
.mb-words {margin-top: .9rem; border-top: 1px solid var(--border-color-primary); padding-top: .6rem}
#examples td, #examples th {white-space: normal; text-align: left}
.mb-about p {margin: .5rem 0; max-width: 46rem}
"""
BLUE, ORANGE = "43 123 186", "224 123 0"  # told apart by people who are colour-blind
ABOUT = f"""
<div class="mb-about mb-quiet">
<p><b>What the colours say.</b> The method is integrated gradients (Sundararajan et al. 2017). Every word is first
hidden, with a mask token in its place, and then brought back little by little; what changes on the way is shared out
among the words. <span class="mb-word" style="background: rgb({BLUE} / .35)">Blue</span> words moved the model towards
the answer that is shown, <span class="mb-word" style="background: rgb({ORANGE} / .35)">orange</span> ones away from
it. For a score blue raised it and orange lowered it. The numbers are in log-odds of the answer, or in points of the
score, and their sum is what all words change together.</p>
<p><b>What they do not say.</b> They describe the arithmetic of this model, not what the words mean, and are not a
reason as a person would give one. Words that matter only together share their effect by the method's rule. Hiding
words behind something other than a mask token would give other numbers, and colours that look right do not make an
answer right.</p>
</div>
"""
NAMED = 3  # words that are named with their numbers, for and against


@dataclass(frozen=True)
class Answer:
    """The answer of a task to one example.

    Args:
        task: the task, as in the model's config.
        chosen: the class id; for `kind: labels` that of the most likely label; 0 for a score.
        probabilities: one per label; empty for a score.
        score: the score before clipping; `None` if there are classes.
        scale: the lowest and the highest score.
    """

    task: Mapping[str, Any]
    texts: Sequence[str]
    reading: Reading
    chosen: int
    probabilities: Sequence[float]
    score: float | None
    scale: Sequence[float] | None


@dataclass(frozen=True)
class Tagged:
    """The answer of a task with tags to a text.

    Args:
        task: the task, as in the model's config.
        words: the start and end of each word in the text.
        tags: one for each word.
        unread: how many of the last words were not read.
    """

    task: Mapping[str, Any]
    text: str
    words: Sequence[tuple[int, int]]
    tags: Sequence[str]
    unread: int


@torch.no_grad()
def tag(model: MinBertForMultiTask, tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> Tagged:
    """Predicts with a task with tags. The result equals that of `Predictor`, up to rounding."""
    task, words = model.config.get_task(name), words_of(text)
    sentence = joined([text[start:end] for start, end in words])
    rows = encode_words(tokenizer, [sentence], length_of(model.config, name)).read_by(model.config)
    inputs = {key: values.to(model.device) for key, values in padded(rows, tokenizer.pad_token_id or 0).items()}
    (logits,) = rows.by_word(model(**inputs, task=name).logits.float().cpu().numpy())
    decoded = read_words(task["kind"], ragged([logits]))
    assert decoded.probabilities is not None
    said = tagged(task["labels"], split(sentence), decoded.values[0], decoded.probabilities[0])
    return Tagged(task, text, words, said["tags"], int((decoded.values[0] < 0).sum()))


@torch.no_grad()
def answer(model: MinBertForMultiTask, tokenizer: PreTrainedTokenizerBase, name: str, texts: Sequence[str]) -> Answer:
    """Predicts with the task `name`. The result equals that of `Predictor`, up to rounding."""
    task = model.config.get_task(name)
    reading = read(tokenizer, model.config, name, texts, length_of(model.config, name))
    inputs = {key: values.to(model.device) for key, values in reading.inputs.items()}
    logits = model(**inputs, task=name).logits.double().cpu().numpy()
    decoded = read_logits(task["kind"], logits, task["temperature"], task["thresholds"])
    if decoded.probabilities is None:
        scale = model.heads.get(name).output_range or task["range"]
        return Answer(task, texts, reading, 0, (), float(decoded.values[0]), scale)
    chosen = decoded.probabilities[0].argmax() if KINDS[task["kind"]].is_set else decoded.values[0]
    return Answer(task, texts, reading, int(chosen), decoded.probabilities[0].tolist(), None, None)


# ---- HTML


def replies(model: MinBertForMultiTask, tokenizer: PreTrainedTokenizerBase, first: str, second: str) -> Iterator[str]:
    """Yields the results as HTML: the answers first, then again each time the words of one more task are known."""
    first, second = first.strip(), second.strip()
    if not first:
        yield _note("Write a sentence into the first box." if second else "Write a sentence first.")
        return
    answers: dict[str, Answer | Tagged | None] = {}
    for task in model.config.tasks or ():
        texts = (first, second) if takes_pair(task) else (first,)
        if KINDS[task["kind"]].is_tags:
            answers[task["name"]] = tag(model, tokenizer, task["name"], first)
        else:
            answers[task["name"]] = answer(model, tokenizer, task["name"], texts) if texts[-1] else None
    found: dict[str, Attribution] = {}
    yield _results(answers, found, second)
    for name, given in answers.items():
        if isinstance(given, Answer):
            found[name] = integrated_gradients(model, tokenizer, name, given.reading, given.chosen)
            yield _results(answers, found, second)


def examples_of(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the texts of one example input for a task.

    For a task that is not the package's, they are made from its labels.
    """
    pair = takes_pair(task)
    own = NAMES if KINDS[task["kind"]].is_tags else EXAMPLES.get(task["name"], ())
    if len(own) == 1 + pair:
        return own
    labels = [" ".join(label.split()) for label in task["labels"][:3]]
    first = f"Which is it: {', '.join(labels[:-1])} or {labels[-1]}?" if labels else "This is a text."
    return (first, "This is another text.")[: 1 + pair]


def takes_pair(task: Mapping[str, Any]) -> bool:
    return task["pair_encoding"] != "single"


def _results(answers: Mapping[str, Answer | Tagged | None], found: Mapping[str, Attribution], second: str) -> str:
    unread = {
        name: given.unread if isinstance(given, Tagged) else given.reading.unread
        for name, given in answers.items()
        if given is not None
    }
    cut = [name for name, count in unread.items() if count]
    note = ""
    if cut:
        where = escape(", ".join(cut))
        note = _note(f"The text is longer than the model can read. What is grey below was not read ({where}).")
    about = "the first sentence" if second else "the sentence"
    cards = []
    for name, given in answers.items():
        if given is None:
            heading, body = "two sentences", '<p class="mb-quiet">Needs a second sentence.</p>'
        else:
            heading = "both sentences" if takes_pair(given.task) else about
            body = _tags(given) if isinstance(given, Tagged) else _answer(given) + _words(given, found.get(name))
        heading = f"<h2>{escape(name)} <small>about {heading}</small></h2>"
        cards.append(f'<section class="mb-card" data-task="{escape(name)}">{heading}{body}</section>')
    return note + f'<div class="mb-cards">{"".join(cards)}</div>'


def _note(text: str) -> str:
    return f'<p class="mb-note" role="status">{text}</p>'


def _answer(given: Answer) -> str:
    if given.score is not None and given.scale is not None:
        low, high = given.scale
        share = min(max((given.score - low) / (high - low), 0), 1)
        outside = "" if low <= given.score <= high else ", outside its range"
        return (
            f'<div><span class="mb-score">{given.score:.2f}</span> <span class="mb-quiet">on a scale from {low:g} to '
            f"{high:g}{outside}</span></div>{_track(share)}"
            f'<div class="mb-ends mb-quiet"><span>{low:g}</span><span>{high:g}</span></div>'
        )
    bars, said = [], [given.chosen]
    if KINDS[given.task["kind"]].is_set:
        said = np.flatnonzero(above_threshold(np.array(given.probabilities), given.task["thresholds"]))
    for number, (label, share) in enumerate(zip(given.task["labels"], given.probabilities, strict=True)):
        tag = "b" if number in said else "span"
        bars.append(
            f'<div class="mb-bar"><{tag}>{escape(label)}</{tag}>{_track(share)}'
            f'<{tag} class="mb-number">{share:.1%}</{tag}></div>'
        )
    return "".join(bars)


def _tags(given: Tagged) -> str:
    """Returns the text with its entities and their types marked. If tags mark no entities, each word has its tag."""
    by_word = [Span(name, place, place + 1) for place, name in enumerate(given.tags)]
    marked = spans(given.tags) if mark_entities(given.task["labels"]) else by_word
    parts, end = [], 0
    for span in marked:
        start, stop = given.words[span.start][0], given.words[span.end - 1][1]
        parts.append(
            f'{escape(given.text[end:start])}<span class="mb-word" style="background: rgb({BLUE} / .25)">'
            f'{escape(given.text[start:stop])} <small class="mb-quiet">{escape(span.type)}</small></span>'
        )
        end = stop
    nothing = "" if marked else '<p class="mb-quiet">Nothing is marked.</p>'
    return f'<p class="mb-text">{"".join(parts)}{escape(given.text[end:])}</p>{nothing}'


def _track(share: float) -> str:
    return f'<div class="mb-track"><span class="mb-fill" style="width: {100 * share:.2f}%"></span></div>'


def _words(given: Answer, found: Attribution | None) -> str:
    if found is None:
        return '<div class="mb-words mb-quiet">Looking at the words …</div>'
    highest = max((abs(value) for values in found.values for value in values), default=0)
    texts = "".join(
        f'<p class="mb-text">{_coloured(text, words, values, highest)}</p>'
        for text, words, values in zip(given.texts, given.reading.words, found.values, strict=True)
    )
    return f'<div class="mb-words">{texts}<p class="mb-quiet">{_named(given, found)}</p></div>'


def _coloured(text: str, words: Sequence[Any], values: Iterable[float], highest: float) -> str:
    parts, end = [], 0
    for word, value in zip(words, values, strict=True):
        strength = 0.75 * abs(value) / highest if _is_shown(value) else 0.0
        parts.append(
            f"{escape(text[end : word.start])}"
            f'<span class="mb-word" style="background: rgb({BLUE if value > 0 else ORANGE} / {strength:.2f})" '
            f'title="{value:+.3f}">{escape(text[word.start : word.end])}</span>'
        )
        end = word.end
    return "".join(parts) + f'<span class="mb-unread">{escape(text[end:])}</span>'


def _named(given: Answer, found: Attribution) -> str:
    """The strongest words with their numbers, and what all of them change together."""
    named = [
        (float(value), text[word.start : word.end])
        for text, words, values in zip(given.texts, given.reading.words, found.values, strict=True)
        for word, value in zip(words, values, strict=True)
    ]
    if given.score is None:
        sides, unit = ((f"For {escape(given.task['labels'][given.chosen])}", 1), ("Against it", -1)), "log-odds"
        hidden, shown = (f"{share:.1%}" for share in torch.tensor([found.start, found.end]).sigmoid().tolist())
    else:
        sides, unit = (("Raised by", 1), ("Lowered by", -1)), "points"
        hidden, shown = f"{found.start:.2f}", f"{found.end:.2f}"
    said = []
    for side, sign in sides:
        strongest = sorted(
            (item for item in named if item[0] * sign > 0 and _is_shown(item[0])), key=lambda item: -abs(item[0])
        )[:NAMED]
        if strongest:
            said.append(f"{side}: " + ", ".join(f"“{escape(word)}” {_signed(value)}" for value, word in strongest))
    together = f"{_signed(found.end - found.start)} {unit}"
    return "<br>".join([*said, f"All words together: {together}, from {hidden} with every word hidden to {shown}"])


def _is_shown(value: float) -> bool:
    """Whether it is more than nothing in the digits that are shown: a word is coloured and named then alone."""
    return abs(value) >= 0.005


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


# ---- The page


def make_page(model: MinBertForMultiTask, tokenizer: PreTrainedTokenizerBase, title: str) -> gradio.Blocks:
    """Returns the page, for `launch`. `model` is in eval mode."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio as gr

    pairs = any(map(takes_pair, model.config.tasks or ()))

    def reply(first: str, second: str) -> Iterator[str]:
        yield from replies(model, tokenizer, first, second)

    with gr.Blocks(title=f"{title} - try it", analytics_enabled=False) as page:
        gr.HTML(f"<h1>{escape(title)}</h1><p>Its tasks: {escape(', '.join(model.config.task_names))}.</p>")
        first = gr.Textbox(label="Sentence", max_lines=8, autofocus=True)
        second = gr.Textbox(label="Second sentence (for tasks about two)", max_lines=8, visible=pairs)
        button = gr.Button("Answer", variant="primary")
        results = gr.HTML(elem_id="results")
        gr.Examples(_examples(model.config.tasks or ()), [first, second], elem_id="examples")
        gr.HTML(ABOUT)
        gr.on(
            [button.click, first.submit, second.submit],
            reply,
            [first, second],
            results,
            show_progress="hidden",
            trigger_mode="always_last",
        )
    return page


def _examples(tasks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns an example for each task, without repetitions, for the two text boxes."""
    found = dict.fromkeys(map(examples_of, tasks))
    return [[*texts, ""][:2] for texts in found]


def launch(page: gradio.Blocks, **options: Any) -> tuple[Any, str, str]:
    """Serves the page. It loads nothing from other servers. `options` are those of `Blocks.launch`.

    The page is available on this machine only, unless the options or a Space's environment name a host.
    """
    import gradio as gr

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    return page.launch(theme=theme, css=CSS, footer_links=[], share=False, ssr_mode=False, **options)
