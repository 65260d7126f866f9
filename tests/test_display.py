"""Cards of notebooks, short errors, bars: what leaves the library for people's eyes."""

import asyncio
import gc
import json
import re
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from seeing_folder import seeing_folder

from mlxinfer import LLM
from mlxinfer.core import FinishReason, TokenLogprobs
from mlxinfer.display.markdown import html_of
from mlxinfer.display.show import Heat, show
from mlxinfer.display.tracebacks import empty_frames, shorten
from mlxinfer.errors import InvalidRequestError, ModelNotFoundError
from mlxinfer.images import load_image, thumbnail_url
from mlxinfer.outputs import Delta, Facts, ReasoningPart, Result, Results, TextPart, ToolCall
from mlxinfer.progress import patient, progress_bar

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "![p](https://evil.example/pixel.png)",
    "```html\n<script>alert(1)</script>\n```",
    '```"><script>alert(1)</script>\nx\n```',
    '<https://a.example/"onmouseover=alert(1)>',
    "| <b onclick=alert(1)> |\n|--|\n| <iframe src=x> |",
    "<style>body{display:none}</style>",
    "$<img src=x onerror=alert(1)>$",
)


def test_nothing_that_a_model_writes_is_markup() -> None:
    tags = ("<script", "<img", "<iframe", "<b ", "<style", 'href="java', 'href="data')
    for hostile in HOSTILE:
        rendered = html_of(hostile)
        assert [tag for tag in tags if tag in rendered] == [], hostile
        assert not re.search(r"<[^>]*\son\w+=", rendered), hostile
        card = Result(text=hostile, reasoning=hostile)._repr_html_()
        assert "<script" not in card, hostile
        assert "<img" not in card, hostile


def test_markdown_code_tables_and_formulas() -> None:
    rendered = html_of(
        "**b**\n\n```python\nif x: pass\n```\n\n|a|\n|-|\n|1|\n\n"
        "$x_1*y*$ and \\(a_b\\)\n\n\\[\n- a\n\\]"
    )
    assert "<strong>b</strong>" in rendered
    assert '<span style="color:' in rendered
    assert "<td>1</td>" in rendered
    assert "$x_1*y*$ and \\(a_b\\)" in rendered
    assert "\\[\n- a\n\\]" in rendered


def test_thoughts_are_folded_and_calls_are_shown() -> None:
    call = ToolCall(id="1", name="weather", arguments='{"city": "<b>"}')
    card = Result(text="done", reasoning="hm", tool_calls=[call])._repr_html_()
    assert card.index("<details") < card.index("hm") < card.index("</details>") < card.index("done")
    assert "weather({&quot;city&quot;: &quot;&lt;b&gt;&quot;})" in card


def test_results_are_a_list_with_columns() -> None:
    results = Results([Result(text="a" * 999, token_ids=[1, 2], prompt="<p>")] * 20)
    results += [Result(text="b")] * 20
    assert results == [*results]
    assert results.to_records()[0]["answer_tokens"] == 2
    assert json.dumps(results.to_records())
    shown = results._repr_html_()
    assert "and 20 more" in shown
    assert shown.count("&lt;p&gt;") == 20
    assert results.to_records()[0]["prompt"] == "<p>"
    assert "a" * 500 not in shown


def test_facts_and_heat_have_cards() -> None:
    shown = Facts(active_memory_bytes=5_000_000, groups=[{"pages": 3}], none=None)._repr_html_()
    in_sight, folded = shown.split("<details")
    assert "5.0 MB" in in_sight
    assert "0 pages" in folded
    assert "none" in folded
    outcome = [TokenLogprobs(-0.1, ((65, -0.1), (66, -2.5))), TokenLogprobs(-0.2, ())]
    result = Result(text="A", token_ids=[65, 67], logprobs=outcome)
    heat = Heat.of(result, lambda i: bytes([i]), {67})
    assert repr(heat) == "  90.48%  'A'"
    assert "8.21%" in heat._repr_html_()
    with pytest.raises(InvalidRequestError, match="logprobs=3"):
        Heat.of(Result(text="A"), lambda i: b"")


def test_show_writes_text_where_there_is_no_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    end = Result(text="hi", finish_reason=FinishReason.STOP)
    deltas = [Delta(parts=[ReasoningPart("hm")]), Delta(parts=[TextPart("hi")], result=end)]
    assert show(iter(deltas)) is end
    assert capsys.readouterr().out == "hi\n"


class Engine:
    """Something that frames must not keep."""


def failing(engine: Engine, error: BaseException) -> Iterator[Delta]:
    yield Delta()
    raise error


@pytest.mark.parametrize("error", [ModelNotFoundError("none"), KeyboardInterrupt()])
def test_an_error_in_a_notebook_is_short_and_keeps_nothing(error: BaseException) -> None:
    engine = Engine()
    alive = weakref.ref(engine)
    with pytest.raises(type(error)) as caught:
        show(failing(engine, error))
    shorten(caught.value)
    assert len(list(traceback.walk_tb(caught.value.__traceback__))) == 1  # the line above
    del engine
    gc.collect()
    assert alive() is None


def test_a_fault_keeps_its_places_but_not_their_variables() -> None:
    class Held(dict[str, object]):
        def __getattr__(self, name: str) -> Any:
            return 1 / 0

    held = Held()
    with pytest.raises(ZeroDivisionError) as caught:
        Heat.of(held, bytes)  # type: ignore[arg-type]
    empty_frames(caught.value)
    assert len(list(traceback.walk_tb(caught.value.__traceback__))) == 3
    frame = caught.value.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name == "of":
            assert not frame.tb_frame.f_locals
        frame = frame.tb_next


def test_bars_are_silent_in_pipes_unless_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar("load org/x") as show:
        show(1, 2)
    assert capsys.readouterr().err == ""
    with progress_bar("load org/x", wanted=True) as show:
        show(1, 2)
    assert "load org/x" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("load org/x", wanted=False) as show:
        show(1, 2)
    assert capsys.readouterr().err == ""
    with progress_bar("answers", unit="answers") as show:
        show(1, 2)
    assert "1/2" in capsys.readouterr().err  # a bar begins where its step is
    monkeypatch.setenv("MLXINFER_PROGRESS", "json")
    with progress_bar("load org/x") as show:
        show(2, 2)
    assert json.loads(capsys.readouterr().err) == {"step": "load", "done": 2, "total": 2}


def test_small_models_load_without_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("mlxinfer.progress.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    seen: list[int] = []
    show_later = patient(lambda _, done, __: seen.append(done))
    for done, at_s in ((1, 0.0), (2, 0.4), (3, 0.6)):
        now_s[0] = at_s
        show_later("load", done, 4)
    assert seen == [3]


def test_a_notebook_shows_pictures_above_their_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    shown: list[Any] = []
    monkeypatch.setattr("mlxinfer.display.show.in_notebook", lambda: True)
    monkeypatch.setattr(
        "IPython.core.display_functions.display",
        lambda value, **_: shown.append(value) or SimpleNamespace(update=shown.append),
    )
    end = Result(text="hi", finish_reason=FinishReason.STOP)
    url = thumbnail_url(Image.new("RGB", (2000, 1000), "red"), 240)
    returned = show(iter([Delta(parts=[TextPart("hi")], result=end)]), [url])
    pictures, card, last = shown
    assert repr(pictures) == "1 picture"
    matches = re.findall(r"<img src='(data:image/png;base64,[^']+)'", pictures._repr_html_())
    assert [load_image(one).size for one in matches] == [(240, 120)]
    assert "thinking" not in card._repr_html_()
    assert last is end
    assert returned == replace(end, thumbnails=[url])
    assert url in returned._repr_html_()


def test_cards_of_a_notebook_show_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    large = Image.new("RGB", (2000, 1000), "red")
    with LLM(seeing_folder(tmp_path / "see"), progress=False) as llm:
        assert llm.chat("What is it?", images=[large], max_tokens=2).thumbnails == ()
        monkeypatch.setattr("mlxinfer.llm.in_notebook", lambda: True)
        for result in (
            llm.chat("What is it?", images=[large], max_tokens=2),
            asyncio.run(llm.achat("What is it?", images=[large], max_tokens=2)),
        ):
            (url,) = result.thumbnails
            assert load_image(url).size == (240, 120)
            assert "thumbnails" not in result.to_dict()
            assert f"<img src='{url}'" in result._repr_html_()
        assert llm.chat("Hm?", max_tokens=2).thumbnails == ()
