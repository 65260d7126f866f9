"""A client of its own, that hangs up when it is told to: asyncio streams, no HTTP library.

Knows HTTP/1.1 as far as this server speaks it; no API.
"""

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass
from typing import Any

from bad_input import COMPLETIONS, COUNT, MESSAGES, RESPONSES, TOKENIZE
from live_server import CHAT

WORDS = ["page", "token", "cache", "two", "é→🙂", "What is 47 + 38", "<|im_end|>"]
FORM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Plan:
    """One request, and when its client leaves.

    Attributes:
        path, body: what is asked.
        sent: the share of the request's bytes that is sent before the client leaves; 1: all.
        patience_s: how long it waits for the answer after that; None: to the end.
        events: pieces of the answer after which it leaves; None: reads to the end.
        abrupt: leaves with a reset instead of an orderly end.
        key: of the client; "": it has none.
    """

    path: str
    body: dict[str, Any]
    sent: float = 1.0
    patience_s: float | None = None
    events: int | None = None
    abrupt: bool = False
    key: str = ""

    @property
    def stays(self) -> bool:
        """Whether the client reads its whole answer."""
        return self.sent == 1 and self.patience_s is None and self.events is None


async def perform(port: int, plan: Plan) -> int | None:
    """Do as the plan says; the status of a whole answer, None where the client left."""
    return (await exchange(port, plan))[0]


async def exchange(port: int, plan: Plan) -> tuple[int | None, bytes]:
    """`perform`, with what was read behind the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = _request(plan)
        writer.write(data[: round(len(data) * plan.sent)])
        await writer.drain()
        if plan.sent < 1:
            await asyncio.sleep(plan.patience_s or 0)
            return None, b""
        if plan.patience_s is None:
            return await _read(reader, plan.events)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(_read(reader, plan.events), plan.patience_s)
        return None, b""
    finally:
        if plan.abrupt:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _request(plan: Plan) -> bytes:
    body = json.dumps(plan.body).encode()
    lines = [
        f"POST {plan.path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *([f"authorization: Bearer {plan.key}"] if plan.key else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _read(reader: asyncio.StreamReader, events: int | None) -> tuple[int | None, bytes]:
    """Status and body of an answer that was read to its end; None where it was left before."""
    head = await reader.readuntil(b"\r\n\r\n")
    seen, body = 0, b""
    while part := await reader.read(4096):
        seen, body = seen + part.count(b"data: "), body + part
        if events is not None and seen >= events:
            return None, body
    return int(head.split(b" ", 2)[1]), body


def draw_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Some request: any endpoint, any sampling, free or in a form, long or short, right or not."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 200)))
    said = [{"role": "user", "content": text}]
    most = rng.randint(1, 60)
    sampling = {"temperature": rng.choice([0, 0.7, 1.0]), "top_p": rng.choice([0.5, 1])}
    stream = {"stream": rng.random() < 0.6}
    kind = rng.random()
    if kind < 0.4:
        return CHAT, {
            "messages": said, "max_tokens": most, **sampling, **stream, **_extras(rng),
        }  # fmt: skip
    if kind < 0.6:
        asked = {"prompt": [text, "A"], "max_tokens": most, "n": rng.choice([1, 2])}
        return COMPLETIONS, {**asked, **sampling, **stream}
    if kind < 0.7:
        return RESPONSES, {"input": text, "max_output_tokens": most, **sampling, **stream}
    if kind < 0.8:
        return MESSAGES, {"messages": said, "max_tokens": most, **sampling, **stream}
    if kind < 0.9:
        return rng.choice([COUNT, TOKENIZE]), {"messages": said}
    return rng.choice([CHAT, MESSAGES, COMPLETIONS]), {"messages": said, "top_p": 7}


def _extras(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {},
            {"guided_json": FORM},
            {"guided_regex": "[a-z]{3,20}"},
            {"logprobs": True, "top_logprobs": 5},
            {"n": 3, "seed": rng.randint(0, 99)},
            {"stop": ["e", "page"]},
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 20},
            {"logit_bias": {str(rng.randint(0, 2047)): 5}},
            {"dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9, "top_n_sigma": 2.0},
        ]
    )


def draw_leaver(rng: random.Random) -> Plan:
    """A client that leaves at any moment of a long request."""
    path, body = draw_body(rng)
    if path in (CHAT, COMPLETIONS):
        body["ignore_eos"] = True
        body["max_tokens"] = 400
    moment = rng.random()
    abrupt = rng.random() < 0.5
    if moment < 0.25:  # before the body ends
        return Plan(path, body, rng.random(), rng.uniform(0, 0.05), abrupt=abrupt)
    if moment < 0.6:  # in the queue, in prefill, or at any later time
        return Plan(path, body, patience_s=rng.uniform(0, 0.5), abrupt=abrupt)
    if path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        body["stream"] = True
    return Plan(path, body, events=rng.randint(1, 50), abrupt=abrupt)
