"""FakeLLM: an LLM with a given answer, one word a step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.outputs import Delta, ReasoningPart, Result, TextPart, Timing


class FakeLLM:
    def __init__(self, folder: Path, *, template: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model_info = SimpleNamespace(
            name="fake",
            path=folder,
            vocab_size=100,
            summary="qwen3, 1 MB",
            sees=False,
            chats=template,
            thinking=("off", "on"),
        )
        self.chat_params = SamplingParams(max_tokens=None)
        self.options: list[dict[str, Any]] = []
        self.ends = FinishReason.STOP
        self.says = "Hello there."
        self.thinks = ""
        self.fail_after: int | None = None  # steps until `error` is raised
        self.error: BaseException = KeyboardInterrupt()
        self.opened: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[tuple[object, SamplingParams | None]] = []
        self.closed = 0
        self.ended_streams = 0

    def stream(
        self,
        prompt: object,
        params: SamplingParams | None = None,
        *,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        self.asked.append((prompt, params))
        self.options.append(options)
        words = [(w, "") for w in self.thinks.split(" ") if w]
        words += [("", w) for w in self.says.split(" ")] if self.says else []
        try:
            for step, (thought, word) in enumerate(words):
                if step == self.fail_after:
                    raise self.error
                last = step == len(words) - 1
                gap = "" if last else " "
                yield Delta(
                    parts=[TextPart(word + gap)] if word else [ReasoningPart(thought + " ")],
                    token_ids=(step,),
                    result=self._result(len(words)) if last else None,
                )
        finally:
            self.ended_streams += 1

    def stream_chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        return self.stream([dict(message) for message in messages], params, **options)

    def generate(self, prompt: object, params: SamplingParams | None = None) -> Result:
        return self._result(4)

    def stats(self) -> dict[str, Any]:
        return {
            "groups": [{"pages": 8, "page_bytes": 1000}],
            "kv_bytes_held": 2000,
            "kv_bytes_cached": 1000,
            "active_memory_bytes": 5_000_000,
            "prompt_tokens_computed": 20,
            "prompt_tokens_reused": 80,
            "speculation": {"accepted": 1},
        }

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, count: int) -> Result:
        return Result(
            text=self.says,
            reasoning=self.thinks or None,
            token_ids=tuple(range(count)),
            finish_reason=self.ends,
            prompt_tokens=7,
            timing=Timing(tokens_per_s=12.0, time_to_first_token_s=0.1),
        )
