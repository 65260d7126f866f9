"""Model names on the command line to a loaded LLM, with a progress bar for a download."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backend import require_mlx
from ..errors import InvalidRequestError, shown
from ..library import resolve
from ..progress import progress_bars

if TYPE_CHECKING:
    from ..llm import LLM
    from ..pooling.config import PoolingConfig


ADAPTER = "adapter"  # what the adapter of --adapter is called


def open_llm(name: str, *, adapter: str | None = None, **arguments: Any) -> "LLM":
    """Load a model and an adapter, downloading the model first if it is not here.

    Raises:
        InvalidRequestError: the name is the address of a server.
        the errors of hub and LLM.
    """
    if name.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"{shown(name)} is the address of a server, and this command runs a model here; "
            f"expected the name of a model or a folder. In Python, LLM({shown(name)}) asks the "
            "server.",
            param="model",
        )
    require_mlx()
    from ..llm import LLM

    llm = LLM(name, **arguments)
    if adapter is not None:
        try:
            llm.load_adapter(ADAPTER, adapter)
        except BaseException:  # also Ctrl-C: the memory is given back
            llm.close()
            raise
    return llm


def fetch(name: str, *, download: bool = True) -> Path:
    """resolve() with a progress bar."""
    with progress_bars() as show:
        return resolve(name, show, download=download)


def has_chat_template(folder: Path | str) -> bool:
    """Whether the tokenizer comes with a template for conversations."""
    from ..text.tokenizer_files import read_tokenizer_files

    return bool(read_tokenizer_files(Path(folder)).templates)


def pooling_of(folder: Path, name: str, task: str = "auto") -> "PoolingConfig | None":
    """Return how a model pools; None if it generates, or if files are wrong, as loading says."""
    from ..errors import ModelError
    from ..pooling.config import read_pooling

    try:
        return read_pooling(folder, name, task)
    except ModelError:
        return None
