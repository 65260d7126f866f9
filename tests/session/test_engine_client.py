"""What crosses threads: limits, and messages to event loops, which all arrive with few wake-ups."""

import asyncio
import gc
import threading
import weakref

import pytest

from mlxinfer import LLM, RequestFailedError, SamplingParams
from mlxinfer.engine.loop import Loop
from mlxinfer.session.engine_client import Mailbox


def test_all_arrive_in_order() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
        queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(3)]

        def work() -> None:
            for i in range(1000):
                mailbox.post(queues[i % 3], i)

        thread = threading.Thread(target=work)
        thread.start()
        for i in range(1000):
            assert await asyncio.wait_for(queues[i % 3].get(), 10) == i
        thread.join()

    asyncio.run(main())


def test_messages_before_the_loop_runs_share_a_wake_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        wake_ups = 0
        original = loop.call_soon_threadsafe

        def counting(*arguments):  # type: ignore[no-untyped-def]
            nonlocal wake_ups
            wake_ups += 1
            return original(*arguments)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        mailbox: Mailbox[int] = Mailbox(loop)
        inbox: asyncio.Queue[int] = asyncio.Queue()
        for i in range(100):
            mailbox.post(inbox, i)
        assert [await inbox.get() for _ in range(100)] == list(range(100))
        return wake_ups

    assert asyncio.run(main()) == 1


def test_a_mailbox_holds_no_loop() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop)
    loop.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    for _ in range(10):
        assert not mailbox.post(asyncio.Queue(), 1)
    assert not mailbox._posted, "never to be read, and ever more"


def test_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop)
    loop.close()
    assert not mailbox.post(asyncio.Queue(), 1)
    assert not mailbox.post(asyncio.Queue(), 2)


def test_limits_are_values_and_handed_over_again_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No caller reads the loop's own objects, which a restart replaces."""
    turn = Loop.turn

    def fail_once(loop: Loop) -> None:
        if loop.idle:
            return turn(loop)
        monkeypatch.setattr(Loop, "turn", turn)
        raise RuntimeError("the bookkeeping is wrong")

    with LLM("demo", num_pages=40, max_context=300) as llm:
        before = llm._session.limits
        assert hash(before) is not None, "frozen, down to its parts"
        assert (before.max_context, before.vocab_size) == (300, llm.model_info.vocab_size)
        assert [group.num_pages for group in before.groups] == [40] * len(before.groups)
        monkeypatch.setattr(Loop, "turn", fail_once)
        with pytest.raises(RequestFailedError, match="bookkeeping"):
            llm.generate("A", SamplingParams(max_tokens=2))
        assert llm.generate("A", SamplingParams(max_tokens=2)).token_ids
        assert llm._session.limits == before
        assert llm._session.limits is not before
