"""Requests to grammars: response_format, tools and reasoning of one model's requests."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import Grammar
from ..text import ReasoningFormat, Tokenizer, ToolUse
from ..text.reasoning import answer_begun
from ..text.tools.schema import Tool, Toolbox
from ..text.tools.use import AnswerGrammar
from .compiler import GrammarCompiler
from .relaxed import Unenforced, any_of
from .schema import check_schema
from .spec import GrammarSpec, enforceable, schema_part, strictly, tool_calls

if TYPE_CHECKING:
    from .reasoning_budget import BudgetRule


class Guidance:
    """Makes grammars for requests to one model. Thread-safe; costs nothing until the first grammar.

    Args:
        reasoning: how the model reasons; a grammar lets it do so before the answer.

    Attributes:
        compiler: starts the grammars, which takes milliseconds to seconds: too long for an event
            loop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        *,
        vocab_size: int,
        end_ids: Iterable[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._budget_rule: BudgetRule | None = None
        self.compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, end_ids=end_ids)

    def rule(
        self,
        prompt_ids: Sequence[int],
        spec: GrammarSpec | None,
        use: ToolUse | None = None,
        *,
        reasons: bool = True,
    ) -> GrammarSpec | None:
        """Return the grammar of the answer to a prompt, None for any text. Compiles nothing.

        With a spec and tools the answer is calls, or a text that the spec allows.

        Raises:
            InvalidRequestError: a schema of a tool is too large, or none.
        """
        if use is not None and (spec is None or use.must_call):
            return self.forced(use, prompt_ids)
        if spec is not None and use is not None:
            return self._calls_or(spec, use, prompt_ids)
        return self.after_reasoning(spec, prompt_ids) if spec is not None and reasons else spec

    def forced(self, use: ToolUse, prompt_ids: Sequence[int]) -> GrammarSpec | None:
        """Return the grammar of calls that keep to their schemas, None where any text will do."""
        use, unenforced = enforceable_use(use)
        lark = use.grammar(self._tokenizer, self._reasoning, prompt_ids)
        return None if lark is None else tool_calls(lark, use.schemas, unenforced)

    def after_reasoning(self, spec: GrammarSpec, prompt_ids: Sequence[int]) -> GrammarSpec:
        if self._reasoning is None:
            return spec
        grammar = AnswerGrammar(self._tokenizer, self._reasoning, prompt_ids)
        return replace(spec, before=grammar.main())

    def _calls_or(self, spec: GrammarSpec, use: ToolUse, prompt_ids: Sequence[int]) -> GrammarSpec:
        """Return the grammar of calls, or of what `spec` allows, optionally after reasoning."""
        use, unenforced = enforceable_use(use)
        tools = [schema_part(schema, place=place) for place, schema in use.schemas]
        grammar = AnswerGrammar(self._tokenizer, self._reasoning, prompt_ids, use)
        return replace(
            spec,
            before=grammar.calls_or_main(),
            schemas=(*spec.schemas, *tools),
            unenforced=(*spec.unenforced, *unenforced),
        )

    def bounded(
        self, grammar: Grammar | None, max_reasoning_tokens: int | None, prompt_ids: Sequence[int]
    ) -> Grammar | None:
        """Return the same grammar with a bound on the reasoning, if there is one and it reasons.

        Args:
            grammar: of the whole answer; None: any text.
            max_reasoning_tokens: then the reasoning is closed; None: no bound.
        """
        if max_reasoning_tokens is None or self._reasoning is None:
            return grammar
        from .reasoning_budget import BudgetRule, ReasoningBudget  # numpy, at the first use

        chosen, prefix = answer_begun(self._tokenizer, self._reasoning, prompt_ids)
        if self._budget_rule is None or self._budget_rule.format != chosen:
            self._budget_rule = BudgetRule.of(self._tokenizer, chosen)
        return ReasoningBudget(self._budget_rule, max_reasoning_tokens, prefix, grammar)


def enforceable_use(use: ToolUse) -> tuple[ToolUse, tuple[Unenforced, ...]]:
    """Return the same use with schemas that masks can enforce, and what is left for a check.

    An argument may match several options of a oneOf. Schemas of strict tools have
    equivalent keywords; what those cannot say is refused when the grammar is compiled.

    Raises:
        InvalidRequestError: a schema is too large, or none.
    """
    tools: list[Tool] = []
    unenforced: list[Unenforced] = []
    for tool, (place, schema) in zip(use.tools, use.schemas, strict=True):
        check_schema(schema, place=place)
        if tool.strict:
            enforced = strictly(schema, place=place)
        else:
            enforced, rest = enforceable(any_of(schema), place=place, tool=tool.name)
            unenforced += rest
        tools.append(replace(tool, parameters=enforced))
    return replace(use, tools=Toolbox(tools)), tuple(unenforced)
