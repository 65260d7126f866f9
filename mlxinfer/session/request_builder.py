"""RequestBuilder: makes requests of conversations, texts, tools and response formats."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from ..core import Request, SamplingParams
from ..errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError, check_token_ids
from ..grammar import GrammarSpec, response_format
from ..grammar.guidance import Guidance
from ..text import (
    CLIENT_NAMES,
    GENERIC,
    SWITCH_NAMES,
    ChatTemplate,
    TextStream,
    Tokenizer,
    ToolFormat,
    ToolUse,
    WrittenCall,
    count_argument_values,
    detect_reasoning,
    detect_tools,
    encode_chat,
    facts_of,
    fim_tokens,
    generic_messages,
    has_calls,
    read_messages,
)
from ..text.forms import Forms
from ..text.tokenizer import exceeds_tokens
from .answers import Answer
from .attempts import Attempts
from .engine_factory import ModelInfo
from .guard import Guard
from .inputs import (
    UNREADABLE,
    ChatInput,
    EncodedPrompt,
    Input,
    Message,
    TextInput,
    as_int,
    check_sequence,
)
from .pictures import PictureReader
from .prompt_scores import PromptScores

MAX_BREAKERS = 256  # breakers of DRY whose tokens are remembered

VALUES_PER_TOKEN = 4  # JSON values, or commas, that a token stands for, at most on average

LAST_TURNS = 4  # turns of a prompt at whose ends states of recurrent layers are kept


class RequestBuilder:
    """Builds the requests to one model. Safe to use from several threads.

    Args:
        tool_format: how the model writes tool calls; "auto": found by its template and its tokens.
        pictures: reads the pictures of conversations; None: the model reads text only.

    Attributes:
        reasoning: how the model marks its reasoning; None: it does not reason.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        tool_format: str,
        pictures: PictureReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = PictureReader(info.name) if pictures is None else pictures
        self.name = info.name
        ends = tokenizer.eos_token_ids.union(info.eos_token_ids)
        self.end_ids = frozenset(i for i in ends if 0 <= i < info.vocab_size)  # others never come
        self._vocab_size = info.vocab_size
        self.reasoning = detect_reasoning(tokenizer)
        self._tool_format_name = tool_format
        self.guidance = Guidance(
            tokenizer, self.reasoning, vocab_size=info.vocab_size, end_ids=self.end_ids
        )
        self._request_ids = itertools.count()
        self._breakers: dict[str, frozenset[int]] = {}

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls. The first use may render conversations to find out."""
        return detect_tools(self.tokenizer, self._tool_format_name)

    @cached_property
    def _forms(self) -> Forms:
        """What the template takes. The first use may render conversations to find out."""
        template = self.tokenizer.template
        assert template is not None
        return facts_of(template).forms

    # -- inputs ---------------------------------------------------------------------------------

    def build(self, given: Input, chat_params: SamplingParams, max_context: int) -> list[Answer]:
        """The n answers to one input, ready to run. Compiling a grammar may take seconds."""
        prompt = given.read_by(self, max_context)
        num_prompt = len(prompt.ids)
        if not prompt.ids:
            raise InvalidRequestError(
                f"The {given.place} is empty; give at least one token.", param=given.place
            )
        if num_prompt >= max_context:
            raise PromptTooLongError(num_prompt, max_context, param=given.place, exact=True)
        constraint = given.constraint
        if constraint is None and given.response_format is not None:
            constraint = response_format(given.response_format)
        spec = None
        if constraint is not None or prompt.use is not None:
            spec = self.guidance.rule(prompt.ids, constraint, prompt.use, reasons=prompt.reasons)
        params = given.params_of_answers(chat_params, max_context - num_prompt)
        return [self._answer(given, prompt, answer_params, spec) for answer_params in params]

    def _answer(
        self, given: Input, prompt: EncodedPrompt, params: SamplingParams, spec: GrammarSpec | None
    ) -> Answer:
        guard = None
        if params.logits_processors or params.sampler is not None:
            guard = Guard()
            params = guard.guarded(params)
        grammar = None if spec is None else self.guidance.compiler.start(spec, given.abandoned)
        unenforced = grammar.unenforced if grammar else ()
        limit = params.max_reasoning_tokens if prompt.reasons else None
        breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
        ends: frozenset[int] = frozenset() if params.ignore_eos else self.end_ids
        request = Request(
            str(next(self._request_ids)),
            prompt.ids,
            params,
            ends.union(params.stop_token_ids, prompt.end_ids),
            prompt_logits=prompt.logits or prompt.logprobs is not None,
            page_priority=int(given.pins),
            grammar=grammar if limit is None else self.guidance.bounded(grammar, limit, prompt.ids),
            adapter=given.adapter,
            cache_salt=given.cache_salt,
            boundaries=turn_ends(prompt.ids, self.end_ids),
            breakers=frozenset().union(*map(self._breaking, breakers)),
            reports_prompt=given.reports_prompt,
            owner=given.owner,
            tenant=given.tenant,
            priority=given.priority,
            id_slot=given.id_slot,
            from_peer=given.from_peer,
            pictures=prompt.pictures,
        )
        return Answer(
            request,
            partial(self._text_stream, request, prompt),
            prompt=prompt,
            attempts=Attempts(request, unenforced) if unenforced else None,
            prompt_scores=(
                None if prompt.logprobs is None else PromptScores(prompt.ids, prompt.logprobs)
            ),
            guard=guard,
        )

    def conversation(self, given: ChatInput, max_context: int | None) -> EncodedPrompt:
        """The prompt that the chat template makes of a conversation."""
        template = self.tokenizer.template
        use = self._tool_use(given)
        tools = None if use is None else use.shown
        messages, images = read_messages(given.messages)
        seen = None
        if images:
            seen = self.pictures.read(
                images, max_context, given.place, given.abandoned, given.cache_salt
            )
            if seen.unread:
                given = given.without_pictures(seen.unread, UNREADABLE)
                messages, _ = read_messages(given.messages)
        check = None
        if max_context is not None:
            # A template writes at least one token for each message.
            least = max(len(messages), count_argument_values(messages) // VALUES_PER_TOKEN)
            if least > max_context:
                raise PromptTooLongError(max_context, max_context, param=given.place, exact=False)
            check = partial(self._check_text, max_context=max_context, place=given.place)
        variables, unheard = self._variables(given, template)
        variables |= {
            "add_generation_prompt": not given.continues if given.begins is None else given.begins,
            "continue_final_message": given.continues,
        }
        respell = str if seen is None else seen.respell
        ids = self._encode_chat(messages, check, tools, variables, respell)
        ids, placed = (ids, ()) if seen is None else seen.place(ids)
        return EncodedPrompt(
            ids,
            use=use,
            continues=bool(given.continues),
            logprobs=given.prompt_logprobs,
            pictures=placed,
            unheard=(*given.left_out, *unheard),
        )

    def text(self, given: TextInput, max_context: int | None) -> EncodedPrompt:
        """The prompt of a text, of token ids, or of a text with a gap."""
        prompt, limit = given.prompt, sys.maxsize if max_context is None else max_context
        if given.suffix:
            return self._infill(given, limit)
        if isinstance(prompt, str):
            self._check_text(prompt, max_context=limit, place=given.place)
            ids, text = self.tokenizer.encode(prompt, parse_special=True), prompt
        else:
            check_sequence(prompt)
            if len(prompt) >= limit:  # before millions of ids are looked at
                raise PromptTooLongError(len(prompt), limit, param=given.place, exact=True)
            ids, text = [as_int(i) for i in prompt], None
            check_token_ids(ids, self._vocab_size, param=given.place)
        return EncodedPrompt(
            ids,
            text,
            reasons=given.reasons,
            logits=given.logits,
            logprobs=given.prompt_logprobs,
            pictures=given.pictures,
        )

    def _infill(self, given: TextInput, max_context: int) -> EncodedPrompt:
        prefix, suffix, files = given.prompt, given.suffix, given.files
        if not isinstance(prefix, str) or suffix is None:
            raise InvalidRequestError("suffix goes with a prompt that is a text.", param="suffix")
        tokens = fim_tokens(self.tokenizer)
        if tokens is None:
            raise UnsupportedFieldError(
                f"The model {self.name!r} has no tokens for filling in the middle; code models "
                "have.",
                param="suffix",
            )
        texts = [prefix, suffix, *(text for _, text in files)]
        self._check_text(*texts, max_context=max_context, place=given.place)
        ids = tokens.prompt_ids(self.tokenizer, prefix, suffix, files=files)
        return EncodedPrompt(ids, prefix, reasons=given.reasons, end_ids=tokens.end_ids)

    def _check_text(self, *texts: str, max_context: int, place: str) -> None:
        encode = partial(self.tokenizer.encode, add_special_tokens=False, parse_special=True)
        if num_tokens := exceeds_tokens(encode, texts, max_context):
            raise PromptTooLongError(num_tokens, max_context, param=place, exact=False)

    def _encode_chat(
        self,
        messages: Sequence[Message],
        check: Callable[[str], None] | None,
        tools: Sequence[Message] | None,
        variables: Mapping[str, Any],
        respell: Callable[[str], str],
    ) -> list[int]:
        template = self.tokenizer.template
        if template is not None:
            if (tools or has_calls(messages)) and self.tool_format is GENERIC:
                messages, tools = generic_messages(messages, tools), None
            messages = self._forms.apply(messages, self._written_calls)
        return encode_chat(self.tokenizer, messages, check, respell, tools=tools, **variables)

    def _written_calls(self, calls: Sequence[Message]) -> str:
        return self.tool_format.write([WrittenCall.of(call) for call in calls])

    def _tool_use(self, given: ChatInput) -> ToolUse | None:
        if not given.tools and given.tool_choice in (None, "auto", "none"):
            return None
        return ToolUse.plan(
            self.tokenizer,
            self.tool_format,
            given.tools,
            given.tool_choice,
            parallel=given.parallel_tool_calls,
        )

    def _text_stream(self, request: Request, prompt: EncodedPrompt) -> TextStream:
        use = prompt.use
        return TextStream(
            self.tokenizer,
            stop=request.params.stop,
            min_tokens=request.params.min_tokens,
            reasoning=self.reasoning if prompt.reasons else None,
            tools=None if use is None else use.parser(),
            single_call=use is not None and not use.parallel,
            prompt_ids=prompt.ids,
            continues=prompt.continues,
        )

    def close(self) -> None:
        self.guidance.compiler.close()

    def _breaking(self, text: str) -> frozenset[int]:
        """The tokens that contain a text. If none does: the last token of the text itself."""
        ids = self._breakers.get(text)
        if ids is None:
            if len(self._breakers) >= MAX_BREAKERS:
                self._breakers.clear()
            ids = self.tokenizer.ids_with(text)
            if not ids:
                text_ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
                ids = frozenset(text_ids[-1:])
            self._breakers[text] = ids
        return ids

    def _variables(
        self, given: ChatInput, template: ChatTemplate | None
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The variables of the template, and the names of those that have no effect."""
        wanted, limit = dict(given.template_variables), given.reasoning_limit
        if template is None or (not wanted and given.reasoning_effort is None and limit is None):
            return {}, ()
        facts = facts_of(template)
        switch = next(
            (v for n, v in wanted.items() if n in SWITCH_NAMES and v in (True, False)), None
        )
        effort = given.reasoning_effort
        if effort is None and "reasoning_effort" not in facts.variables:
            effort = wanted.get("reasoning_effort")
        told, is_heard = facts.thinking.variables(effort, switch, limit)
        unread = [name for name in wanted if name not in facts.variables]
        wishes = (*SWITCH_NAMES, "reasoning_effort")
        unheard = [n for n in wanted if (not is_heard if n in wishes else n in unread)]
        for name in set(unheard).intersection(unread):
            if not given.ignores_unread or name not in CLIENT_NAMES:
                raise InvalidRequestError(
                    f"This model's chat template reads no {name!r}; leave it out of "
                    "chat_template_kwargs.",
                    param="chat_template_kwargs",
                )
        if not is_heard and given.reasoning_effort is not None:
            unheard.append("reasoning_effort")
        return told | {name: wanted[name] for name in wanted if name not in unread}, tuple(unheard)


def turn_ends(ids: Sequence[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Positions after the first turn of a prompt, and after each of its last turns.

    A turn ends with an end token. Other prompts differ from this one at these positions: prompts
    with the same system prompt and tools, and this conversation with its last messages changed.
    There are few positions, because each costs a snapshot of the states.
    """
    first = next((i + 1 for i, token in enumerate(ids) if token in end_ids), None)
    if first is None:
        return ()
    backwards = (i + 1 for i in range(len(ids) - 1, first, -1) if ids[i] in end_ids)
    return (first, *reversed(list(itertools.islice(backwards, LAST_TURNS))))
