"""Requests of an asyncio program; cancelling a task ends its request and frees its memory."""

import asyncio

from mlxinfer import LLM, SamplingParams


async def main() -> None:
    """Two answers at once, and one that is cut short."""
    with LLM("demo") as llm:
        short = SamplingParams(max_tokens=40)
        first, second = await asyncio.gather(
            llm.agenerate("The scheduler", short), llm.agenerate("The prefix cache", short)
        )
        print(first, second, sep="\n")

        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        task = asyncio.create_task(llm.agenerate("Once upon a time", endless))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print("pages held after the cancel:", llm.stats()["kv_bytes_held"])


asyncio.run(main())
