"""Cards of notebooks: an answer, a list of answers, the probability of each token, facts.

Colours are those of the notebook, with transparency: they suit light and dark themes. Everything
that a model or a checkpoint wrote is escaped, or comes through `markdown.html_of`.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..core import SamplingParams
from ..errors import clipped
from ..memory import human_bytes
from .markdown import html_of

CARD = (
    "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px;max-width:52em;"
    "overflow-x:auto;line-height:1.5"
)
DIM = "opacity:.65;font-size:90%"
PLAIN = "white-space:pre-wrap;max-width:40em;text-align:left"
CELL = "text-align:left;vertical-align:top;padding:3px 12px 3px 0"
PICTURE_SIDE = 240  # pixels
PICTURE = f"max-width:{PICTURE_SIDE}px;border-radius:6px;margin:0 8px 8px 0;vertical-align:top"
SHOWN_ROWS = 20  # of a table; the rest is counted
SHOWN_CHARS = 300  # of a text in a table


def answer_card(
    text: str,
    *,
    reasoning: str | None = None,
    calls: Iterable[tuple[str, str]] = (),
    foot: str = "…",
    running: bool = False,
    thumbnails: Sequence[str] = (),
) -> str:
    """An answer: its reasoning folded away, its Markdown, its tool calls, counts and rate.

    Args:
        reasoning: Markdown; in sight as long as there is no text.
        calls: (tool, arguments).
        running: more of it follows.
        thumbnails: data: URLs of small pictures, which stand above it.
    """
    thought = ""
    if reasoning:
        thought = (
            f"<details style='{DIM}'{' open' if running and not text else ''}>"
            f"<summary>{'thinking' if running else 'thought'}</summary>"
            f"{html_of(reasoning)}</details>"
        )
    tools = "".join(
        f"<div><code>{escape(name)}({escape(arguments)})</code></div>" for name, arguments in calls
    )
    shown = pictures_row(thumbnails) if thumbnails else ""
    return card(f"{shown}{thought}{html_of(text)}{tools}<div style='{DIM}'>{escape(foot)}</div>")


def card(inner: str) -> str:
    """HTML in a frame."""
    return f"<div style='{CARD}'>{inner}</div>"


def pictures_row(urls: Iterable[str]) -> str:
    """Pictures beside each other, given as data: URLs."""
    shown = "".join(f"<img src='{escape(url)}' style='{PICTURE}' alt='picture'>" for url in urls)
    return f"<div>{shown}</div>"


def answers_table(rows: Sequence[Sequence[str]]) -> str:
    """Answers one below the other; rows are (prompt, text, why it ended, tokens, rate)."""
    shown = [
        [str(index), _text_cell(prompt), _text_cell(text), *map(escape, rest)]
        for index, (prompt, text, *rest) in enumerate(rows[:SHOWN_ROWS])
    ]
    table = html_table(shown, header=("", "prompt", "answer", "ended by", "tokens", "tok/s"))
    more = len(rows) - SHOWN_ROWS
    rest = f"<div style='{DIM}'>and {more} more; .to_pandas() has all</div>" if more > 0 else ""
    return card(table + rest)


def _text_cell(text: str) -> str:
    return f"<div style='{PLAIN}'>{escape(clipped(text.strip(), SHOWN_CHARS))}</div>"


def model_card(info: Any, chat_params: SamplingParams | None, *, closed: bool) -> str:
    """A model that is open.

    Args:
        info: with `name`, `summary` and `max_context` (tokens, or None).
        chat_params: how it answers conversations; None: not known here.
        closed: its engine has ended.
    """
    context = f"{info.max_context:,} tokens" if info.max_context else "-"
    facts = {"model": info.summary, "context": context}
    if chat_params is not None:
        facts["chat"] = chat_params.words
    return facts_card(f"{info.name}{' (closed)' if closed else ''}", facts)


def facts_card(title: str, facts: Mapping[str, Any], first: Sequence[str] = ()) -> str:
    """Names and values; `first`: the names that are in sight, others are folded away. (): all."""
    seen = {name: facts[name] for name in first if name in facts} or facts
    rest = {name: value for name, value in facts.items() if name not in seen}
    table = html_table([_named(name), escape(shown_value(v, name))] for name, v in seen.items())
    more = html_table([escape(k), escape(shown_value(v, k))] for k, v in flat("", rest))
    folded = f"<details><summary style='{DIM}'>all figures</summary>{more}</details>"
    return card(f"<strong>{escape(title)}</strong>{table}{folded if rest else ''}")


def _named(name: str) -> str:
    return escape(name.removesuffix("_bytes").replace("_", " "))


def heat_card(tokens: "Sequence[tuple[str, float, Sequence[tuple[str, float]]]]") -> str:
    """Each token on a ground that is the redder the less probable the token was.

    Args:
        tokens: (text, its log-probability, the most probable (text, log-probability)).
    """
    from math import exp

    spans = []
    for text, logprob, top in tokens:
        alternatives = "\n".join(f"{exp(other):7.2%}  {name!r}" for name, other in top)
        title = escape(
            f"{exp(logprob):.2%}  {text!r}" + (f"\n\n{alternatives}" if alternatives else "")
        )
        style = _ground(exp(logprob))
        spans.append(f"<span title=\"{title}\" style='{style}'>{escape(text)}</span>")
    scale = "".join(
        f"<span style='{_ground(p)};padding:0 6px'>{p:.0%}</span>" for p in (1, 0.75, 0.5, 0.25, 0)
    )
    text = f"<div style='white-space:pre-wrap'>{''.join(spans)}</div>"
    return card(f"{text}<div style='{DIM};margin-top:8px'>probability {scale}</div>")


def _ground(probability: float) -> str:
    return f"background:rgba(230,70,40,{0.75 * (1 - probability):.2f})"


def html_table(rows: Iterable[Sequence[str]], *, header: Sequence[str] = ()) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th style='{CELL}'>{name}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td style='{CELL}'>{cell}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f"<table style='border-collapse:collapse'>{head}<tbody>{body}</tbody></table>"


def flat(name: str, value: Any) -> "Iterable[tuple[str, Any]]":
    """{"a": [{"b": 1}]} -> ("a 0 b", 1)"""
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from flat(f"{name} {key}".strip().replace("_", " "), item)
    else:
        yield name, value


def shown_value(value: object, name: str = "") -> str:
    """1234567 -> "1,234,567", or "1.2 MB" under a name with "bytes"; None -> "-"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return human_bytes(value) if "bytes" in name else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
