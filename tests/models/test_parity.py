"""Every native family gives the logits of transformers: in one shot, in ragged chunks, in steps."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.cases import CASES
from models.dense_kv import DenseCache
from models.runs import runs
from models.tiny import tiny_checkpoint

from mlxinfer.cache_specs import StateSpec
from mlxinfer.layers.linear import Linear
from mlxinfer.layers.rope import FusedRope, LongRope, MultiRope
from mlxinfer.models import load

DATA = Path(__file__).parents[1] / "data" / "parity"


# Of a family's two cases one goes in one shot and, of every fourth family, through the layers of a
# GPU; the other one, of every other family, in chunks and steps; .ci/run has all of this of each.
FIRST = list({name.rpartition("-")[0]: name for name in reversed(CASES)}.values())
LAST = list({name.rpartition("-")[0]: name for name in CASES}.values())


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """A loaded model, token ids and the reference logits."""
    model = load(tiny_checkpoint(tmp_path_factory.mktemp("case"), request.param))
    with np.load(DATA / f"{request.param}.npz") as reference:
        return model, reference["ids"].tolist(), reference["logits"]


def cache_for(model, ids: list[int]) -> DenseCache:
    """Of a sequence "a" that will be as long as `ids`; others stay short."""
    cache = DenseCache(model)
    cache.rope_variants["a"] = model.rope_variant(len(ids))
    return cache


def assert_parity(logits: mx.array, reference: np.ndarray) -> None:
    ours = np.array(logits.astype(mx.float32))
    assert np.abs(ours - reference).max() <= 1e-4 * max(1.0, reference.std())
    assert (ours.argmax(-1) == reference.argmax(-1)).all()


@pytest.mark.alike
@pytest.mark.parametrize("case", runs(FIRST[::2], CASES), indirect=True)
def test_one_shot_logits_equal_the_reference(case):
    model, ids, reference = case
    assert len(ids) == len(reference) == 40
    assert len(set(reference.argmax(-1).tolist())) > 10, "a trivial reference"
    assert_parity(cache_for(model, ids).run(model, [("a", ids)]), reference)


@pytest.mark.alike
@pytest.mark.parametrize("case", runs(LAST[::4], LAST), indirect=True)
def test_chunked_and_stepped_logits_equal_the_reference(case):
    model, ids, reference = case
    cache = cache_for(model, ids)
    parts = [cache.run(model, [("a", ids[:17])])]
    parts.append(cache.run(model, [("b", ids[5:12]), ("a", ids[17:22])])[7:])
    for i in range(22, 30):
        first = cache.run(model, [("a", ids[i : i + 1]), ("b", ids[i - 4 : i - 2])])
        parts.append(first[:1])
    parts.append(cache.run(model, [("a", ids[30:])]))
    assert_parity(mx.concatenate(parts), reference)


@pytest.mark.alike
@pytest.mark.parametrize("name", runs(FIRST[::4], FIRST))
def test_layers_of_the_gpu_equal_the_reference(name, tmp_path, monkeypatch):
    """Fused norms and ropes, compiled activations, dense matrices as they are: run on the CPU."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    model = load(tiny_checkpoint(tmp_path, name))
    mixers = [mixer for mixer in model.mixers if not isinstance(mixer.spec, StateSpec)]
    parts = [getattr(mixer, "args", mixer) for mixer in mixers]
    assert type(parts[0].o_proj) is Linear
    ropes = {type(part.rope) for part in parts if getattr(part, "rope", None) is not None}
    assert ropes <= {FusedRope, LongRope, MultiRope}
    assert bool(ropes) == any(model.config.ropes)
    with np.load(DATA / f"{name}.npz") as reference:
        ids = reference["ids"].tolist()
        assert_parity(cache_for(model, ids).run(model, [("a", ids)]), reference["logits"])
        one = cache_for(model, ids).run(model, [("a", ids[:1])])
        assert_parity(one, reference["logits"][:1])
