"""What the answer must look like: request fields to a grammar. Knows fields; compiles nothing."""

from typing import Any

from .refused import refuse
from .sampling import SamplingFields


class ConstraintFields(SamplingFields, kw_only=True):
    """OpenAI's response_format and the guided fields of vLLM, SGLang and llama.cpp."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None


def refuse_constraints(fields: ConstraintFields) -> None:
    """Raise UnsupportedFieldError for a field that constrains the answer."""
    for name in ConstraintFields.__annotations__:
        refuse(name, getattr(fields, name), ({"type": "text"},))
