"""The parts of macOS that Toga does not offer, through rubicon-objc and Carbon.

No Mac has run this module yet. Each part is guarded and the app works without any of them.
Sources: Apple's documentation of AppKit (NSStatusItem, NSEvent, NSWindow), ServiceManagement
(SMAppService) and Carbon Event Manager (RegisterEventHotKey).
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rubicon.objc import SEL, NSObject, ObjCClass, objc_method, objc_property
from rubicon.objc.runtime import load_library
from toga_cocoa.app import AppDelegate

from .platforms import ACCENT, Hotkey, LoginAgent, Look, Platform, below, guarded, run_quietly

VARIABLE_LENGTH = -1.0  # NSVariableStatusItemLength
IMAGE_LEFT = 2  # NSImageLeft
LEFT_UP, RIGHT_UP = 1 << 2, 1 << 4  # masks of mouse events
RIGHT_EVENTS = (3, 4)  # NSEventTypeRightMouseDown, NSEventTypeRightMouseUp
CONTROL = 1 << 18  # NSEventModifierFlagControl
FLOATING = 3  # NSFloatingWindowLevel
EVERY_SPACE = 1 << 0 | 1 << 8  # NSWindowCollectionBehavior: all spaces, beside full screens
CORNER, BORDER = 10, 2  # points, of a card
FILE_NAMES, COPY = "NSFilenamesPboardType", 1  # NSDragOperationCopy
LOGIN_ENABLED = 1  # SMAppServiceStatusEnabled
CARBON = "/System/Library/Frameworks/Carbon.framework/Carbon"
KEYBOARD, HOTKEY_PRESSED = int.from_bytes(b"keyb", "big"), 5
CARBON_MODIFIERS = {"cmd": 0x100, "shift": 0x200, "alt": 0x800, "ctrl": 0x1000}
# Virtual key codes of an ANSI keyboard (HIToolbox/Events.h)
LETTERS = dict(
    zip("asdfhgzxcv", (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), strict=True),
    **dict(zip("bqweryt", (11, 12, 13, 14, 15, 16, 17), strict=True)),
    **dict(zip("oupiljknm", (31, 32, 35, 34, 37, 38, 40, 45, 46), strict=True)),
)
DIGITS = dict(zip("1234567890", (18, 19, 20, 21, 23, 22, 26, 28, 25, 29), strict=True))
FUNCTIONS = dict(
    zip(
        (f"f{number}" for number in range(1, 13)),
        (122, 120, 99, 118, 96, 97, 98, 100, 101, 109, 103, 111),
        strict=True,
    )
)
KEY_CODES = {"space": 49, **LETTERS, **DIGITS, **FUNCTIONS}
NOTIFY = "on run {title, message}\ndisplay notification message with title title\nend run"


class ReopenDelegate(AppDelegate):
    """Toga's delegate, which also notices that a running app is opened again."""

    reopen = objc_property(object)

    @objc_method
    def applicationShouldHandleReopen_hasVisibleWindows_(self, app, visible: bool) -> bool:  # type: ignore[no-untyped-def]
        """Source: NSApplicationDelegate."""
        self.reopen()
        return False


class ClickTarget(NSObject):
    """The target of the status item's button."""

    clicked = objc_property(object)

    @objc_method
    def onClick_(self, sender) -> None:  # type: ignore[no-untyped-def]
        """A click with either button."""
        self.clicked()


class DropTarget(NSObject):
    """The delegate of the status item's window, which hands it what is dragged there.

    Source: NSDraggingDestination.
    """

    dropped = objc_property(object)

    @objc_method
    def draggingEntered_(self, info) -> ctypes.c_ulong:  # type: ignore[no-untyped-def]
        """Take a copy."""
        return COPY  # type: ignore[return-value]  # which rubicon-objc makes of it

    @objc_method
    def performDragOperation_(self, info) -> bool:  # type: ignore[no-untyped-def]
        """The files of the pasteboard."""
        names = info.draggingPasteboard.propertyListForType(FILE_NAMES)
        self.dropped([Path(str(name)) for name in names or ()])
        return True


class EventTypeSpec(ctypes.Structure):
    """Carbon's."""

    _fields_ = (("eventClass", ctypes.c_uint32), ("eventKind", ctypes.c_uint32))


class EventHotKeyID(ctypes.Structure):
    """Carbon's."""

    _fields_ = (("signature", ctypes.c_uint32), ("id", ctypes.c_uint32))


class CocoaPlatform(Platform):
    """macOS. Esc comes from the page as a link (`watch_links`) where the page has no use for it.

    Args:
        bundled: the app runs out of an .app, so that SMAppService knows it.
    """

    def __init__(self, *, bundled: bool) -> None:
        self._bundled = bundled
        self._agent = LoginAgent(home=Path.home())
        self._kept: dict[str, Any] = {}  # what Objective-C and Carbon refer to without holding it
        self._hotkey = ctypes.c_void_p()

    @guarded()
    def style_icon(self, icon: Any) -> None:
        """Make the image a template, which the system colours."""
        icon._impl.native.button.image.setTemplate(True)

    @guarded()
    def style(self, widget: Any, look: Look) -> None:
        """By colours of the system, which are others in a dark window, and the page's accent."""
        native, colors = widget._impl.native, ObjCClass("NSColor")
        appearance = ObjCClass("NSApplication").sharedApplication.effectiveAppearance
        red, green, blue = bytes.fromhex(ACCENT["Dark" in str(appearance.name)][1:])
        accent = colors.colorWithSRGBRed(red / 255, green=green / 255, blue=blue / 255, alpha=1.0)
        if look is Look.PRIMARY:
            native.keyEquivalent = "\r"
            native.bezelColor = accent
        elif look is Look.QUIET:
            native.textColor = colors.secondaryLabelColor
        elif look in (Look.CARD, Look.CHOSEN):
            native.layer.cornerRadius = CORNER
            native.layer.backgroundColor = colors.quaternaryLabelColor.CGColor
            native.layer.borderColor = accent.CGColor
            native.layer.borderWidth = BORDER if look is Look.CHOSEN else 0

    @guarded()
    def set_title(self, icon: Any, text: str) -> None:
        """Show a text right of the image."""
        native = icon._impl.native
        native.length = VARIABLE_LENGTH
        native.button.imagePosition = IMAGE_LEFT
        native.button.title = text

    @guarded()
    def on_click(self, icon: Any, action: Callable[[], object]) -> None:
        """Take the menu from the item, which would open it at any click, and show it by hand."""
        native = icon._impl.native
        menu = native.menu
        application = ObjCClass("NSApplication").sharedApplication

        def clicked() -> None:
            event = application.currentEvent
            if event.type in RIGHT_EVENTS or event.modifierFlags & CONTROL:
                native.menu = menu
                native.button.performClick(None)
                native.menu = None
            else:
                action()

        target = ClickTarget.alloc().init()
        target.clicked = clicked
        self._kept["click"] = target
        native.menu = None
        native.button.target = target
        native.button.action = SEL("onClick:")
        native.button.sendActionOn(LEFT_UP | RIGHT_UP)

    @guarded()
    def on_drop(self, icon: Any, action: Callable[[list[Path]], object]) -> None:
        """The window of the item's button takes files, and asks its delegate."""
        target = DropTarget.alloc().init()
        target.dropped = action
        self._kept["drop"] = target
        window = icon._impl.native.button.window
        window.registerForDraggedTypes([FILE_NAMES])
        window.delegate = target

    @guarded()
    def on_reopen(self, app: Any, action: Callable[[], object]) -> None:
        """Replace Toga's delegate by one that does more."""
        delegate = ReopenDelegate.alloc().init()
        delegate.impl, delegate.interface = app._impl, app
        delegate.native, delegate.reopen = app._impl.native, action
        app._impl.appDelegate = delegate
        app._impl.native.setDelegate(delegate)

    @guarded()
    def watch_links(self, web: Any, may_follow: Callable[[str], bool]) -> None:
        """Toga asks before the web view goes anywhere."""
        web.on_navigation_starting = lambda _, url, **__: may_follow(url)

    @guarded(missing=False)
    def set_hotkey(self, hotkey: Hotkey | None, action: Callable[[], object]) -> bool:
        """Register with Carbon, which needs no permission and keeps the key from other programs."""
        carbon = ctypes.CDLL(CARBON)
        if self._hotkey:
            carbon.UnregisterEventHotKey(self._hotkey)
            self._hotkey = ctypes.c_void_p()
        if hotkey is None:
            return True
        carbon.GetApplicationEventTarget.restype = ctypes.c_void_p
        target = ctypes.c_void_p(carbon.GetApplicationEventTarget())
        self._listen(carbon, target, action)
        modifiers = sum(CARBON_MODIFIERS[name] for name in hotkey.modifiers)
        id = EventHotKeyID(int.from_bytes(b"mlxi", "big"), 1)
        reference = ctypes.c_void_p()
        status = carbon.RegisterEventHotKey(
            ctypes.c_uint32(KEY_CODES[hotkey.key]),
            ctypes.c_uint32(modifiers),
            id,
            target,
            ctypes.c_uint32(0),
            ctypes.byref(reference),
        )
        self._hotkey = reference
        return bool(status == 0)

    def _listen(
        self, carbon: ctypes.CDLL, target: ctypes.c_void_p, action: Callable[[], object]
    ) -> None:
        self._kept["pressed"] = action
        if "handler" in self._kept:
            return
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

        def pressed(*_: object) -> int:
            self._kept["pressed"]()
            return 0

        handler = kind(pressed)
        spec = EventTypeSpec(KEYBOARD, HOTKEY_PRESSED)
        carbon.InstallEventHandler(
            target, handler, ctypes.c_uint32(1), ctypes.byref(spec), None, None
        )
        self._kept["handler"] = handler

    @guarded()
    def bring_to_front(self, window: Any) -> None:
        """An app without a Dock icon is not made active by its windows."""
        ObjCClass("NSApplication").sharedApplication.activateIgnoringOtherApps(True)
        window._impl.native.makeKeyAndOrderFront(None)

    @guarded()
    def place(self, window: Any, icon: Any) -> None:
        """Below the icon where that is on the screen, above other windows, in every space."""
        native = window._impl.native
        native.level = FLOATING
        native.collectionBehavior = EVERY_SPACE
        if icon is None:
            return
        frame = icon._impl.native.button.window.frame
        screen = icon._impl.native.button.window.screen
        if screen is None:  # hidden behind the notch or for want of room
            return
        edges = (screen.frame.origin.x, screen.frame.origin.x + screen.frame.size.width)
        primary = ObjCClass("NSScreen").screens[0].frame.size.height  # Cocoa counts from below
        bar_bottom = primary - frame.origin.y
        sides = (frame.origin.x, frame.origin.x + frame.size.width)
        window.position = below(sides, bar_bottom, edges, tuple(window.size))

    @guarded(missing=False)
    def starts_at_login(self) -> bool:
        """Of the bundle the system's own answer, else whether the agent is there."""
        if not self._bundled:
            return self._agent.path.exists()
        return bool(self._service().status == LOGIN_ENABLED)

    @guarded(missing=False)
    def start_at_login(self, on: bool) -> bool:
        """Register the bundle as a login item, or write an agent for an app without one."""
        if not self._bundled:
            return self._agent.set(on)
        service = self._service()
        if on:
            service.registerAndReturnError(None)
        else:
            service.unregisterAndReturnError(None)
        return bool(service.status == LOGIN_ENABLED)

    def _service(self) -> Any:
        load_library("ServiceManagement")
        return ObjCClass("SMAppService").mainAppService

    @guarded()
    def notify(self, title: str, text: str) -> None:
        """By osascript, which needs no bundle; the texts are arguments, not code."""
        run_quietly(["/usr/bin/osascript", "-e", NOTIFY, title, text])

    @guarded()
    def copy(self, text: str) -> None:
        """By pbcopy."""
        run_quietly(["/usr/bin/pbcopy"], text)

    @guarded(False)
    def screenshot(self, path: Path) -> bool:
        """By screencapture; a choice that Esc ends leaves no file."""
        run_quietly(["/usr/sbin/screencapture", "-i", "-x", str(path)])
        return path.is_file()
