"""One running model as the server sees it: text in, Requests for the engine out. Knows no HTTP."""

import asyncio
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core import Grammar, Request, SamplingParams, TokenEvent
from ...session.engine_client import Mailbox
from ...session.engine_factory import EngineOptions, ModelInfo, open_engine
from ...session.output_processor import OutputProcessor
from ...session.request_builder import RequestBuilder
from ...text import Tokenizer, ToolUse, detect_tools
from .defaults import SamplingDefaults, read_defaults
from .prompt_scores import PromptScores

if TYPE_CHECKING:
    from ...engine.engine import Engine


@dataclass(slots=True, weakref_slot=True, eq=False)
class ServedModel:
    """A loaded model with its tokenizer, under the name that requests call it by."""

    name: str
    info: ModelInfo
    asking: RequestBuilder
    engine: "Engine"
    max_context: int  # tokens of prompt and answer
    defaults: SamplingDefaults
    created_s: int  # seconds since 1970
    _mailboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox[Any]]" = field(
        default_factory=weakref.WeakKeyDictionary
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
        """Load the model in `folder`; raises what open_engine and detect_tools raise."""
        tokenizer = Tokenizer.from_folder(folder)
        detect_tools(tokenizer, tool_format)  # a wrong name is known before weights are read
        engine, info = open_engine(name, folder, options)
        return cls(
            name=name,
            info=info,
            asking=RequestBuilder(tokenizer, info, tool_format),
            engine=engine,
            max_context=min(options.max_context or info.max_context, info.max_context),
            defaults=read_defaults(folder),
            created_s=created_s,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.asking.tokenizer

    def answer(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        continues: bool,
        reasons: bool = True,
        use: ToolUse | None = None,
        grammar: Grammar | None = None,
    ) -> OutputProcessor:
        """A request for the engine, and what turns its tokens into text.

        Args:
            prompt_ids: the whole prompt.
            params: checked.
            continues: see `RequestBuilder.answer`.
            reasons: see there; where it is False all is text, reasoning too.
            use: tools that the answer may call.
            grammar: what the answer must look like; a state of this answer alone.
        """
        answer = self.asking.answer(
            prompt_ids, params, continues=continues, reasons=reasons, use=use
        )
        answer.request.grammar = grammar
        return answer

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

    @property
    def closed(self) -> bool:
        """It answers nothing any more: close() was called, or its engine ended after a fault."""
        return self.engine.closed

    def close(self) -> None:
        """End what runs and free the memory."""
        self.asking.close()
        self.engine.close()
