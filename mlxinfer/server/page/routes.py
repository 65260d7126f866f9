"""All routes of the page beside its files: history, models, PDFs, settings, as far as there are."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ... import __version__
from ...history import History
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import Service, Workers
from ..http.replies import Reply, json_body
from .conversations import ConversationRoutes
from .library import RECIPES, Library, LibraryRoutes
from .pdf import can_read_pdf, pdf_endpoint


class Features(msgspec.Struct, kw_only=True):
    """What this server offers to the page."""

    version: str
    history: bool
    hub: bool
    pdf: bool
    admin: bool  # the key may see and do what is under /admin and /hub
    recipes: tuple[str, ...] = RECIPES


class Setting(msgspec.Struct, kw_only=True):
    """An effective setting of the server, and where it comes from."""

    name: str
    value: Any
    origin: str


class PageRoutes:
    """What one server offers to the page.

    Args:
        history: where conversations are kept; None: nowhere.
        library: models of this disk and of the hub; None: neither.
        settings: of the server.
    """

    def __init__(
        self,
        history: History | None = None,
        library: Library | None = None,
        settings: Sequence[Setting] = (),
    ) -> None:
        self._history = history
        self._library = None if library is None else LibraryRoutes(library)
        self._settings = list(settings)
        self._workers = Workers(1)
        self._pdf = can_read_pdf()

    async def features(self, call: Call, _: None) -> Reply:
        """What this server offers to the page."""
        is_admin = call.service.config.keys.administers(call.log.get("key"))
        return json_body(
            Features(
                version=__version__,
                history=self._history is not None,
                hub=self._library is not None and is_admin,
                pdf=self._pdf,
                admin=is_admin,
            )
        )

    async def settings(self, call: Call, _: None) -> Reply:
        """The effective settings with their origin; keys are not shown."""
        return json_body({"data": self._settings})

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Of this server."""
        found: tuple[Endpoint, ...] = (
            Endpoint(
                method="GET",
                path="/page/features",
                handler=self.features,
                summary="What this server offers to the page.",
                answer=Features,
            ),
            Endpoint(
                method="GET",
                path="/admin/settings",
                handler=self.settings,
                summary="The effective settings, and where each comes from.",
            ),
        )
        if self._history is not None:
            found += ConversationRoutes(self._history).endpoints()
        if self._library is not None:
            found += self._library.endpoints()
        return (*found, pdf_endpoint(self._workers)) if self._pdf else found

    def restore(self, service: Service) -> None:
        """Serve the models that were added on the page before."""
        if self._library is not None:
            self._library.restore(service)

    def close(self) -> None:
        """End jobs and threads, and close the history."""
        if self._library is not None:
            self._library.close()
        self._workers.close()
        if self._history is not None:
            self._history.close()
