"""Stored conversations on the page: opened, found, renamed, deleted, shared by tabs."""

import time
from typing import Any

import pytest
from page_driver import PageDriver
from page_server import PageServer

from mlxinfer.history import History, StoredMessage
from tests.waiting import wait_until

pytestmark = pytest.mark.ci


def history_of(server: PageServer) -> History:
    result = server.routes._history
    assert result is not None
    return result


def entry(page: PageDriver, title: str) -> Any:
    return page.locator(".entries li", has_text=title)


def test_a_reload_keeps_a_conversation_with_its_settings_and_branch(page: PageDriver) -> None:
    page.set_up(System_message="Be kind.")
    page.server.script.says("The first.")
    page.answered("Reload me")
    page.server.script.says("The second.")
    page.click("Another answer")
    page.wait_for_answer("The second.", whole=True)
    page.click("Previous version")
    page.wait_for_answer("The first.")
    history = history_of(page.server)
    [stored] = [c for c in history.conversations("") if c.title == "Reload me"]
    wait_until(lambda: history.branch("", stored.id)[-1].content == "The first.")
    page.reload()
    page.wait_for_answer("The first.")
    assert page.texts(".versions span") == ["1/2"]
    page.click("Settings of this conversation")
    assert page.get_by_label("System message").input_value() == "Be kind."


def test_search_finds_a_message_in_another_branch_and_opens_it(page: PageDriver) -> None:
    page.server.script.says("The zebra is striped.")
    page.answered("Animals")
    page.server.script.says("The giraffe is tall.")
    page.click("Another answer")
    page.wait_for_answer("giraffe", whole=True)
    page.new_chat()
    page.fill("#search", "zebra")
    page.locator("mark", has_text="zebra").wait_for()
    assert page.locator(".entry.tall").count() == 1  # a conversation once
    page.locator(".excerpt", has_text="zebra").click()
    page.wait_for_answer("The zebra")
    page.fill("#search", "no such words anywhere")
    page.wait_for_selector("text=Nothing has all of these words.")


def test_a_conversation_is_renamed_and_deleted_for_good(page: PageDriver) -> None:
    page.answered("Name me")
    entry(page, "Name me").get_by_role("button", name="Rename or delete").click()
    page.get_by_role("textbox", name="Title").fill("Renamed")
    page.click("Save")
    entry(page, "Renamed").get_by_role("button", name="Rename or delete").click()
    page.click("Delete…")
    page.click("Keep it")
    entry(page, "Renamed").get_by_role("button", name="Rename or delete").click()
    page.click("Delete…")
    page.click("Delete")
    entry(page, "Renamed").wait_for(state="detached")
    page.wait_for_selector(".welcome")
    assert "Renamed" not in [c.title for c in history_of(page.server).conversations("")]


def test_conversations_stand_under_their_days_and_those_pinned_come_first(page: PageDriver) -> None:
    page.answered("Old one")
    page.wait_idle()
    history = history_of(page.server)
    with history._transaction() as db:
        db.execute("UPDATE conversations SET changed_s = 0 WHERE title = 'Old one'")
    page.reload()
    old = page.get_by_role("region", name="January 1970").locator("li")
    old.hover()
    old.get_by_role("button", name="Pin Old one").click()
    pinned = page.get_by_role("region", name="Pinned").locator("li", has_text="Old one")
    pinned.wait_for()
    page.new_chat()
    page.answered("New one")
    page.reload()
    page.get_by_role("region", name="Today").locator("li", has_text="New one").wait_for()
    assert page.texts(".entries section h2")[:2] == ["Pinned", "Today"]
    page.click("Unpin Old one")
    pinned.wait_for(state="detached")


def test_two_tabs_see_each_others_messages(page: PageDriver) -> None:
    page.answered("From the first tab")
    other = page.new_tab()
    page.open(tab=other)
    other.locator(".entry", has_text="From the first tab").click()
    other.wait_for_selector("article.assistant")
    page.server.script.says("Seen by both.")
    page.answered("Second question", tab=other)
    page.wait_for_answer("Seen by both.")
    assert page.texts(".bubble") == ["From the first tab", "Second question"]
    page.wait_idle()


def test_an_answer_that_ends_before_another_tab_follows_it_is_shown_there(page: PageDriver) -> None:
    page.answered("Both tabs")
    other = page.new_tab()
    page.open(tab=other)
    other.locator(".entry", has_text="Both tabs").click()
    other.wait_for_selector("article.assistant")
    held: list[Any] = []
    page.route("**/page/answers/*", lambda route: held.append(route), times=1)
    page.server.script.says("Seen", " by both.")
    page.ask("Second question", tab=other)
    wait_until(lambda: page.wait_for_timeout(20) or bool(held))
    page.server.script.go_on.set()
    page.wait_idle(tab=other)
    held[0].continue_()
    page.wait_for_answer("Seen by both.", whole=True)


def test_a_message_right_after_new_chat_goes_to_the_new_chat(page: PageDriver) -> None:
    page.answered("Old")
    page.evaluate("""async () => {
        const field = document.getElementById("question");
        const drawn = async () => { for (let turn = 0; turn < 9; turn++) await null; };
        document.querySelector("button.new").click(); // no event of the browser comes in between
        await drawn();
        field.value = "New";
        field.dispatchEvent(new InputEvent("input", { bubbles: true }));
        await drawn();
        field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    }""")
    page.locator(".bubble", has_text="New").wait_for()
    page.wait_idle()
    assert page.texts(".bubble") == ["New"]
    page.go_back()
    page.locator(".bubble", has_text="Old").wait_for()
    assert page.texts(".bubble") == ["Old"]


def test_an_answer_goes_on_while_another_conversation_is_shown(page: PageDriver) -> None:
    page.server.script.says("Slowly", " it comes.")
    page.ask("Background")
    page.wait_for_answer("Slowly")
    page.new_chat()
    page.server.script.go_on.set()
    entry(page, "Background").locator(".entry").click()
    page.wait_for_answer("Slowly it comes.", whole=True)


def test_an_answer_that_ends_while_its_conversation_is_opened_is_shown(page: PageDriver) -> None:
    """The page does not show a state that the server read before the end was saved."""
    page.server.script.says("Slowly", " it comes.")
    page.ask("Overtaken")
    page.wait_for_answer("Slowly")
    entry(page, "Overtaken").wait_for()
    page.new_chat()
    read: list[tuple[Any, Any]] = []
    page.route(
        "**/history/conversations/*",
        lambda route: read.append((route, route.fetch())),  # the reply is kept for a while
        times=1,
    )
    entry(page, "Overtaken").locator(".entry").click()
    wait_until(lambda: page.wait_for_timeout(20) or bool(read))
    page.server.script.go_on.set()
    entry(page, "Overtaken").get_by_text("answering…").wait_for(state="detached")
    [(route, reply)] = read
    route.fulfill(response=reply)
    page.wait_for_answer("Slowly it comes.", whole=True)


def test_of_two_conversations_the_one_chosen_last_is_shown(page: PageDriver) -> None:
    page.answered("Chosen first")
    page.new_chat()
    page.answered("Chosen last")
    page.new_chat()
    held: list[Any] = []
    page.route("**/history/conversations/*", lambda route: held.append(route), times=1)
    entry(page, "Chosen first").locator(".entry").click()
    wait_until(lambda: page.wait_for_timeout(20) or bool(held))
    entry(page, "Chosen last").locator(".entry").click()
    page.wait_for_selector("h1:has-text('Chosen last')")
    with page.expect_response("**/history/conversations/*"):
        held[0].continue_()
    page.wait_for_timeout(100)  # for a redraw that must not come
    assert page.texts("h1.title") == ["Chosen last"]


def test_an_answer_goes_on_without_its_tab_and_is_seen_by_others(page: PageDriver) -> None:
    tab = page.new_tab()
    page.open(tab=tab)
    page.server.script.says("Half an answer", " and the rest")
    page.ask("Close me", tab=tab)
    page.wait_for_answer("Half", tab=tab)
    entry(page, "Close me").get_by_text("answering…").wait_for()
    where = tab.evaluate("location.hash")
    tab.close()
    page.open(f"/{where}")
    page.wait_for_answer("Half an answer")
    page.reload()
    page.wait_for_answer("Half an answer")
    other = page.new_tab()
    page.open(f"/{where}", tab=other)
    page.wait_for_answer("Half an answer", tab=other)
    page.server.script.go_on.set()
    for page_ in (page.page, other):
        page.wait_for_answer("Half an answer and the rest", tab=page_, whole=True)
    history = history_of(page.server)
    stored = history.branch("", where.removeprefix("#chat/"))
    assert [m.content for m in stored] == ["Close me", "Half an answer and the rest"]
    assert {"grows", "error"}.isdisjoint(stored[-1].details)


def test_any_tab_stops_an_answer_for_all(page: PageDriver) -> None:
    page.server.script.says("One two", " three")
    page.ask("Count")
    page.wait_for_answer("One")
    other = page.new_tab()
    page.open(page.evaluate("'/' + location.hash"), tab=other)
    page.wait_for_answer("One", tab=other)
    other.get_by_role("button", name="Stop the answer").click()
    assert page.server.script.aborted.wait(60)
    for page_ in (page.page, other):
        page_.locator(".figure", has_text="stopped").wait_for()


def test_a_chat_has_an_address_that_reload_back_and_forward_keep(page: PageDriver) -> None:
    page.answered("First chat")
    first = page.evaluate("location.hash")
    assert first.startswith("#chat/")
    assert page.title() == "First chat · mlxinfer"
    page.new_chat()
    page.answered("Second chat")
    page.reload()
    page.locator(".bubble", has_text="Second chat").wait_for()
    page.locator("nav a", has_text="Models").click()
    page.locator("nav a", has_text="Chat").click()
    page.locator(".bubble", has_text="Second chat").wait_for()
    for _ in range(2):
        page.go_back()
    page.locator(".bubble", has_text="Second chat").wait_for()
    page.go_back()
    page.locator(".bubble", has_text="First chat").wait_for()
    assert page.evaluate("location.hash") == first
    page.go_forward()
    page.locator(".bubble", has_text="Second chat").wait_for()


def test_an_address_of_a_chat_that_is_gone_says_so_and_begins_a_new_one(page: PageDriver) -> None:
    page.open("/#chat/0123456789abcdef")
    page.locator(".notice", has_text="There is no conversation").wait_for()
    page.wait_for_selector(".welcome")
    page.wait_for("location.hash === ''")
    page.errors.clear()


def test_every_chat_keeps_its_draft(page: PageDriver) -> None:
    field = page.locator("#question")
    page.answered("With a draft")
    field.fill("unfinished")
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"some notes"}
    page.locator("input[type=file]").set_input_files(file)
    page.locator(".attached", has_text="notes.txt").wait_for()
    page.new_chat()
    assert field.input_value() == ""
    field.fill("a new one")
    page.reload()
    wait_until(lambda: field.input_value() == "a new one")
    entry(page, "With a draft").locator(".entry").click()
    wait_until(lambda: field.input_value() == "unfinished")
    page.reload()
    wait_until(lambda: field.input_value() == "unfinished")
    page.locator(".attached", has_text="notes.txt").wait_for()
    field.press("Enter")
    wait_until(lambda: field.input_value() == "")
    page.wait_idle()
    page.reload()
    page.locator(".bubble", has_text="unfinished").wait_for()
    assert field.input_value() == ""


def test_ten_thousand_messages_open_at_their_end(page: PageDriver) -> None:
    history, parent = history_of(page.server), None
    now_s = time.time()
    rows = []
    for number in range(10_000):
        role, id = ("user", "assistant")[number % 2], f"long{number:08}"
        rows.append((id, "longlonglong", parent, role, f"Message {number}", "", "{}", now_s))
        parent = id
    first = StoredMessage(id="longfirst0", parent=None, role="user", content="Long one")
    history.save_message("", "longlonglong", first)
    with history._transaction() as db:
        db.executemany(
            "INSERT INTO messages (id, conversation, parent, role, content, reasoning, details, "
            "created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
    history.save_conversation("", "longlonglong", head=parent)
    page.open()
    page.locator(".entry", has_text="Long one").first.click()
    page.wait_for_selector("article:has-text('Message 9999')")
    assert page.locator("article").count() == 40
    page.get_by_role("button", name="Show 160 of 9960 earlier messages").click()
    page.wait_for_selector("article:has-text('Message 9800')")
    page.fill("#search", "message 4321")
    page.locator(".excerpt", has_text="Message 4321").click()
    page.wait_for_selector("article:has-text('Message 9999')")


def test_many_conversations_come_in_pages(page: PageDriver) -> None:
    history = history_of(page.server)
    for number in range(60):
        message = StoredMessage(
            id=f"many{number:04}", parent=None, role="user", content=f"Many {number}"
        )
        history.save_message("", f"manymany{number:04}", message)
    page.open()
    page.wait_for_selector(".entry")
    before = page.locator(".entry").count()
    assert before == 50
    page.click("Older conversations")
    page.wait_for(f"document.querySelectorAll('.entry').length > {before}")


def test_a_history_that_cannot_be_written_is_said_and_the_chat_goes_on(page: PageDriver) -> None:
    history = history_of(page.server)
    held = history._file._db.execute("PRAGMA query_only = ON")
    held.close()
    try:
        page.ask("Not kept")
        page.wait_for_selector(".notice:has-text('Not saved')")
        page.wait_for_answer("ok", whole=True)
    finally:
        history._file._db.execute("PRAGMA query_only = OFF")
    page.errors.clear()


def test_without_history_the_page_says_so_and_keeps_nothing(profile: Any, tmp_path: Any) -> None:
    with PageServer(tmp_path, history=False) as server, PageDriver(profile, server) as page:
        page.open()
        page.wait_for_selector("text=This server keeps no history")
        page.answered("Once")
        assert page.answered("Twice").inner_text().startswith("ok")
        assert server.get("/history/conversations").status_code == 404
        assert [file.name for file in tmp_path.iterdir()] == []


def test_settings_of_two_conversations_in_a_row_are_saved(page: PageDriver) -> None:
    for question in ("Left", "Right"):
        page.new_chat()
        page.answered(question)
        page.wait_idle()
    page.click("Settings of this conversation")
    temperature = page.get_by_label("Temperature")
    temperature.fill("0.2")
    entry(page, "Left").locator(".entry").click()
    page.locator(".bubble", has_text="Left").wait_for()
    temperature.fill("0.4")  # before the other one is saved
    history = history_of(page.server)

    def saved() -> dict[str, Any]:
        return {c.title: c.settings.get("sampling") for c in history.conversations("")}

    wait_until(lambda: saved().get("Left") == {"temperature": "0.4"})
    wait_until(lambda: saved()["Right"] == {"temperature": "0.2"})


def test_a_conversation_chosen_while_offline_does_not_replace_a_later_one(page: PageDriver) -> None:
    page.answered("Far away")
    page.wait_idle()
    page.new_chat()
    page.route("**/*", lambda route: route.abort())
    entry(page, "Far away").locator(".entry").click()
    page.locator(".offline").wait_for()
    page.click("New chat", at=0)
    page.unroute("**/*")
    page.locator(".offline").wait_for(state="detached")
    page.errors.clear()
    page.wait_for_load_state("networkidle")
    assert page.locator(".bubble").count() == 0
