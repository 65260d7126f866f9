"""FakeLLM: an LLM with a given answer, one word a step."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.outputs import Delta, ReasoningPart, Result, TextPart, Timing


class FakeLLM:
    def __init__(self, folder: Path, *, template: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": "{{ messages }}"} if template else {})
        )
        self.model_info = SimpleNamespace(name="fake", path=folder, vocab_size=100)
        self.says = "Hello there."
        self.thinks = ""
        self.fail_after: int | None = None  # steps until `error` is raised
        self.error: BaseException = KeyboardInterrupt()
        self.opened: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[tuple[object, SamplingParams | None]] = []
        self.closed = 0
        self.ended_streams = 0

    def stream(self, prompt: object, params: SamplingParams | None = None) -> Iterator[Delta]:
        self.asked.append((prompt, params))
        words = [(w, "") for w in self.thinks.split(" ") if w] + [
            ("", w) for w in self.says.split(" ")
        ]
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
        self, messages: list[dict[str, str]], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        return self.stream([dict(message) for message in messages], params)

    def generate(self, prompt: object, params: SamplingParams | None = None) -> Result:
        return self._result(4)

    def stats(self) -> dict[str, Any]:
        return {"pages_used": 3, "groups": [{"pages": 8}]}

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
            finish_reason=FinishReason.STOP,
            prompt_tokens=7,
            timing=Timing(tokens_per_s=12.0, time_to_first_token_s=0.1),
        )
