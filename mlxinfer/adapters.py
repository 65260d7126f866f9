"""LLM's adapters: loaded and unloaded by name while requests run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .boundary import public
from .retrieval import Retrieval

if TYPE_CHECKING:
    from .session.session import Session


class Adapters(Retrieval):
    """The methods of LLM for adapters."""

    if TYPE_CHECKING:

        @property
        def _generator(self) -> "Session": ...

    @public
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter: from now on requests may name it (`adapter=name`), in any mix.

        Answers are those of the model that the adapter is merged into. Requests run on meanwhile.

        Args:
            name: letters, digits, ".", "_" and "-".
            path: a folder in PEFT's layout (adapter_config.json, adapter_model.safetensors: LoRA,
                rsLoRA or DoRA) or in mlx-lm's (adapters.safetensors).

        Raises:
            InvalidRequestError: the name is taken, or is none.
            InsufficientMemoryError: there is no room for it.
            AdapterNotFoundError: there is no adapter.
            CheckpointError: a file is broken, a pickle, or not for this model.
            UnsupportedModelError: it changes what cannot be changed here; the message names it.
        """
        self._generator.load_adapter(name, path)

    @public
    def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter; its memory is free when the last one has ended.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        self._generator.unload_adapter(name)

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that requests may name: each with name, kind, path and bytes."""
        return self._generator.adapters()
