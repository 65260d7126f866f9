"""Pictures on the page: attached, pasted, dropped, sent, kept; and models that do not see."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from page_driver import PageDriver, window
from page_server import SeeingPageServer
from PIL import Image
from test_page_access import check_access

from tests.waiting import wait_until

pytestmark = pytest.mark.ci

MOST_MB = 8  # of a request: the page computes with it, and a small one is quick
SHORT = {"Most_tokens": "4"}  # a random model never ends by itself
THUMBS = ".attached img"
SENT = ".bubble .pictures img"
GIVE = """([kind, name, data]) => {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const given = new DataTransfer();
    given.items.add(new File([bytes], name, { type: "image/png" }));
    const fields = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { ...fields, clipboardData: given })
        : new DragEvent("drop", { ...fields, dataTransfer: given });
    document.getElementById("question").dispatchEvent(event);
}"""


def encoded(format: str, size: tuple[int, int] = (60, 40), colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format)
    return file.getvalue()


def noise(size: tuple[int, int]) -> bytes:
    """A JPEG that no encoder makes small, its camera held upright."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


def attach(page: PageDriver, name: str, data: bytes, type: str = "image/png") -> None:
    file = {"name": name, "mimeType": type, "buffer": data}
    page.locator("input[type=file]").set_input_files(file)


def sent_picture(page: PageDriver) -> Image.Image:
    """The picture in the conversation, as the page has it and sends it."""
    url = page.locator(SENT).last.get_attribute("src")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingPageServer]:
    folder = tmp_path_factory.mktemp("see")
    with SeeingPageServer(folder, max_body_bytes=MOST_MB << 20) as server:
        yield server


@pytest.fixture
def page(
    profile: Any, seeing: SeeingPageServer, request: pytest.FixtureRequest
) -> Iterator[PageDriver]:
    with PageDriver(profile, seeing, **getattr(request, "param", {})) as driver:
        driver.open()
        driver.evaluate("localStorage.setItem('mlxinfer.model', 'tiny-see')")
        driver.open()
        driver.set_up(**SHORT)
        yield driver


def seen(page: PageDriver) -> int:
    return int(page.server.model.session.stats()["pictures"]["seen"])


def test_a_picture_is_shown_sent_seen_and_kept(page: PageDriver) -> None:
    before = seen(page)
    attach(page, "cat.png", encoded("PNG"))
    page.wait_for_selector(THUMBS)
    status = page.get_by_role("status")
    assert status.inner_text() == "Attached cat.png"
    check_access(page)
    answer = page.answered("What is it?")
    assert answer.locator(".error").count() == 0
    assert seen(page) == before + 1
    assert page.locator(THUMBS).count() == 0
    picture = page.get_by_role("article", name="You").get_by_role("img", name="Picture cat.png")
    assert picture.evaluate("e => e.naturalWidth") == 60
    check_access(page)
    page.reload()
    page.locator(".entry").first.click()
    page.wait_for_selector(SENT)
    assert sent_picture(page).size == (60, 40)
    page.locator(".pictures button").click()
    page.get_by_role("dialog", name="cat.png").get_by_role("img").wait_for()
    check_access(page)
    page.keyboard.press("Escape")
    page.answered("And now?")  # the stored picture is sent again
    assert page.locator("article .error").count() == 0


@pytest.mark.parametrize(("kind", "colour"), [("paste", "blue"), ("drop", "green")])
def test_pictures_are_pasted_dropped_and_removed(page: PageDriver, kind: str, colour: str) -> None:
    data = base64.b64encode(encoded("PNG", colour=colour)).decode()
    for name in ("one.png", "two.png"):
        page.evaluate(GIVE, [kind, name, data])
        page.get_by_role("img", name=f"Picture {name}").wait_for()
    page.click("Remove one.png")
    assert page.locator(THUMBS).count() == 1
    assert page.get_by_role("status").inner_text() == "Removed one.png"
    assert page.evaluate("document.activeElement.id") == "question"
    before = seen(page)
    page.click("Send")  # a picture needs no words
    wait_until(lambda: page.locator("article.assistant").count() == 1)
    page.wait_idle()
    assert page.locator("article .error").count() == 0
    assert seen(page) == before + 1
    page.wait_for_selector(".entry:has-text('two.png')")


def test_large_photos_are_turned_and_scaled_down(page: PageDriver) -> None:
    data = noise((2600, 1300))
    attach(page, "photo.jpg", data, "image/jpeg")
    page.wait_for_selector(THUMBS)
    page.answered("Which?")
    sent = sent_picture(page)
    assert (sent.size, sent.format) == ((1024, 2048), "JPEG")
    url = page.locator(SENT).get_attribute("src")
    assert len(url) < len(data) / 2


@pytest.mark.alike
@pytest.mark.parametrize(("format", "sent"), [("WEBP", "WEBP"), ("JPEG", "JPEG"), ("GIF", "PNG")])
def test_small_pictures_go_as_they_are(page: PageDriver, format: str, sent: str) -> None:
    data = encoded(format)
    attach(page, f"a.{format.lower()}", data, f"image/{format.lower()}")
    page.wait_for_selector(THUMBS)
    page.answered("What?")
    url = page.locator(SENT).get_attribute("src")
    assert sent_picture(page).format == sent
    assert (base64.b64decode(url.partition(",")[2]) == data) == (sent == format)


def test_what_png_makes_too_large_goes_as_jpeg(page: PageDriver) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(noise((1500, 1000)))).save(file, "PNG")
    attach(page, "noise.png", file.getvalue())
    page.wait_for_selector(THUMBS)
    page.answered("What?")
    sent = sent_picture(page)
    assert (sent.size, sent.format) == ((1500, 1000), "JPEG")


def test_files_stay_in_the_order_in_which_they_came(page: PageDriver) -> None:
    large, small = noise((2000, 1500)), b"notes"
    attach(page, "first.jpg", large, "image/jpeg")
    attach(page, "second.txt", small, "text/plain")
    page.wait_for_selector(".attached:has-text('second.txt')")
    labels = [e.get_attribute("aria-label") for e in page.locator(".attached button").all()]
    assert labels == ["Remove first.jpg", "Remove second.txt"]


def test_cells_of_a_table_are_pasted_as_text(page: PageDriver) -> None:
    """Programs for tables and texts put a picture of what is copied beside it."""
    prevented = page.evaluate(
        """() => {
            const given = new DataTransfer();
            given.setData("text/plain", "1\\t2");
            given.setData("text/html", "<table>");
            given.items.add(new File([new Uint8Array(9)], "cells.png", { type: "image/png" }));
            const fields = { bubbles: true, cancelable: true, clipboardData: given };
            const event = new ClipboardEvent("paste", fields);
            document.getElementById("question").dispatchEvent(event);
            return event.defaultPrevented;
        }"""
    )
    assert prevented is False
    assert page.locator(".attached, .notice").count() == 0


def test_a_model_that_was_never_loaded_may_see(page: PageDriver) -> None:
    def unknown(route: Any) -> None:
        reply = route.fetch()
        cards = reply.json()
        for item in cards["data"]:
            item["capabilities"] = None
        route.fulfill(response=reply, json=cards)

    page.route("**/v1/models", unknown)
    page.reload()
    attach(page, "cat.png", encoded("PNG"))
    page.wait_for_selector(".hint:has-text('Whether tiny-see sees pictures is known')")
    page.unroute("**/v1/models")
    page.set_up(**SHORT)
    page.answered("What is it?")
    attach(page, "cat.png", encoded("PNG"))
    page.wait_for_selector(THUMBS)  # the page knows now
    assert page.locator(".hint").count() == 0


def test_a_broken_picture_is_refused_by_name(page: PageDriver) -> None:
    attach(page, "broken.png", b"\x89PNG\r\n\x1a\n broken")
    page.wait_for_selector(".notice:has-text('broken.png is no picture')")
    assert page.locator(".attached").count() == 0


def test_a_model_that_does_not_see_says_so_before_sending(page: PageDriver) -> None:
    attach(page, "cat.png", encoded("PNG"))
    page.wait_for_selector(THUMBS)
    assert page.locator(".blind").count() == 0
    page.get_by_label("Model", exact=True).select_option("demo")
    said = page.locator(".blind")
    said.wait_for()
    assert said.get_attribute("role") == "alert"
    assert "demo does not see pictures" in said.inner_text()
    page.fill("#question", "What is it?")
    assert page.get_by_role("button", name="Send").is_disabled()
    page.press("#question", "Enter")
    assert page.locator("article").count() == 0
    check_access(page)
    page.get_by_label("Model", exact=True).select_option("tiny-see")
    said.wait_for(state="detached")
    page.answered("What is it?")
    page.get_by_label("Model", exact=True).select_option("demo")
    page.wait_for_selector(".blind:has-text('begin a new chat')")
    page.click("New chat")
    said.wait_for(state="detached")


def test_a_request_that_is_too_large_is_refused_before_sending(page: PageDriver) -> None:
    page.fill("#question", "What is it?")
    for name in ("a.txt", "b.txt"):
        attach(page, name, b"x" * ((MOST_MB + 1) << 19), "text/plain")
    said = page.locator(".blind")
    said.wait_for()
    assert said.inner_text().startswith(f"This server takes {MOST_MB} MB at once")
    assert page.get_by_role("button", name="Send").is_disabled()
    check_access(page)
    page.click("Remove b.txt")
    said.wait_for(state="detached")
    assert page.get_by_role("button", name="Send").is_enabled()


@window(size=(360, 480), color_scheme="dark")
def test_the_small_window_shows_pictures(page: PageDriver) -> None:
    page.open("/?compact=1")
    assert page.evaluate("document.getElementById('question').clientHeight") < 40
    page.set_up(**SHORT)
    for number in range(6):
        attach(page, f"wide-{number}.png", encoded("PNG", (400, 100)))
    wait_until(lambda: page.locator(THUMBS).count() == 6)
    check_access(page)
    page.answered("Which?")
    check_access(page)


def test_a_picture_that_is_no_longer_kept_is_named(page: PageDriver) -> None:
    talk = {"conversation": "forgotten-1", "role": "user", "content": "Look"}
    details = {"pictures": [{"name": "old.png", "url": None}]}
    saved = page.server.post("/history/messages", {**talk, "id": "message-1", "details": details})
    assert saved.status_code == 200
    page.evaluate("location.hash = '#chat/forgotten-1'")
    page.wait_for_selector(".bubble:has-text('old.png is no longer kept')")
    check_access(page)


def test_a_copied_conversation_names_pictures_and_a_request_has_them(page: PageDriver) -> None:
    attach(page, "cat.png", encoded("PNG"))
    page.wait_for_selector(THUMBS)
    page.answered("What is it?")
    choose = page.get_by_label("Copy or save the conversation")
    choose.select_option("markdown")
    wait_until(lambda: "## You\n\n[picture: cat.png]\n\nWhat is it?" in page.clipboard())
    choose.select_option("curl")
    wait_until(lambda: page.clipboard().startswith("curl "))
    assert '"url": "data:image/png;base64,' in page.clipboard()


def test_the_field_grows_with_wrapped_text(page: PageDriver) -> None:
    height = "document.getElementById('question').clientHeight"
    one = page.evaluate(height)
    page.fill("#question", "words " * 60)
    assert page.evaluate(height) > 2 * one
    page.fill("#question", "words " * 6000)
    assert page.evaluate(height) <= 0.41 * 760
    page.fill("#question", "")
    assert page.evaluate(height) == one
