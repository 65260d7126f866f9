"""The registry of tool-call formats, and which of them a model uses."""

from ...errors import InvalidRequestError, TemplateError
from ..tokenizer import Tokenizer
from .format import Clues, ToolFormat
from .gemma import FUNCTION_GEMMA, GEMMA4
from .json_calls import Hermes, Llama, Mistral
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
    for known in FORMATS:
        if known.name == name:
            return known
    names = ", ".join(sorted(known.name for known in FORMATS))
    raise InvalidRequestError(
        f"tool_format is {name!r}; expected auto, {names}.", param="tool_format"
    )


def detect_tools(tokenizer: Tokenizer, name: str = "auto") -> ToolFormat | None:
    """Return the format that the tokenizer's chat template and tokens show, None for none.

    Args:
        tokenizer: of the model.
        name: of a format, for models that "auto" does not recognise.

    Raises:
        InvalidRequestError: there is no format of this name.
    """
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    tokens = frozenset(token.content for token in tokenizer.added_tokens.values())
    clues = Clues(template="\n".join(sources), tokens=tokens)
    if name == "auto":
        found = next((known for known in FORMATS if known.detect(clues)), None)
    else:
        found = tool_format(name)
    if isinstance(found, Mistral):
        return Mistral(listed="[ARGS]" not in clues.template)
    if isinstance(found, DeepSeek):
        return DeepSeek(fenced="```json" in clues.template)
    return found


def require_tools(tokenizer: Tokenizer, format: ToolFormat | None) -> ToolFormat:
    """Return the format, if the model's template can present tools to it.

    Raises:
        TemplateError: the template does not read tools, or the model's format is unknown.
    """
    template = tokenizer.template
    if template is None or not template.reads("tools"):
        raise TemplateError(
            "The model's chat template does not know tools; leave `tools` out, or use a model that "
            "was made for tool calls."
        )
    if format is None:
        names = ", ".join(sorted(known.name for known in FORMATS))
        raise TemplateError(
            "The model's chat template knows tools, but not in a way that is known here; "
            f"name one with tool_format: {names}."
        )
    return format
