"""How many graph nodes a layer costs: the host builds them anew for every token."""

import io

import mlx.core as mx
import pytest
from models.tiny import tiny_checkpoint

from mlxinfer.layers.step import Step
from mlxinfer.models import load


class FreeKV:
    """Attention that costs nothing."""

    heads = None  # layers prepare queries, keys and values themselves

    def attend(self, queries, keys, values, softmax):
        return queries.flatten(1)


def num_nodes(model, num_layers: int) -> int:
    """Of one step over one token through the first layers."""
    ids, positions = mx.array([3], mx.int32), mx.array([5], mx.int32)
    x, normed = model.embed_tokens(ids), None
    step = Step(positions, {mixer: FreeKV() for mixer in model.mixers})
    for layer in model.layers[:num_layers]:
        x, normed = layer(x, normed, step)
    text = io.StringIO()
    mx.export_to_dot(text, x)
    return text.getvalue().count("label =")


@pytest.mark.skipif(mx.metal.is_available(), reason="fewer there; counted for the CPU")
@pytest.mark.parametrize(("case", "limit"), [("llama-v4", 62), ("qwen3-v4", 73)])
def test_nodes_per_layer(tmp_path, case, limit):
    """mlx-lm 0.32.2 has 79 and 90, counted the same way."""
    model = load(tiny_checkpoint(tmp_path, case))
    assert num_nodes(model, 3) - num_nodes(model, 2) <= limit


def test_layers_of_equal_specs_share_a_rope(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "gemma3_text"))
    ropes = [layer.mixer.rope for layer in model.layers]
    assert len(ropes) == 6
    assert len(set(ropes)) == 2
