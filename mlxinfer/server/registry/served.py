"""One running model as the server sees it: text in, Requests for the engine out. Knows no HTTP."""

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...answer import Answer
from ...core import Grammar, Request, SamplingParams, TokenEvent, check_token_ids
from ...grammar import GrammarCompiler
from ...info import ModelInfo
from ...mailbox import Mailbox
from ...opening import EngineOptions, open_engine
from ...text import (
    ReasoningFormat,
    TextStream,
    Tokenizer,
    ToolFormat,
    ToolUse,
    detect_reasoning,
    detect_tools,
)
from .defaults import SamplingDefaults, read_defaults
from .prompt_scores import PromptScores

if TYPE_CHECKING:
    from ...engine.engine import Engine

_ids = itertools.count()


@dataclass(slots=True, weakref_slot=True, eq=False)
class ServedModel:
    """A loaded model with its tokenizer, under the name that requests call it by."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    engine: "Engine"
    max_context: int  # tokens of prompt and answer
    defaults: SamplingDefaults
    created_s: int  # seconds since 1970
    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None  # how it writes tool calls
    grammars: GrammarCompiler = field(init=False)
    _mailboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox[Any]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(
            self.tokenizer, vocab_size=self.info.vocab_size, end_ids=self.end_ids
        )

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        options: EngineOptions,
        *,
        created_s: int,
        tool_format: str = "auto",
    ) -> "ServedModel":
        """Load the model in `folder`; raises what opening.open_engine and detect_tools raise."""
        tokenizer = Tokenizer.from_folder(folder)
        tools = detect_tools(tokenizer, tool_format)
        engine, info = open_engine(name, folder, options)
        return cls(
            name=name,
            info=info,
            tokenizer=tokenizer,
            engine=engine,
            max_context=min(options.max_context or info.max_context, info.max_context),
            defaults=read_defaults(folder),
            created_s=created_s,
            reasoning=detect_reasoning(tokenizer),
            tools=tools,
        )

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.tokenizer.eos_token_ids.union(self.info.eos_token_ids)

    def check_ids(self, ids: Sequence[object], *, param: str) -> list[int]:
        """The ids, if they are tokens of this model; raises InvalidRequestError."""
        check_token_ids(ids, self.info.vocab_size, param=param)
        return list(ids)  # type: ignore[arg-type]  # checked

    def answer(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        continues: bool,
        use: ToolUse | None = None,
        grammar: Grammar | None = None,
    ) -> Answer:
        """A request for the engine, and what turns its tokens into text.

        Args:
            prompt_ids: the whole prompt.
            params: checked.
            continues: the answer goes on within the prompt's text, as in a plain completion.
            use: tools that the answer may call.
            grammar: what the answer must look like; a state of this answer alone.
        """
        ends: frozenset[int] = frozenset() if params.ignore_eos else self.end_ids
        stop_ids = ends.union(params.stop_token_ids)
        request = Request(str(next(_ids)), prompt_ids, params, stop_ids, grammar=grammar)
        stream = TextStream(
            self.tokenizer,
            stop=params.stop,
            min_tokens=params.min_tokens,
            reasoning=None if continues else self.reasoning,
            tools=None if use is None else use.parser(),
            single_call=use is not None and not use.parallel,
            prompt_ids=prompt_ids,
            continues=continues,
        )
        return Answer(request, stream)

    def submit(
        self,
        request: Request,
        inbox: "asyncio.Queue[Any]",
        scores: PromptScores | None = None,
    ) -> None:
        """Queue a request; its TokenEvents go to `inbox` of the running event loop.

        With `scores` the logits of the prompt go there instead, on the engine's thread: they are
        too large to be queued.

        Raises: what Engine.submit raises.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox(loop))

        def deliver(event: TokenEvent) -> None:
            if scores is not None and event.prompt_logits is not None:
                scores.push(event.prompt_logits)
            else:
                mailbox.post(inbox, event)

        request.prompt_logits = scores is not None
        self.engine.submit(request, deliver)

    def close(self) -> None:
        """End what runs and free the memory."""
        self.grammars.close()
        self.engine.close()
