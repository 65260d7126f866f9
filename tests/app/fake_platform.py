"""A platform that notes what the app asks of it, and lets a test press its hotkey or its icon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxinfer.app.platforms import Hotkey, Platform


class FakePlatform(Platform):
    """Everything works, but for what `missing` names, which fails as a guarded part does.

    Attributes:
        said: messages to the user.
        copied: texts on the clipboard, the last one last.
        titles: beside the icon, the one that shows last.
        press_hotkey, click, drop, reopen, escape: what the app wants to be called.
    """

    def __init__(self, *, missing: bool = False) -> None:
        self.missing = missing
        self.said: list[tuple[str, str]] = []
        self.copied: list[str] = []
        self.titles: list[str] = []
        self.hotkey: Hotkey | None = None
        self.at_login = False
        self.placed: list[Any] = []
        self.front_window: Any = None
        self.press_hotkey: Callable[[], object] = lambda: None
        self.click: Callable[[], object] = lambda: None
        self.drop: Callable[[list[Path]], object] = lambda _: None
        self.reopen: Callable[[], object] = lambda: None
        self.escape: Callable[[], object] = lambda: None

    def set_title(self, icon: Any, text: str) -> None:
        self.titles.append(text)

    def on_click(self, icon: Any, action: Callable[[], object]) -> None:
        self.click = action

    def on_drop(self, icon: Any, action: Callable[[list[Path]], object]) -> None:
        self.drop = action

    def on_reopen(self, app: Any, action: Callable[[], object]) -> None:
        self.reopen = action

    def on_escape(self, window: Any, action: Callable[[], object]) -> None:
        self.escape = action

    def watch_links(self, web: Any, may_follow: Callable[[str], bool]) -> None:
        web.on_navigation_starting = lambda _, url, **__: may_follow(url)

    def set_hotkey(self, hotkey: Hotkey | None, action: Callable[[], object]) -> bool:
        if not self.missing:
            self.hotkey, self.press_hotkey = hotkey, action
        return not self.missing

    def bring_to_front(self, window: Any) -> None:
        self.front_window = window

    def place(self, window: Any, icon: Any) -> None:
        self.placed.append(icon)

    def starts_at_login(self) -> bool:
        return self.at_login

    def start_at_login(self, on: bool) -> bool:
        self.at_login = on and not self.missing
        return self.at_login

    def notify(self, title: str, text: str) -> None:
        self.said.append((title, text))

    def copy(self, text: str) -> None:
        self.copied.append(text)

    def screenshot(self, path: Path) -> bool:
        if not self.missing:
            path.write_bytes(b"a picture")
        return not self.missing
