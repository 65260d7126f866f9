"""Everything at once: whatever is switched on together, each request gets the tokens that it gets
alone, in the plain run of the same KV format; with an adapter, those of the model that the adapter
is merged into. Where the KV cache is quantised the plain run has the adapter beside its model: a
merged one is rounded otherwise, and a code that moves by a step for that can change an expert, or
which tokens an indexer chooses, and with that anything.

Draws a model (attention, latent attention, recurrent layers), sampling settings, end tokens and
grammars, stored bits, window and sinks, page size, prefix cache, room for snapshots of states,
disk, chunk size, batch size, pool size, forced preemption, cancels, restarts, adapters, proposals
that steps verify, micro-batches of pipeline stages, and pictures: features in place of embeddings,
spans that see each other, rope positions of three axes, little room for features. Models are
quantised: MLX's CPU kernels then compute each row by itself, so that even bits do not depend on the
batch.

    MLXINFER_PROGRAMS=1000 HYPOTHESIS_SEED=7 pytest tests/engine/test_matrix.py -s

of all models in turn; of one or some of them, with their names and commas between:

    MLXINFER_CASES=lfm2-v4,gemma3n_text-v4 pytest tests/engine/test_matrix.py -s

of models that see, with a picture in every prompt:

    MLXINFER_PICTURES=1 pytest tests/engine/test_matrix.py -s
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
from adapters.cases import folders, merged
from engine.fake_grammar import FakeGrammar
from engine.harness import HYBRIDS, MROPE, PAGE, Harness, Outcome, alone, disk_at, prompt
from engine.harness import model_of as text_model_of
from engine.pictures import Parts, picture, placed, until, with_spans, with_tower
from engine.proposers import WITH_STREAMS, some_proposer, takes_no_window
from engine.seeing_cases import drawn_picture, seeing_model
from engine.stages import NoOtherRanks
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models.picture_cases import ALL_PICTURE_CASES

from mlxinfer.cache_specs import CacheSpec, KVSpec, LatentSpec
from mlxinfer.config import KVOptions
from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.engine import snapshots
from mlxinfer.engine.followers import NO_FOLLOWERS
from mlxinfer.fair import Tenant
from mlxinfer.images import Picture, PlacedPicture
from mlxinfer.models.decoder import Model

NUM_PROGRAMS = int(os.environ.get("MLXINFER_PROGRAMS", "4"))
SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
BITS = [(None, None), (None, None), (8, 8), (8, 4), (4, 4), (8, None), (None, 4)]
ALL_CASES = (
    "qwen3-v4", "mistral-v4", "gemma3_text-v4", "gpt_oss-v4", "qwen3_moe-v4", "deepseek_v3-v4",
    *HYBRIDS,
    "zoo mimo_v2_flash", "zoo minicpm3", "zoo jamba",  # the last on caches of its own
    "qwen3_next-v4", "qwen3_5_text-v4", "granitemoehybrid-v4", "lfm2-v4", "lfm2_moe-v4",
    "nemotron_h-v4", "falcon_h1-v4", "gemma4_e-v4", "gemma3n_text-v4", "llama4_text-v4",
    "deepseek_v32-v4", "glm_moe_dsa-shared", "laguna-v4",
    "qwen3-v5", "phi3-v4", "olmo2-v4", "qwen3_5_moe_text-v4", "gemma2-v4", "gemma4_text-v4",
    "kimi_linear-v4", "hunyuan_v1_dense-v4", "ministral3-v5", "mistral4-v5",
    *("qwen3_5_text-v5", "granite_swa-v4", "granitemoe_swa-v5", *MROPE),
    "olmo_hybrid-v4", "mimo_v2_flash-v4", "minimax_m3_vl_text-v4",
    "qwen4_exp_text-v4", "qwen4_exp_text-v5", "glm5_next_text-v4", "glm5_next_text-v5",
    "deepseek_v4-v4", "deepseek_v4-v5", "xing4_0-v4",
    "flint-v4", "k2_horizon-v4", "k2_horizon-mova", "kolibri1-v4", "inkling2_loop_text-v5",
    "bonsai 2", "puzzle",
    *(f"sees {name}" for name in ALL_PICTURE_CASES),  # each with a tower of its own
)  # fmt: skip
ALL_SEE = os.environ.get("MLXINFER_PICTURES", "0") != "0"
NAMED = tuple(filter(None, os.environ.get("MLXINFER_CASES", "").split(","))) or ALL_CASES
CASES = tuple([name for name in NAMED if not (ALL_SEE and name.startswith("zoo "))])

# Where codes are stored, a last bit that differs between two ways of adding up can move one by a
# step, and a choice between two tokens that are this close (in log-probability) may turn.
NEAR_TIE = 0.1
# Such a step can also change an expert, and these weigh what experts add by 8.
LOUD_EXPERTS, FURTHER_TIE = "inkling2", 0.4
# A matrix with an adapter merged into it is rounded otherwise than the two products.
NEAREST_TIE = 1e-3


def model_of(case: str) -> Model:
    """A tiny quantised model; with a tower of its own where the case says so."""
    if case.startswith("sees "):
        return seeing_model(case.removeprefix("sees "), packed=True)
    return text_model_of(case)


@dataclass(frozen=True)
class Rules:
    """How to make a fresh grammar."""

    seed: int
    accepting_every: int
    length: int | None

    def start(self) -> FakeGrammar:
        return FakeGrammar(self.seed, accepting_every=self.accepting_every, length=self.length)


@dataclass(frozen=True)
class Asked:
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cancel_after: int | None = None
    adapter: str | None = None
    stop_ids: frozenset[int] = frozenset()
    rules: Rules | None = None
    pictures: tuple[PlacedPicture, ...] = ()
    others: tuple[tuple[str, Any], ...] = ()  # fields of the request that change no token

    def how(self) -> dict[str, Any]:
        """The arguments of this request, for the plain run and for the harness."""
        names = ("params", "stop_ids", "pictures")
        return {
            "prompt_ids": list(self.prompt_ids),
            **{name: getattr(self, name) for name in names},
        }

    @property
    def length(self) -> int:
        """Tokens of prompt and answer, at most."""
        return len(self.prompt_ids) + (self.params.max_tokens or 0)


@pytest.fixture(autouse=True, scope="module")
def _often_a_rolling_snapshot() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "ROLLING_TOKENS", 2 * PAGE)
        yield


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    off = st.none()
    return st.builds(
        lambda max_tokens, min_tokens, **drawn: SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            **{name: value for name, value in drawn.items() if value is not None},
        ),
        max_tokens=st.integers(1, 30),
        temperature=st.sampled_from([0.0, 0.0, 0.0, 0.7, 1.5]),
        seed=st.integers(0, 2**40),
        top_k=off | st.integers(1, 40),
        top_p=off | st.floats(0.3, 0.99),
        min_p=off | st.floats(0.01, 0.3),
        repetition_penalty=off | st.floats(0.8, 1.5),
        repetition_window=off | st.integers(0, 20),
        presence_penalty=off | st.floats(-1, 1),
        frequency_penalty=off | st.floats(-1, 1),
        top_n_sigma=off | st.floats(0.5, 3),
        typical_p=off | st.floats(0.3, 0.99),
        xtc_probability=off | st.floats(0, 1),
        xtc_threshold=off | st.floats(0, 0.3),
        dry_multiplier=off | st.floats(0, 3),
        dry_allowed_length=st.integers(1, 3),
        logit_bias=off | st.dictionaries(st.integers(0, 95), st.floats(-5, 5), max_size=3),
        logprobs=off | st.integers(0, 3),
        min_tokens=st.sampled_from([0, 0, 1, 4]),
    )


@dataclass(frozen=True)
class Sight:
    """How a model sees.

    Attributes:
        spans: attention layers let features of a picture see each other.
        num_deep: layers after which features are added.
        mrope: it has three positions a token.
    """

    spans: bool
    num_deep: int
    mrope: bool

    def picture(self, seed: int) -> Picture:
        """One of some pictures, the same for each seed."""
        rows, columns = [(1, 1), (2, 3), (4, 4), (5, 8)][seed % 4]
        sees_itself, num_tiles = self.spans and rows * columns <= 16, 1 + seed % 2 * (rows > 1)
        how = {"breaks": seed % 5 == 0, "num_tiles": num_tiles, "mrope": self.mrope}
        return picture(seed % 3, rows, columns, sees_itself=sees_itself, **how)

    def model(self, model: Model) -> Model:
        """The model with a tower."""
        model = with_tower(model, self.num_deep)
        return with_spans(model) if self.spans else model


@dataclass(frozen=True)
class OwnSight:
    """How a model sees that has a tower of its own."""

    name: str

    def picture(self, seed: int) -> Picture:
        """One of some pictures, the same for each seed."""
        return drawn_picture(self.name, seed)

    def model(self, model: Model) -> Model:
        """The model itself."""
        return model


@st.composite
def some_sight(draw: st.DrawFn, case: str) -> Sight | OwnSight | None:
    """How a model sees; None: it reads text alone, as definitions of mlx-lm do."""
    if case.startswith("sees "):
        return OwnSight(case.removeprefix("sees "))
    if case.startswith("zoo ") or not (ALL_SEE or draw(st.booleans())):
        return None
    mrope = model_of(case).rope_axes == 3
    # Else what is added to a layer's output has none.
    one_stream = not case.startswith(WITH_STREAMS)
    spans = not ranked_specs(case) and draw(st.booleans())
    return Sight(spans, draw(st.sampled_from([0, 0, 2 * one_stream])), mrope)


@st.composite
def parts_of_prompt(draw: st.DrawFn, sight: Sight | OwnSight | None) -> Parts:
    """A beginning that others may share, and an end."""
    shared = draw(st.sampled_from([0, 5, 16, 40, 75]))
    unshared = prompt(draw(st.integers(1, 30)), draw(st.integers(0, 3)))
    text = prompt(100, draw(st.sampled_from([0, 0, 1])))
    if sight is None:
        return [text[:shared], unshared]
    one, two, three = draw(st.tuples(*[st.integers(0, 11)] * 3))
    parts: Parts = [text[:20], sight.picture(one % 2), text[20:29], sight.picture(two), text[29:]]
    last: Parts = [unshared[:4], sight.picture(three)]
    ending = last if ALL_SEE else draw(st.sampled_from([[], last]))
    return [*until(parts, shared), *ending, unshared]


OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "tenant": st.sampled_from([Tenant("a"), Tenant("b", 3.0), Tenant("a").at(1)]),
        "priority": st.integers(-1, 2),
        "cache_salt": st.sampled_from(["s", "t"]),
        "page_priority": st.integers(0, 1),
        "boundaries": st.lists(st.integers(0, 120), max_size=3).map(tuple),
        "reports_prompt": st.booleans(),
    },
)


@st.composite
def programs(
    draw: st.DrawFn,
    adapters: Collection[str],
    sight: Sight | OwnSight | None = None,
    *,
    exact: bool = False,
) -> list[Asked]:
    """Requests that share beginnings, cut anywhere but inside of a picture.

    With `exact` some are drawn, with any settings, end tokens and grammars: their plain run is
    rounded in the same way to the last bit.
    """
    turn, out = 0, []
    rules = st.builds(
        Rules, st.integers(0, 3), st.sampled_from([0, 1, 3]), st.none() | st.integers(1, 30)
    )
    for _ in range(draw(st.sampled_from([1, 2, 3, 4, 4, 12]))):  # there are four tails at first
        turn += draw(st.sampled_from([0, 0, 1, 6, 15]))
        ids, pictures = placed(*draw(parts_of_prompt(sight)))
        cancel = draw(st.sampled_from([None, None, None, 3, 9]))
        adapter = draw(st.sampled_from([None, None, *adapters]))
        params = SamplingParams(max_tokens=draw(st.integers(1, 20)), logprobs=2)
        others = draw(st.none() | OTHERS)
        asked = Asked(turn, tuple(ids), params, cancel, adapter, pictures=pictures)
        asked = replace(asked, others=tuple((others or {}).items()))
        if exact and adapter is None and draw(st.booleans()):
            ends = frozenset(draw(st.sets(st.integers(0, 95), max_size=3)))
            params = draw(params_strategy())
            asked = replace(asked, params=params, stop_ids=ends, rules=draw(st.none() | rules))
        out.append(asked)
    return out


@st.composite
def kv_options(draw: st.DrawFn, case: str) -> KVOptions:
    bits = draw(st.sampled_from(BITS))
    if bits[0] == 4 and hides_biases(case):  # refused
        bits = (8, 4)
    if model_of(case).lacks:
        return KVOptions()
    latent = [spec for spec in model_of(case).cache_specs if isinstance(spec, LatentSpec)]
    if latent:
        bits = (bits[0], bits[0])  # one vector, one number of bits
    if any((spec.latent_dim + spec.rope_dim) % 8 for spec in latent):
        bits = (None, None)  # refused
    if ranked_specs(case):  # it chooses what it sees among all, or weighs it by distance
        return KVOptions(bits=bits)
    window = draw(st.sampled_from([None, None, 12, 40]))
    sinks = draw(st.sampled_from([0, 4, 17])) if window else 0
    return KVOptions(bits=bits, window=window, sinks=sinks)


def hides_biases(case: str) -> bool:
    """Whether keys may have biases that cannot be told apart from the rest."""
    model = model_of(case)
    specs = [spec for spec in model.cache_specs if isinstance(spec, KVSpec)]
    has_biases = model.config.qkv_bias or case.startswith("zoo ")  # of which nothing is known
    return has_biases and not all(spec.key_bias for spec in specs)


def ranked_specs(case: str) -> list[CacheSpec]:
    """Of layers with an indexer, or with a bias by distance."""
    return [spec for spec in model_of(case).cache_specs if takes_no_window(spec)]


def play(
    harness: Harness, program: list[Asked], preempt_every: int | None
) -> dict[str, FakeGrammar]:
    """Arrivals and cancels at their turns, a running request sent back every few turns.

    Returns the grammars, as they are at the end.
    """
    scheduler = harness.loop.scheduler
    grammars = {str(i): asked.rules.start() for i, asked in enumerate(program) if asked.rules}
    last = max(a.turn + (a.cancel_after or 0) for a in program)
    turn = 0
    while turn <= last or not harness.loop.idle:
        for i, asked in enumerate(program):
            if asked.turn == turn:
                how = {**asked.how(), **dict(asked.others), "grammar": grammars.get(str(i))}
                harness.add(str(i), **how, adapter=asked.adapter)
            if asked.cancel_after is not None and asked.turn + asked.cancel_after == turn:
                harness.loop.abort(str(i))
        # Not for ever: without a prefix cache nothing would end.
        forced = preempt_every and turn < 90 and turn % preempt_every == preempt_every - 1
        if forced and (running := scheduler.queues.running):
            scheduler.queues.preempt(running[turn % len(running)])
        harness.turn()
        turn += 1
        assert turn < 3000, "the queue did not drain"
    harness.drain()
    return grammars


def assert_same(outcome: Outcome, plain: Outcome, *, near_tie: float) -> None:
    """The tokens of the plain run, or their beginning where the request was cancelled."""
    if outcome.reason is FinishReason.ABORT:
        plain = replace(plain, token_ids=plain.token_ids[: len(outcome.token_ids)])
    else:
        assert type(outcome.error) is type(plain.error), outcome.error
    if outcome.token_ids != plain.token_ids:
        assert near_tie, (outcome.token_ids, plain.token_ids)
        pairs = zip(outcome.token_ids, plain.token_ids, strict=False)
        place = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
        (_, best), (_, second) = plain.logprobs[place].top
        assert best - second < near_tie, "a choice turned that was no near tie"
    elif not near_tie:
        assert outcome.reason in (plain.reason, FinishReason.ABORT)
        for ours, theirs in zip(outcome.logprobs, plain.logprobs, strict=False):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-3)


def text_of(outcome: Outcome, stop_ids: frozenset[int]) -> list[int]:
    """The tokens without the end token, if one ended it."""
    ids = outcome.token_ids
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


@given(data=st.data())
@settings(max_examples=NUM_PROGRAMS, phases=[Phase.generate])  # shrinking would take minutes
@hypothesis.seed(SEED)
def test_all_features_together_leave_answers_as_they_are(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    options = data.draw(kv_options(case))
    adapters = folders(case)
    sight = data.draw(some_sight(case))
    model = plain_model(case, None, sight)
    some = programs(adapters, sight, exact=options.bits == (None, None))
    runs = [data.draw(some) for _ in range(data.draw(st.sampled_from([1, 1, 2])))]
    longest = max(asked.length for run in runs for asked in run)
    page_size = data.draw(st.sampled_from([PAGE, PAGE, 2 * PAGE]))
    changes = {
        "kv": options,
        "page_size": page_size,
        "num_pages": -(-longest // page_size) + data.draw(st.sampled_from([0, 1, 3, 60])),
        "prefill_chunk": page_size * data.draw(st.sampled_from([1, 2, 4, 8])),
        "prefill_slice_s": data.draw(st.sampled_from([None, 0.002])),
        "max_batch": data.draw(st.sampled_from([1, 2, 3, 4, 5, 16])),
        "launch_ahead": data.draw(st.booleans()),
        "prefix_cache": data.draw(st.sampled_from([True, True, False])),
    }
    if sight is not None and model.tower is not None:  # room for one picture, or two, or all
        largest = 42 * model.tower.width * model.activation_dtype.size
        changes["feature_bytes"] = largest * data.draw(st.sampled_from([1, 2, 50]))
    lacks = model_of(case).lacks
    if "prefix_cache" in lacks:
        changes["prefix_cache"] = False
    preempt_every = data.draw(st.sampled_from([None, None, 3, 7]))
    max_snapshots = data.draw(st.sampled_from([None, None, 0, 1, 3]))
    guess_seed = data.draw(st.none() | st.integers(0, 2**20))
    num_stages = data.draw(st.sampled_from([1, 1, 2, 4]))
    if "speculation" in lacks:
        guess_seed = None
    with TemporaryDirectory() as folder:
        if changes["prefix_cache"] and data.draw(st.booleans()):
            changes["disk"] = disk_at(Path(folder), f"tiny {case}")
        for run in runs:  # each in an engine of its own: a restart
            plains = plain_runs(case, options, run, sight)
            answers = {name: plain.token_ids for name, plain in plains.items()}
            proposer = some_proposer(guess_seed, model_of(case), answers)
            followers = NoOtherRanks(num_stages) if num_stages > 1 else NO_FOLLOWERS
            harness = Harness(
                model, proposer=proposer, adapters=adapters, followers=followers, **changes
            )
            states = harness.loop.cache.state_group
            if states is not None and max_snapshots is not None:
                states.max_snapshots = max_snapshots
            grammars = play(harness, run, preempt_every)
            for name, grammar in grammars.items():
                said = text_of(harness.outcomes[name], run[int(name)].stop_ids)
                assert grammar.taken == said
            for name, plain in plains.items():
                near_tie = NEAREST_TIE if run[int(name)].adapter else 0.0
                if options.bits != (None, None):
                    near_tie = FURTHER_TIE if LOUD_EXPERTS in case else NEAR_TIE
                assert_same(harness.outcomes[name], plain, near_tie=near_tie)
            stats = proposer.stats() if proposer is not None else {}
            assert not stats.get("switched_off"), stats
            harness.loop.close()


@cache
def plain_model(case: str, adapter: str | None, sight: Sight | OwnSight | None) -> Model:
    """The model, with an adapter merged into it, with a tower."""
    model = merged(case, adapter) if adapter else model_of(case)
    return model if sight is None else sight.model(model)


def plain_runs(
    case: str, options: KVOptions, run: list[Asked], sight: Sight | OwnSight | None = None
) -> dict[str, Outcome]:
    """Each request by itself, in the same KV format."""
    merges, outcomes = options.bits == (None, None), {}
    for i, asked in enumerate(run):
        model = plain_model(case, asked.adapter if merges else None, sight)
        grammar = asked.rules.start() if asked.rules else None
        beside: dict[str, Any] = {"adapter": asked.adapter, "adapters": folders(case)}
        how = {**asked.how(), "grammar": grammar, "kv": options, **({} if merges else beside)}
        outcomes[str(i)] = alone(model, **how)
    return outcomes


def test_the_seed_that_is_printed_draws_the_programs() -> None:
    names = "" if NAMED == ALL_CASES else f" of {', '.join(CASES)}"
    pictures = ", a picture in every prompt" if ALL_SEE else ""
    print(
        f"\n{NUM_PROGRAMS} random programs of everything{names}{pictures}, HYPOTHESIS_SEED={SEED}"
    )
    assert (
        vars(test_all_features_together_leave_answers_as_they_are)["_hypothesis_internal_use_seed"]
        == SEED
    )
