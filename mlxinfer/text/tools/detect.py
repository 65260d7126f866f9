"""The registry of tool-call formats, and which of them a model uses."""

from ...errors import InvalidRequestError, TemplateError
from ..template import ChatTemplate
from ..tokenizer import Tokenizer
from .format import Clues, ToolFormat
from .gemma import FUNCTION_GEMMA, GEMMA4
from .generic import GENERIC
from .json_calls import Hermes, Llama, Mistral
from .probe import WrittenCalls, reads_back, template_format, written_calls
from .pythonic import GEMMA3, LFM2, LLAMA_PYTHONIC
from .token_calls import DeepSeek, Harmony, Kimi
from .xml_calls import DSML, MINIMAX, Glm, QwenXml

FORMATS: tuple[ToolFormat, ...] = (  # the first one that is detected counts: special ones first
    MINIMAX,
    DSML,
    GEMMA4,
    FUNCTION_GEMMA,
    Harmony(),
    Kimi(),
    Glm(),
    LFM2,
    QwenXml(),
    DeepSeek(),
    Mistral(),
    Hermes(),
    LLAMA_PYTHONIC,
    Llama(),
    GEMMA3,
)


def tool_format(name: str) -> ToolFormat:
    """Return the format of this name.

    Raises:
        InvalidRequestError: there is none.
    """
    known = (*FORMATS, GENERIC)
    for each in known:
        if each.name == name:
            return each
    names = ", ".join(sorted(each.name for each in known))
    raise InvalidRequestError(
        f"tool_format is {name!r}; expected auto, {names}.", param="tool_format"
    )


def detect_tools(tokenizer: Tokenizer, name: str = "auto") -> ToolFormat:
    """Return the format in which the model writes calls.

    A known format that tokens or template show counts if it reads the calls that the template
    writes. Otherwise the format is read off the template (`probe`), and where that shows none the
    known format counts nevertheless, since several templates write no calls. The last resort,
    also for a template that knows no tools, is the generic form.

    Args:
        tokenizer: of the model.
        name: of a format, for models that "auto" does not recognise.

    Raises:
        InvalidRequestError: there is no format of this name.
    """
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    tokens = frozenset(token.content for token in tokenizer.added_tokens.values())
    clues = Clues(template="\n".join(sources), tokens=tokens)
    if name != "auto":
        return _variant(tool_format(name), clues)
    if tokenizer.template is None or not tokenizer.template.reads("tools"):
        return GENERIC
    written = written_calls(tokenizer)
    shown = [known for known in FORMATS if known.detect(clues)]
    if written is not None:
        found = read_format(written, shown)
        if found is not None:
            return _variant(found, clues)
    return _variant(shown[0], clues) if shown else GENERIC


def read_format(written: WrittenCalls, shown: list[ToolFormat]) -> ToolFormat | None:
    """Return the format of calls that a template has written, None where no format reads them.

    Args:
        written: the calls.
        shown: known formats that tokens or template show, which are tried first.
    """
    for known in shown:
        if reads_back(known, written):
            return known
    found = template_format(written)
    if found is not None:
        return found
    return next((known for known in FORMATS if reads_back(known, written)), None)


def _variant(found: ToolFormat, clues: Clues) -> ToolFormat:
    """Return the format as this template writes it, where there are several ways."""
    if isinstance(found, Mistral):
        return Mistral(listed="[ARGS]" not in clues.template)
    if isinstance(found, DeepSeek):
        return DeepSeek(fenced="```json" in clues.template)
    return found


def require_template(template: ChatTemplate | None, format: ToolFormat) -> None:
    """Raise TemplateError unless tools can be presented to the model, in its template or as text.

    Args:
        template: of the model.
        format: how it writes calls; a form that only a template can ask for needs one with tools.
    """
    if template is None:
        raise TemplateError(
            "The model has no chat template, which tools need; leave `tools` out, or use a model "
            "made for chat."
        )
    if format is not GENERIC and not template.reads("tools"):
        raise TemplateError(
            f"The model's chat template does not know tools, so it cannot ask for calls in the "
            f"form {format.name!r}; leave tool_format out for the generic form."
        )
