"""A conversation on the page: asking, answers as they arrive, stopping, branches, settings."""

import base64
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from page_driver import PageDriver, window
from page_server import PageServer

from mlxinfer.config.file import ToolServer
from mlxinfer.mcp_tools import McpTools
from mlxinfer.server.keys import ApiKeys
from tests.pdf_files import pdf
from tests.test_mcp_tools import SERVER
from tests.waiting import wait_until

MARKDOWN = """# Title

Some **bold** text, `code`, and $x^2 + 1$; it costs $5 and $6.

$$
\\int_0^1 x \\, dx
$$

```python
def f(x):  # why
    return "a" + str(x)
```

| a | b |
|---|--:|
| 1 | 2 |

- one
- two
"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def test_an_answer_is_drawn_as_markdown_with_code_and_formulas(page: PageDriver) -> None:
    page.server.script.says(MARKDOWN)
    answer = page.answered("Go")
    assert answer.locator("h1").inner_text() == "Title"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator(".math .katex").count() == 2
    assert answer.locator(".math[data-display] .katex-display").count() == 1
    assert "it costs $5 and $6" in answer.inner_text()
    assert answer.locator("pre .hljs-keyword").first.inner_text() == "def"
    assert answer.locator("td.right").inner_text() == "2"
    assert answer.locator("li").filter(has_text="one").count() == 1
    answer.get_by_role("button", name="Copy", exact=True).click()
    assert page.clipboard().startswith("def f(x):")


def test_line_breaks_and_task_lists_are_drawn(page: PageDriver) -> None:
    page.server.script.says("One Road\nSome Town\n\n- [x] done\n- [ ] open\n- [link]\n- [x]y")
    answer = page.answered("Go").locator(".markdown")
    assert answer.locator("p").first.inner_text() == "One Road\nSome Town"
    assert answer.locator("li.task").all_inner_texts() == ["☑ done", "☐ open"]
    assert answer.locator("li").all_inner_texts()[2:] == ["[link]", "[x]y"]


@window(size=(360, 640))
def test_a_wide_table_scrolls_and_keeps_its_words_whole(page: PageDriver) -> None:
    words = [f"extraordinary{number}" for number in range(6)]
    row = "| " + " | ".join(words) + " |\n"
    page.server.script.says(row + "|---" * 6 + "|\n" + row)
    table = page.answered("Go").locator(".table")
    assert table.evaluate("e => e.scrollWidth > e.clientWidth")
    heights = "e => [...e.querySelectorAll('td')].map(d => d.getBoundingClientRect().height)"
    assert max(table.evaluate(heights)) < 50  # one line
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_text_shows_before_the_answer_is_complete(page: PageDriver) -> None:
    page.server.script.says("The first half", " and the second half.")
    page.ask("Go")
    page.wait_for_answer("The first half")
    assert "second half." not in page.locator("article.assistant").inner_text()
    page.server.script.go_on.set()
    page.wait_idle()
    assert "and the second half." in page.locator("article.assistant").inner_text()


def test_thoughts_are_folded_and_timed(page: PageDriver) -> None:
    page.server.script.says("<think>Let me **see**.</think>It is 4.", pause_s=0.01)
    answer = page.answered("2+2?")
    summary = answer.locator(".thoughts summary")
    assert summary.inner_text().startswith("Thought for 0.")
    assert answer.locator(".thoughts strong").count() == 0
    summary.click()
    assert answer.locator(".thoughts strong").inner_text() == "see"
    assert "It is 4." in answer.locator("> .markdown").inner_text()


def test_stop_ends_the_request_and_keeps_the_text(page: PageDriver) -> None:
    script = page.server.script
    script.says("One two three", " four five six")
    page.ask("Count")
    page.wait_for_answer("One")
    page.click("Stop the answer")
    assert script.aborted.wait(60)
    page.wait_idle()
    wait_until(lambda: not page.server.service.calls)
    answer = page.locator("article.assistant")
    assert answer.inner_text().startswith("One")
    assert answer.locator(".figure").inner_text() == "stopped"


def test_an_edited_question_makes_a_branch_and_both_stay(page: PageDriver) -> None:
    script = page.server.script
    script.says("first answer")
    page.answered("first question")
    script.says("second answer")
    page.click("Edit this question")
    page.fill("textarea[aria-label='Edit the question']", "second question")
    page.keyboard.press("Enter")
    page.wait_for_answer("second answer", whole=True)
    assert "first question" not in page.server.prompt
    assert page.texts(".versions span") == ["2/2"]
    page.click("Previous version")
    page.wait_for_answer("first answer")
    assert page.texts(".bubble") == ["first question"]
    script.says("third answer")
    page.click("Another answer")
    page.wait_for_answer("third answer", whole=True)
    assert page.texts(".versions span") == ["1/2", "2/2"]


def test_an_edited_answer_is_a_branch_that_follow_ups_build_on(page: PageDriver) -> None:
    page.server.script.says("what it said")
    page.answered("question")
    page.click("About this answer")
    page.click("Edit this answer")
    page.fill("textarea[aria-label='Edit the answer']", "what it should have said")
    before = len(page.server.script.requests)
    page.click("Keep it")
    page.wait_for_answer("should have said")
    assert page.texts(".versions span") == ["2/2"]
    assert page.locator(".figure").inner_text() == "edited by you"
    assert len(page.server.script.requests) == before
    page.answered("next")
    assert "what it should have said" in page.server.prompt
    assert "what it said" not in page.server.prompt
    page.reload()
    page.locator(".entry").first.click()
    page.wait_for_answer("should have said")


def test_tool_calls_are_shown_and_their_results_sent(page: PageDriver) -> None:
    page.set_up(**{"A JSON list": json.dumps(TOOLS)})
    page.server.script.says(CALL)
    answer = page.answered("Weather?")
    assert "weather" in answer.locator(".call summary").inner_text()
    assert '"city": "Oslo"' in answer.locator(".call pre").inner_text()
    page.server.script.says("Rain.")
    answer.get_by_label("Result of weather").fill("rainy")
    answer.get_by_role("button", name="Send results").click()
    page.wait_for_answer("Rain.", whole=True)
    assert "rainy" in page.server.prompt
    assert '<tool_call>\n{"name": "weather"' in page.server.prompt
    page.server.script.says("Sun.")
    page.click("Edit this result")
    page.fill("textarea[aria-label='Edit the result']", "sunny")
    page.click("Send it")
    page.wait_for_answer("Sun.", whole=True)
    assert "sunny" in page.server.prompt
    assert "rainy" not in page.server.prompt
    assert page.texts("article.tool .versions span") == ["2/2"]


class Counting(McpTools):
    """Tells the model's script what to say next when a tool is called."""

    script: Any

    def call(self, name: str, arguments: str) -> str:
        self.script.says(f"So it is, by {name}.")
        return super().call(name, arguments)


@pytest.mark.ci
def test_mcp_tools_run_when_they_are_allowed_or_asked_for(profile: Any, tmp_path: Path) -> None:
    tools = Counting({"one": SERVER, "gone": ToolServer(command=("no-such-program",))})
    with PageServer(tmp_path, tools=tools) as server, PageDriver(profile, server) as page:
        tools.script = server.script
        page.open()
        page.locator(".notice", has_text="gone:").wait_for()
        server.script.says('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
        page.ask("How much?")
        page.wait_for_answer("So it is, by add.")
        assert page.texts(".tool-result") == ["2 + 3 = 5"]
        page.wait_idle()
        server.script.says('<tool_call>{"name": "home", "arguments": {}}</tool_call>')
        answer = page.answered("Where?")
        answer.get_by_role("button", name="Run home").click()
        wait_until(lambda: "some" in answer.get_by_label("Result of home").input_value())
        answer.get_by_role("button", name="Send results").click()
        page.wait_for_answer("So it is, by home.")
        assert "and 6 more lines" in page.texts(".tool-result")[-1]
        page.wait_idle()
        assert "some\n0\n1" in server.prompt


class Slow(McpTools):
    """Gives a result when it is closed."""

    closed = threading.Event()

    def call(self, name: str, arguments: str) -> str:
        self.closed.wait()
        return ""

    def close(self) -> None:
        self.closed.set()
        super().close()


@pytest.mark.ci
def test_a_call_that_runs_by_itself_can_be_stopped(profile: Any, tmp_path: Path) -> None:
    with (
        PageServer(tmp_path, tools=Slow({"one": SERVER})) as server,
        PageDriver(profile, server) as page,
    ):
        page.open()
        server.script.says('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
        page.ask("How much?")
        page.get_by_text('"b": 3').wait_for()
        page.click("Stop the answer")
        page.wait_idle()
        assert page.get_by_role("button", name="Run add").is_visible()
        assert page.texts(".tool-result") == []


def test_settings_reach_the_request(page: PageDriver) -> None:
    page.set_up(System_message="Be brief.", Temperature="0.3", Seed="7", Stop_at="END")
    page.answered("Hi")
    request = page.server.script.requests[-1]
    assert (request.params.temperature, request.params.seed) == (0.3, 7)
    assert request.params.stop == ("END",)
    assert "Be brief." in page.server.prompt


def test_a_schema_that_is_no_json_is_refused_by_the_form(page: PageDriver) -> None:
    page.click("Settings of this conversation")
    page.settings.get_by_label("Answers are").select_option("schema")
    page.settings.get_by_label("Schema", exact=True).fill("{oops")
    assert "This is not valid JSON" in page.settings.get_by_role("alert").inner_text()
    page.answered("Go")  # as before: what is wrong does not apply
    assert page.server.script.requests[-1].grammar is None


def test_settings_apply_as_they_are_typed_and_wrong_ones_say_why(page: PageDriver) -> None:
    page.answered("Once")  # now the model's own defaults are known
    page.click("Settings of this conversation")
    temperature = page.get_by_label("Temperature")
    assert temperature.get_attribute("placeholder") == "0.3"
    temperature.fill("0.7")
    page.answered("Twice")
    assert page.server.script.requests[-1].params.temperature == 0.7
    temperature.fill("9999")
    assert page.texts(".settings .wrong") == ["Type a number from 0 to 100."]
    page.get_by_label("Most tokens").fill("1.5")
    assert page.texts(".settings .wrong")[-1] == "Type a whole number."
    page.answered("And again")
    assert page.server.script.requests[-1].params.temperature == 0.7
    page.keyboard.press("Escape")
    page.locator(".settings").wait_for(state="detached")


def test_an_empty_chat_offers_questions(page: PageDriver) -> None:
    page.locator(".prompts button").first.click()
    page.wait_idle()
    assert page.texts(".bubble") == ["What is a KV cache?"]


def test_a_server_that_is_gone_is_one_banner_until_it_is_back(page: PageDriver) -> None:
    page.route("**/*", lambda route: route.abort())
    page.ask("Are you there?")
    page.locator(".offline").wait_for()
    assert page.locator(".notice").count() == 0
    page.unroute("**/*")
    page.locator(".offline").wait_for(state="detached")
    page.errors.clear()
    page.locator(".entries li", has_text="Are you there?").wait_for()  # stored after all
    page.wait_for_answer("ok")


def test_a_message_that_cannot_be_saved_says_so_at_last(page: PageDriver) -> None:
    page.route("**/history/messages", lambda route: route.abort())
    page.ask("Keep this")
    page.locator(".notice", has_text="Not saved").wait_for()
    page.close()  # it tries again, and each try is an error of its console
    page.errors.clear()


def test_what_is_chosen_as_soon_as_the_settings_open_stays(page: PageDriver) -> None:
    chosen = page.evaluate("""async () => {
        document.querySelector('[aria-label="Settings of this conversation"]').click();
        while (!document.querySelector("form.settings")) await Promise.resolve();
        const form = [...document.querySelectorAll("form.settings select")].at(-1);
        form.value = "choice";
        form.dispatchEvent(new Event("change", { bubbles: true }));
        await new Promise((drawn) => setTimeout(drawn, 300));
        return form.value;
    }""")
    assert chosen == "choice"


def test_a_conversation_is_copied_as_markdown_text_and_curl(page: PageDriver) -> None:
    page.set_up(System_message="It's brief.")
    page.server.script.says("**Hello**")
    page.answered("Say 'hello'")
    choose = page.get_by_label("Copy or save the conversation")
    choose.select_option("markdown")
    wait_until(lambda: "## Assistant\n\n**Hello**" in page.clipboard())
    choose.select_option("text")
    wait_until(lambda: page.clipboard() == "You: Say 'hello'\n\nAssistant: **Hello**")
    choose.select_option("curl")
    wait_until(lambda: page.clipboard().startswith("curl "))
    said = page.clipboard()
    body = json.loads(said.partition("<<'BODY'\n")[2].removesuffix("\nBODY\n"))
    assert [message["content"] for message in body["messages"]] == ["It's brief.", "Say 'hello'"]
    assert f"{page.server.url}/v1/chat/completions" in said
    page.click("Copy this answer")
    wait_until(lambda: page.clipboard() == "**Hello**")


def test_text_files_and_pdfs_go_along_as_text(page: PageDriver) -> None:
    files = page.locator("input[type=file]")
    files.set_input_files(
        [
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": "naïve notes".encode()},
            {"name": "a.pdf", "mimeType": "application/pdf", "buffer": pdf("Pages of text")},
        ]
    )
    page.wait_for_selector(".attached:has-text('a.pdf'):has-text('13 characters')")
    page.answered("Sum up")
    assert '<file name="notes.txt">\nnaïve notes\n</file>' in page.server.prompt
    assert "Pages of text" in page.server.prompt
    assert "notes.txt" in page.texts(".bubble")[0]


def test_a_file_that_is_no_text_is_refused_by_name(page: PageDriver) -> None:
    for name, data in (("a.png", b"\x89PNG\0\0"), ("b.pdf", b"%PDF-1.4 broken")):
        page.locator("input[type=file]").set_input_files(
            {"name": name, "mimeType": "application/octet-stream", "buffer": data}
        )
        page.wait_for_selector(f".notice:has-text('{name}')")
    assert page.locator(".attached").count() == 0
    page.errors.clear()  # the console notes the server's 400


def test_pdf_route_refuses_what_is_no_base64(server: PageServer) -> None:
    answer = server.post("/page/pdf", {"name": "x.pdf", "data": "%%%"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data")
    data = base64.b64encode(pdf("Some text")).decode()
    answer = server.post("/page/pdf", {"name": "x.pdf", "data": data})
    assert answer.json() == {"name": "x.pdf", "text": "Some text"}


def test_cached_prompt_tokens_show_at_their_answer(page: PageDriver) -> None:
    page.server.script.cached_tokens = 5
    answer = page.answered("Again and again and again")
    facts = page.facts(answer)
    assert "5 of " in facts
    assert "prompt tokens from the cache" in facts


def test_an_answer_goes_on_after_a_lost_connection(page: PageDriver) -> None:
    script = page.server.script
    script.says("One two three", " four five")
    page.ask("Count")
    page.wait_for_answer("One")
    loop, state = page.server.server._loop, page.server.server.server_state
    loop.call_soon_threadsafe(lambda: [c.transport.abort() for c in list(state.connections)])
    script.go_on.set()
    page.wait_for_answer("One two three four five", whole=True)
    page.errors.clear()


def test_a_failed_answer_says_why_and_can_be_tried_again(page: PageDriver) -> None:
    page.server.service.draining = True
    page.ask("Count")
    answer = page.locator("article.assistant")
    answer.locator(".error", has_text="shutting down").wait_for()
    page.wait_idle()
    page.server.service.draining = False
    page.server.script.says("All five.")
    answer.get_by_role("button", name="Try again").click()
    page.wait_for_answer("All five.", whole=True)


@pytest.mark.parametrize("state", ["isComposing: true", "keyCode: 229"])
def test_keys_of_an_input_method_are_not_the_pages(page: PageDriver, state: str) -> None:
    """Safari ends a composition before the Enter that confirms it: only its key code tells."""

    def press(key: str, place: str) -> None:
        event = f"{{key: '{key}', bubbles: true, cancelable: true, {state}}}"
        page.locator(place).evaluate(f"e => e.dispatchEvent(new KeyboardEvent('keydown', {event}))")

    page.fill("#question", "你好")
    press("Enter", "#question")
    assert page.input_value("#question") == "你好"
    page.press("#question", "Enter")
    page.wait_idle()
    page.click("Edit this question")
    for key in ("Enter", "Escape"):
        press(key, "form.edit textarea")
    assert page.locator("form.edit textarea").is_visible()
    assert page.texts(".bubble") == []


def test_arabic_and_hebrew_are_written_from_the_right(page: PageDriver) -> None:
    page.server.script.says(
        "שלום\n\n- אחת\n\n- שתיים\n\n> ציטוט\n\nPlain\n\n| א | b |\n|---|---|\n| ג | d |"
    )
    answer = page.answered("مرحبا")
    shown = "(e) => getComputedStyle(e).direction"
    for place in (".bubble .plain", ".markdown p", ".markdown ul", ".markdown blockquote", "th"):
        assert page.locator(place).first.evaluate(shown) == "rtl", place
    assert answer.locator("p", has_text="Plain").evaluate(shown) == "ltr"
    assert page.locator(".entry .title").first.evaluate(shown) == "rtl"
    page.fill("#question", "سؤال")
    assert page.locator("#question").evaluate(shown) == "rtl"


def test_what_an_answer_waits_for_is_said_below_its_question(page: PageDriver) -> None:
    page.answered("The first question of a new chat")
    page.server.script.read = (100, 5.0)
    page.ask("A question that does not fit on a screen. " * 60)
    said = page.locator(".waiting", has_text="reading")
    said.wait_for()
    assert re.fullmatch(r"reading \d+ tokens: \d+ %, \d+ s left", said.inner_text())
    above = page.locator("#question").bounding_box()["y"]
    wait_until(lambda: said.bounding_box()["y"] < above)
    page.server.script.go_on.set()
    page.wait_idle()


def test_an_answer_that_was_cut_off_goes_on(page: PageDriver) -> None:
    script = page.server.script
    script.says("One two", " three")
    page.ask("Count")
    page.wait_for_answer("One two")
    page.click("Stop the answer")
    page.locator(".figure", has_text="stopped").wait_for()
    script.reset()
    script.says(" three four")
    page.click("Continue")
    page.wait_for_answer("One two three four", whole=True)
    assert page.server.prompt.endswith("One two")
    assert page.locator("article.assistant").count() == 1
    assert page.get_by_role("button", name="Continue").count() == 0
    page.reload()
    page.wait_for_answer("One two three four")


def test_a_long_paste_becomes_a_file(page: PageDriver) -> None:
    paste = """(e, text) => {
        const clipboardData = new DataTransfer();
        clipboardData.setData("text/plain", text);
        const how = { clipboardData, bubbles: true, cancelable: true };
        e.dispatchEvent(new ClipboardEvent("paste", how));
    }"""
    for _ in range(2):
        page.locator("#question").evaluate(paste, "line\n" * 1000)
    page.locator(".attached", has_text="pasted 2.txt").wait_for()
    assert "5,000 characters" in page.texts(".attached li")[0]
    assert page.input_value("#question") == ""


def test_a_conversation_is_saved_to_a_file(page: PageDriver) -> None:
    page.answered("Save: me?")
    for kind, ending in (("markdown", "md"), ("json", "json")):
        with page.expect_download() as saved:
            page.get_by_label("Copy or save").select_option(f"file-{kind}")
        assert saved.value.suggested_filename == f"Save me.{ending}"
        text = Path(saved.value.path()).read_text()
        assert "Save: me?" in text
    assert [m["role"] for m in json.loads(text)["messages"]] == ["user", "assistant"]


def test_the_keyboard_is_enough(page: PageDriver) -> None:
    keyboard, at = page.keyboard, page.page
    page.wait_for("document.activeElement.id === 'question'")
    keyboard.type("Hello")
    keyboard.press("Shift+Enter")
    keyboard.type("there")
    keyboard.press("Enter")
    at.wait_for_selector("article.assistant .tools")
    assert page.texts(".bubble") == ["Hello\nthere"]
    keyboard.press("ArrowUp")
    page.wait_for("document.activeElement.ariaLabel === 'Edit the question'")
    keyboard.press("Escape")
    keyboard.press("Control+k")
    page.wait_for("document.activeElement.id === 'search'")
    keyboard.press("Escape")
    keyboard.press("Alt+3")
    at.wait_for_selector("h1:has-text('Dashboard')")
    keyboard.press("Alt+1")
    at.wait_for_selector("article.assistant")
    at.locator("article.assistant").click()
    keyboard.press("?")
    at.wait_for_selector("dialog:has-text('new line')")
    keyboard.press("Escape")
    at.wait_for_selector("dialog", state="detached")
    keyboard.press("Control+Shift+o")
    at.wait_for_selector(".welcome")


def test_a_key_is_asked_for_and_kept(profile: Any, tmp_path: Any) -> None:
    with (
        PageServer(tmp_path, keys=ApiKeys.from_plain(["a-secret"])) as locked,
        PageDriver(profile, locked) as page,
    ):
        page.goto(locked.url)
        page.get_by_label("This server answers only with a key").fill("a-secret")
        page.click("Use this key")
        page.wait_for_selector('textarea[placeholder="Ask demo"]')
        page.errors.clear()  # the console notes the 401
        page.answered("Hi")
        page.reload()
        page.wait_for_selector('textarea[placeholder="Ask demo"]')
        owners = {c.title for c in locked.routes._history.conversations("")}  # type: ignore[union-attr]
        assert owners == set(), "a key's conversations are not those of requests without a key"


def test_a_key_that_may_not_administer_sees_the_chat_alone(profile: Any, tmp_path: Any) -> None:
    keys = ApiKeys.from_plain(["chief"]).with_named({"anna": {"key": "plain"}}, "keys.toml")
    with PageServer(tmp_path, keys=keys) as server:
        for key, places in (("plain", ["Chat"]), ("chief", ["Chat", "Models", "Dashboard"])):
            with PageDriver(profile, server) as page:
                page.goto(server.url)
                page.get_by_label("This server answers only with a key").fill(key)
                page.click("Use this key")
                page.wait_for_selector('textarea[placeholder^="Ask "]')
                page.answered("Hello")
                assert page.texts("nav a") == places
                page.errors.clear()  # the refusal before the key


@pytest.mark.parametrize("form", ["schema", "choice"])
def test_form_settings_become_grammars(page: PageDriver, form: str) -> None:
    fields = {"schema": {"Schema": '{"type": "object"}'}, "choice": {"Texts": "yes\nno"}}[form]
    page.click("Settings of this conversation")
    settings = page.settings
    settings.get_by_label("Answers are").select_option(form)
    for label, value in fields.items():
        settings.locator(f"label:has-text('{label}') textarea").fill(value)
    page.keyboard.press("Escape")
    settings.wait_for(state="detached")
    page.answered("Hi")
    assert page.server.script.requests[-1].grammar is not None
