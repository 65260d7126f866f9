"""The app's view of its server, and its actions. Knows no widget; every method may block."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import MlxinferError, NoServerError, ServerError, SilentServerError
from ..memory import models_limit_bytes
from ..memory.suggestions import to_begin_with
from . import settings as stored
from .client import Activity, Chat, ServerClient, Transfer, is_local, port_of
from .process import ServerProcess, StartError
from .settings import Settings

START_S = 60.0  # that a server may take until it answers
LOOK_S = 0.5  # between two looks at a start or a download that is waited for
NOT_ALLOWED = (401, 403)  # no key, or one that may not administer the server


class Phase(StrEnum):
    """State of the server's address."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LOCKED = "needs another key"
    SILENT = "does not answer"
    FOREIGN = "another program"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that is shown, at one moment."""

    url: str = ""
    phase: Phase = Phase.STOPPED
    ours: bool = False  # the app started this server, in this run or an earlier one, and may end it
    problem: str = ""  # of the last action, or why the server has ended
    activity: Activity = field(default_factory=Activity)
    rate: float | None = None  # tokens a second; None: not known yet
    hub: bool = False  # whether the server offers models of its disk and of the hub
    transfers: tuple[Transfer, ...] = ()
    chats: tuple[Chat, ...] = ()
    on_disk: tuple[str, ...] = ()
    # models that fit the server's machine, the best balance first
    suggested: tuple[Mapping[str, Any], ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the server answers."""
        return self.phase is Phase.RUNNING


class AppController:
    """One server, and the settings of the app.

    Args:
        folder: of settings, and of the server's record and log.
        process: the server that the app may start.
        notify: title and text of a message to the user.
    """

    def __init__(
        self, folder: Path, process: ServerProcess, notify: Callable[[str, str], None]
    ) -> None:
        self._place = folder / "app.json"
        self._process = process
        self._notify = notify
        self._lock = threading.Lock()  # of `refresh`
        self._features: Mapping[str, object] | None = None  # None: asked for at the next answer
        self._tokens: tuple[float, int] | None = None  # time and count of the last answer
        self._begun_s = 0.0  # of the last start
        self._stopping = False
        self._problem = ""
        self.settings = stored.load(self._place)
        self.view = View(url=self.settings.url)
        process.attach()

    @property
    def client(self) -> ServerClient:
        return ServerClient(self.settings.url, self.settings.key)

    @property
    def log_path(self) -> Path:
        return self._process.log_path

    def change(self, settings: Settings) -> None:
        """Store settings; another address is another server."""
        stored.save(self._place, settings)
        if (settings.url, settings.key) != (self.settings.url, self.settings.key):
            self._features = self._tokens = None
            self._problem = ""
            self.view = View(url=settings.url)
        self.settings = settings

    # -- the server's process ----------------------------------------------------------------------

    def start(self) -> None:
        """Start a server, unless one answers already.

        Raises:
            StartError: another program has the address, it is another machine's, or the process
                could not be started.
        """
        url = self.settings.url
        phase, _ = self._look()
        if phase in (Phase.RUNNING, Phase.LOCKED):
            return
        if phase is Phase.FOREIGN:
            raise StartError(
                f"Another program answers at {url}. End it, or choose another port in the settings."
            )
        if not is_local(url):
            raise StartError(f"{url} is another machine; start the server there.")
        self._begun_s = time.monotonic()
        self._process.start(url, port_of(url), self._environment())
        self.say("")

    def stop(self) -> None:
        """End the server that the app started."""
        self._stopping = True
        try:
            self._process.stop()
        finally:
            self._stopping = False
        self.say("")

    def end(self) -> None:
        """Let the server of the app end with the app, where the settings say so."""
        if self.settings.stop_server:
            self._process.end()

    def get(self, model: str) -> None:
        """Have a model answer: start the server, download the model and load it, where needed.

        Returns when the model is loaded, its download was cancelled, or there is no server.

        Raises:
            MlxinferError: the server cannot be started, or the download has failed.
        """
        self.say("")
        self.start()
        while (phase := self._look()[0]) is Phase.STARTING:
            time.sleep(LOOK_S)
        if phase is not Phase.RUNNING:
            return  # `refresh` says why
        if not self.client.has(model):
            self.client.download(model)
        while not self.client.has(model):
            transfers = [transfer for transfer in self.client.transfers() if transfer.name == model]
            if not transfers:
                return
            if transfers[0].error:
                raise StartError(transfers[0].error)
            time.sleep(LOOK_S)
        self.client.serve(model)
        self.client.load(model)

    def restart(self) -> None:
        """End the server that the app started, and start it again."""
        self.stop()
        self.start()

    def _environment(self) -> dict[str, str]:
        environment = {}
        if self.settings.models_folder:
            environment["HF_HUB_CACHE"] = self.settings.models_folder
        if self.settings.key:
            environment["MLXINFER_API_KEY"] = self.settings.key
        return environment

    # -- what is shown -----------------------------------------------------------------------------

    def say(self, problem: str) -> None:
        """Show a problem, or none, until the next action."""
        self._problem = problem
        self.view = replace(self.view, problem=problem)

    def refresh(self, *, everything: bool = False) -> View:
        """Look at the server.

        Args:
            everything: models on its disk and conversations too, which change rarely.
        """
        with self._lock:
            before = self.view
            phase, activity = self._look()
            self._notice_end(phase)
            view = replace(
                self.view,
                phase=phase,
                ours=self._process.alive() and self._process.url == before.url,
                activity=activity or Activity(),
                rate=self._rate(activity),
            )
            if activity is not None:
                view = self._details(view, everything=everything)
            else:
                self._features = None
                here = _for_this_machine() if is_local(view.url) else ()
                view = replace(view, transfers=(), on_disk=(), chats=(), suggested=here)
            if view.url == self.settings.url:  # else they were changed meanwhile
                self._announce(before, view)
                self.view = replace(view, problem=self._problem)  # which may have changed as well
            return self.view

    def _look(self) -> tuple[Phase, Activity | None]:
        ours = self._process.alive()
        if ours and self._stopping:
            return Phase.STOPPING, None
        starting = ours and time.monotonic() - self._begun_s < START_S
        try:
            return Phase.RUNNING, self.client.activity()
        except NoServerError:
            return (Phase.STARTING if starting else Phase.STOPPED), None
        except SilentServerError:
            return (Phase.STARTING if starting else Phase.SILENT), None
        except ServerError as error:
            return (Phase.LOCKED if error.refused in NOT_ALLOWED else Phase.FOREIGN), None
        except (KeyError, TypeError):  # JSON of another program
            return Phase.FOREIGN, None

    def _notice_end(self, phase: Phase) -> None:
        """Say why a server of the app has ended, unless it was asked to."""
        if self._process.url is None or self._process.alive() or self._stopping:
            return
        reason = self._process.forget()
        if phase is Phase.STOPPED or phase is Phase.FOREIGN:
            self.say(f"The server has ended: {reason}")
            self._notify("The server has ended", reason)

    def _rate(self, activity: Activity | None) -> float | None:
        now_s = time.monotonic()
        before, self._tokens = self._tokens, None if activity is None else (now_s, activity.tokens)
        if before is None or activity is None or activity.tokens < before[1]:
            return None
        return (activity.tokens - before[1]) / max(now_s - before[0], 1e-3)

    def _details(self, view: View, *, everything: bool) -> View:
        try:
            if self._features is None:
                self._features, everything = self.client.features(), True
            hub, history = bool(self._features["hub"]), bool(self._features["history"])
            view = replace(view, hub=hub, transfers=self.client.transfers() if hub else ())
            if everything and hub:
                on_disk, fitting = self.client.models_on_disk(), self.client.suggestions()
                view = replace(view, on_disk=on_disk, suggested=fitting)
            if everything and history:
                view = replace(view, chats=self.client.chats())
        except MlxinferError as error:  # the server has ended meanwhile, or refuses
            self.say(str(error))
        return view

    def _announce(self, before: View, after: View) -> None:
        was_open = {transfer.id for transfer in before.transfers if transfer.open}
        for transfer in after.transfers:
            if transfer.id in was_open and transfer.state == "done":
                self._notify(f"{transfer.kind.capitalize()} complete", transfer.name)
            elif transfer.id in was_open and transfer.state == "failed":
                self._notify(
                    f"{transfer.kind.capitalize()} failed", f"{transfer.name}: {transfer.error}"
                )


@cache
def _for_this_machine() -> tuple[Mapping[str, Any], ...]:
    limit_bytes = models_limit_bytes()
    return tuple(suggestion.as_dict(limit_bytes) for suggestion in to_begin_with(limit_bytes))
