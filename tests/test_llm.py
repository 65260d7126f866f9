"""The public contract, on the small one of the bundled models."""

import _thread
import asyncio
import copy
import gc
import json
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlxinfer
from mlxinfer import LLM, FinishReason, SamplingParams
from mlxinfer.core import Request, TokenEvent
from mlxinfer.session.answers import Answer
from mlxinfer.session.request_builder import RequestBuilder
from mlxinfer.text import TextStream
from tests.waiting import until, wait_until

QUESTION = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-draft", max_batch=8) as made:
        yield made
        assert made.stats()["kv_bytes_held"] == 0


def test_one_prompt_gives_a_result_and_many_give_a_list(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    result = llm.generate("The KV cache", params)
    assert result.finish_reason in ("length", "stop")
    assert result.prompt_tokens == len(llm.tokenizer.encode("The KV cache"))
    assert result.text
    ids = llm.tokenizer.encode("The KV cache")
    assert llm.generate(ids, params).token_ids == result.token_ids
    many = llm.generate(["The KV cache", ids, "A page"], params)
    assert [r.token_ids for r in many[:2]] == [result.token_ids] * 2
    assert [r.prompt for r in many] == ["The KV cache", ids, "A page"]
    assert len(llm.generate(["one", "two"], [params, SamplingParams(max_tokens=2)])) == 2


def test_text_ends_before_the_stop_string(llm: LLM) -> None:
    whole = llm.chat(QUESTION, SamplingParams(max_tokens=40))
    stop = whole.text[5:9]
    cut = llm.chat(QUESTION, SamplingParams(max_tokens=40, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < len(whole.token_ids)


def test_a_stop_string_in_held_back_text_is_a_stop(llm: LLM) -> None:
    half = llm.tokenizer.encode("é")[0]
    params = SamplingParams(max_tokens=1, stop="\ufffd", logit_bias={half: 1e6})
    result = llm.generate("Hello", params)
    assert (result.text, result.finish_reason) == ("", FinishReason.STOP)


def test_end_tokens_are_not_text(llm: LLM) -> None:
    result = llm.chat(QUESTION, SamplingParams(max_tokens=200))
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] in llm.end_ids
    assert "<|" not in result.text
    more = len(result.token_ids) + 8
    longer = llm.chat(QUESTION, SamplingParams(max_tokens=more, ignore_eos=True))
    assert longer.finish_reason is FinishReason.LENGTH
    assert len(longer.token_ids) == more


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("The KV cache keeps")
    result = llm.generate(prompt, SamplingParams(max_tokens=4, logprobs=3))
    logits = llm.logits([*prompt, *result.token_ids[:-1]])[len(prompt) - 1 :]
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for row, token, scores in zip(expected, result.token_ids, result.logprobs, strict=True):
        assert scores.logprob == pytest.approx(row[token], abs=1e-3)
        assert [i for i, _ in scores.top] == np.argsort(-row)[:3].tolist()


def test_a_pinned_conversation_is_a_prefix_hit(llm: LLM) -> None:
    messages = [{"role": "system", "content": "You answer in rhymes about pages. " * 3}]
    kept = llm.pin(messages)
    assert kept >= 16
    asked = llm.chat([*messages, *QUESTION], SamplingParams(max_tokens=2))
    assert asked.cached_tokens >= kept
    assert len(llm.generate("A", SamplingParams(max_tokens=1)).token_ids) == 1


@pytest.mark.ci
def test_pinned_pages_are_evicted_only_when_running_requests_hold_all_others() -> None:
    few = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM("demo-draft", num_pages=24) as llm:
        pinned = list(range(5, 105))
        assert llm.pin(pinned) == 96
        for first in range(3, 13):  # each leaves pages behind, of which the oldest go
            llm.generate([first] * 150, few)
        assert llm.generate(pinned, few).cached_tokens >= 96
        llm.generate([3] * 360, few)  # 23 pages: what is pinned is in its way
        assert llm.generate(pinned, few).cached_tokens < 96


async def test_the_async_forms_give_the_answers_of_the_plain_ones(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10)

    async def streamed() -> str:
        return "".join([d.text async for d in llm.astream("A page", params)])

    results = await asyncio.gather(
        llm.agenerate("A page", params), llm.achat(QUESTION, params), streamed()
    )
    assert results[0].text == results[2] == llm.generate("A page", params).text
    assert results[1].text == llm.chat(QUESTION, params).text


async def test_a_cancelled_task_ends_its_request(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    task = asyncio.create_task(llm.agenerate("A", endless))
    await until(lambda: llm.stats()["running"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.stats()["running"] == 0


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("A", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    assert llm.stats()["running"] == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats()["running"] == 0


def test_ctrl_c_aborts_the_requests_of_a_batch(llm: LLM) -> None:
    def press(loop: Any) -> bool:
        """On the engine's thread, where nothing ends meanwhile."""
        running = len(loop.scheduler.queues.running) == 2
        if running:
            _thread.interrupt_main()
        return running

    def press_when_they_run() -> None:
        wait_until(lambda: llm._session.engine.call(press))

    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    thread = threading.Thread(target=press_when_they_run)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A", "B"], endless)
    thread.join()
    assert llm.stats()["running"] == 0
    assert llm.generate("A", SamplingParams(max_tokens=3)).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        (np.array([1, 2]), "ndarray; give list"),
        ([True], "True"),
        ([5, 10**6], "from 0 to"),
        (b"bytes", "not bytes; decode it"),
        (None, "NoneType"),
        (7, "int"),
        ([1.5], "float"),
        ([1, "a"], "not int"),
    ],
)
def test_prompts_of_wrong_types_are_refused(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(mlxinfer.InvalidRequestError, match=message):
        llm.generate(prompt, SamplingParams(max_tokens=2))  # type: ignore[call-overload]


def test_numpy_integers_are_token_ids_and_an_empty_batch_is_empty(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    ids = np.array([5, 6, 7], dtype=np.int64)
    assert llm.generate([*ids], params).text == llm.generate([5, 6, 7], params).text
    assert llm.generate([]) == []


def test_params_are_sampling_params_and_prompts_are_prompts(llm: LLM) -> None:
    wrong: Any = {"max_tokens": 3}
    for ask in (llm.stream, llm.generate, llm.chat):
        with pytest.raises(mlxinfer.InvalidRequestError, match="SamplingParams") as caught:
            ask("A", wrong)
        assert caught.value.param == "params"
    with pytest.raises(mlxinfer.InvalidRequestError, match="SamplingParams"):
        llm.generate(["A"], [wrong])
    wrong = 7
    for call in (llm.stream, llm.pin, llm.logits):
        with pytest.raises(mlxinfer.InvalidRequestError, match="A prompt is a text or a list"):
            call(wrong)


def test_single_values_go_before_params(llm: LLM) -> None:
    assert len(llm.generate("A page", max_tokens=3).token_ids) == 3
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert [len(r.token_ids) for r in llm.generate(["A", "B"], params, max_tokens=2)] == [2, 2]
    assert [len(r.token_ids) for r in llm.generate(["A"], [params], max_tokens=2)] == [2]
    *_, end = llm.stream("A page", max_tokens=4)
    assert len(end.result.token_ids) == 4
    assert len(llm.chat("Hello", max_tokens=2, seed=1).token_ids) == 2


def test_chats_are_sampled_as_the_model_wants_and_texts_are_continued_greedily(llm: LLM) -> None:
    given = json.loads((llm.path / "generation_config.json").read_text())
    assert llm.chat_params == SamplingParams(
        max_tokens=None, temperature=given["temperature"], top_p=given["top_p"]
    )
    seeded = llm.chat_params.changed({"seed": 3, "max_tokens": 9})
    assert llm.chat("Hello", seed=3, max_tokens=9).token_ids == llm.chat("Hello", seeded).token_ids
    greedy = llm.generate("A page", SamplingParams(max_tokens=6))
    assert llm.generate("A page", max_tokens=6).token_ids == greedy.token_ids


def test_how_chats_are_sampled_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM("demo-draft", progress=True) as made:
        capsys.readouterr()
        with monkeypatch.context() as notebook:  # the card says it
            notebook.setattr("mlxinfer.llm.in_notebook", lambda: True)
            shown = made.chat("Hello", max_tokens=1)._repr_html_()
            assert "temperature 0.3, top_p 0.9</div>" in shown
            assert capsys.readouterr().err == ""
        for _ in range(2):
            made.chat("Hello", max_tokens=1)
    assert capsys.readouterr().err == "demo-draft answers with its own temperature 0.3, top_p 0.9\n"


def test_chat_refuses_options_that_it_would_ignore(llm: LLM) -> None:
    misspelt: Any = {"max_token": 3}
    for call in (llm.chat, llm.stream_chat, llm.generate, llm.stream):
        with pytest.raises(TypeError, match=r"takes no 'max_token'. Did you mean 'max_tokens'"):
            call(QUESTION, **misspelt)
    with pytest.raises(TypeError, match=r"LLM\(\) takes no 'kv_bit'. Did you mean 'kv_bits'"):
        LLM("demo-draft", kv_bit=8)  # type: ignore[call-arg]
    with pytest.raises(mlxinfer.InvalidRequestError, match="parallel_tool_calls is 'no'"):
        llm.chat(QUESTION, parallel_tool_calls="no")  # type: ignore[arg-type]
    with pytest.raises(mlxinfer.InvalidRequestError, match="reads no 'enable_thinking'"):
        llm.chat(QUESTION, chat_template_kwargs={"enable_thinking": False})
    for wrong in (["x"], {5: 1}, {"tools": []}, {"messages": []}):
        with pytest.raises(mlxinfer.InvalidRequestError, match="chat_template_kwargs"):
            llm.chat(QUESTION, chat_template_kwargs=wrong)  # type: ignore[arg-type]
    going_on = [*QUESTION, {"role": "assistant", "content": "I am the demo"}]
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    result = llm.chat(going_on, SamplingParams(max_tokens=2), chat_template_kwargs=ends)
    assert result.text == " model of"


def test_one_bad_request_of_a_batch_leaves_the_engine_running(llm: LLM) -> None:
    with pytest.raises(mlxinfer.InvalidRequestError):
        llm.generate(["fine", [10**6]], SamplingParams(max_tokens=50))
    with pytest.raises(mlxinfer.InvalidRequestError, match="2 prompts and 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert llm.generate("A", SamplingParams(max_tokens=3)).token_ids
    assert llm.stats()["running"] == 0


def test_prompts_that_are_too_long_are_refused_with_their_length(llm: LLM) -> None:
    long = [5] * llm.model_info.max_context
    with pytest.raises(mlxinfer.ContextLengthError, match=f"{len(long)} tokens"):
        llm.generate(long)
    with LLM("demo-draft", num_pages=4, max_context=100) as small:
        with pytest.raises(mlxinfer.InsufficientMemoryError):
            small.generate([5] * 64)
        with pytest.raises(mlxinfer.ContextLengthError, match="length is 100 tokens"):
            small.generate([5] * 100)
        last = small.generate([5] * 63, SamplingParams(max_tokens=9))
        assert len(last.token_ids) == 1
        assert last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "arguments",
    [
        {"progress": 5},
        {"max_batch": 0},
        {"max_memory": "much"},
        {"max_memory": "1KB"},
        {"prefill_slice": 0},
        {"prefill_chunk": 64, "prefill_slice": 100},
        {"dtype": []},
        {"num_pages": 10**30},
        {"kv_window": 1 << 40},
        {"prefix_cache": "false"},
        {"disk_cache": "1GB", "prefix_cache": False},
        {"disk_cache": "much"},
        {"disk_cache_dir": "/tmp"},
        {"speculate": "magic"},
        {"ranks": 0},
        {"slow_experts": True},
    ],
)
def test_options_of_wrong_values_are_refused_by_name(arguments: dict[str, object]) -> None:
    with pytest.raises(mlxinfer.InvalidRequestError, match="|".join(arguments)):
        LLM("demo-draft", **arguments)  # type: ignore[arg-type]


def test_unknown_and_broken_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mlxinfer.ModelNotFoundError):
        LLM(str(tmp_path / "nowhere"))
    demo = Path(mlxinfer.__file__).parent / "assets" / "demo-draft"
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in demo.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(mlxinfer.CheckpointError):
        LLM(broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    with pytest.raises(mlxinfer.UnsupportedModelError, match="unheard_of"):
        LLM(broken)


def test_a_closed_model_refuses_everything_and_close_is_safe_twice() -> None:
    other = LLM("demo-draft")
    stream = other.stream("A", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    other.close()
    other.close()
    assert "closed" in repr(other)
    closed: list[Any] = [
        lambda: list(stream),
        lambda: other.generate("A"),
        other.stats,
        lambda: other.load_adapter("a", "no folder"),  # before the folder is looked at
    ]
    for call in closed:
        with pytest.raises(mlxinfer.EngineClosedError, match="closed"):
            call()


def test_a_collected_llm_is_closed() -> None:
    made = LLM("demo-draft")
    thread = made._session.engine._thread
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_a_stream_keeps_its_llm_alive() -> None:
    def answered() -> Iterator[str]:
        llm = LLM("demo-draft")
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        return (delta.text for delta in llm.stream("A page", params))

    text = "".join(answered())
    gc.collect()
    with LLM("demo-draft") as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert llm.generate("A page", params).text == text


@pytest.mark.ci
def test_logits_and_pin_raise_step_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo-draft", prefix_cache=False, prefill_chunk=256) as llm:
        with pytest.raises(mlxinfer.InvalidRequestError, match="prefix_cache"):
            llm.pin("A page")
        runner = llm._session.engine._loop.runner
        launch, count = runner.launch, 0

        def failing(*step: Any) -> Any:
            nonlocal count
            count += 1
            if count in (3, 4):
                raise RuntimeError("out of luck")
            return launch(*step)

        monkeypatch.setattr(runner, "launch", failing)
        ids = [5 + i % 2000 for i in range(700)]
        for _ in range(2):  # once with some of the logits there already, once without any
            with pytest.raises(mlxinfer.RequestFailedError, match="out of luck"):
                llm.logits(ids)
        assert llm.logits(ids).shape[0] == 700


def test_a_stream_raises_where_closing_the_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("demo-draft")
    stream = llm.stream("A page", SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)

    def broken() -> None:
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(llm._session.engine._loop, "abort_all", broken)
    llm.close()
    with pytest.raises(mlxinfer.EngineClosedError, match="the books are wrong"):
        list(stream)


def test_an_llm_is_neither_pickled_nor_copied(llm: LLM) -> None:
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="build an LLM there"):
            make(llm)
    result = llm.generate("A page", max_tokens=3, logprobs=1)
    assert pickle.loads(pickle.dumps(result)) == result


def test_end_tokens_beyond_the_vocabulary_are_ignored(llm: LLM) -> None:
    info = replace(llm.model_info, eos_token_ids=frozenset({5, 2048, 10**6}))
    asking = RequestBuilder(llm.tokenizer, info, "auto")
    assert asking.end_ids == llm.tokenizer.eos_token_ids | {5}
    asking.close()


def test_a_request_of_a_closed_event_loop_ends(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    stream = llm.astream("A page", params)
    loop.run_until_complete(anext(stream))
    loop.close()
    before = llm.stats()["tokens_sampled"]
    wait_until(lambda: not llm.stats()["running"])
    assert llm.stats()["tokens_sampled"] - before < 1000
    assert stream is not None, "it is held to the end"


def test_a_stream_begun_before_a_fork_raises_in_the_child(llm: LLM) -> None:
    stream = llm.stream("A page", SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    child = os.fork()
    if not child:  # nothing of pytest may run here
        try:
            list(stream)
        except mlxinfer.MlxinferError as error:
            os._exit("forked" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    *_, last = stream
    assert len(last.result.token_ids) == 60


def test_time_before_a_stream_is_read_is_not_queueing(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=3))
    time.sleep(0.2)
    asked_s = time.monotonic()
    *_, last = stream
    assert last.result.timing.total_s <= time.monotonic() - asked_s


def test_timings_are_of_the_engine_not_of_the_reader(llm: LLM) -> None:
    request = Request("r", [1, 2, 3], SamplingParams())
    answer = Answer(request, lambda: TextStream(llm.tokenizer))
    submitted_s = answer._submitted_s
    for second in range(1, 5):  # all read at once
        reason = FinishReason.LENGTH if second == 4 else None
        answer.push(TokenEvent("r", 5, reason, made_s=submitted_s + second))
    timing = answer.result.timing
    assert timing.time_to_first_token_s == pytest.approx(1)
    assert timing.decode_s == pytest.approx(3)
    assert timing.tokens_per_s == pytest.approx(1)
