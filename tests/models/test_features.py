"""Vectors in place of the embeddings of some rows: the model reads them as it reads tokens."""

import mlx.core as mx
from models.dense_kv import DenseCache
from models.tiny import tiny_checkpoint

from mlxinfer.layers.step import FINAL, Step, StepFeatures, Taps
from mlxinfer.models import load


def test_features_stand_for_the_embeddings_of_their_rows(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "gemma3_text-v4"))  # scales its embeddings
    ids, others = mx.array([3, 9, 4, 11, 5], mx.int32), mx.array([3, 7, 4, 2, 5], mx.int32)

    def hidden(ids, features=None):
        step = Step(mx.arange(5), DenseCache(model).step([("a", 5)]))
        step.features = features
        return model(ids, step)

    rows = mx.array([1, 3])
    found = hidden(ids, StepFeatures(rows, model.embed(others)[rows]))
    assert mx.array_equal(found, hidden(others))
    assert not mx.allclose(found, hidden(ids)).item()


def test_deep_features_are_added_after_the_first_layers(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "qwen3"))
    ids, rows = mx.array([3, 9, 4, 11, 5], mx.int32), mx.array([1, 3])
    vectors, *deep = mx.random.normal((3, 2, model.config.hidden_size), key=mx.random.key(1))

    def hidden(deep):
        step = Step(mx.arange(5), DenseCache(model).step([("a", 5)]))
        step.features = StepFeatures(rows, vectors, tuple(deep))
        taps = step.taps = Taps([0, 1, FINAL])
        return model(ids, step), taps.joined()

    def by_hand():
        step = Step(mx.arange(5), DenseCache(model).step([("a", 5)]))
        x = model.embed(ids)
        x[rows] = vectors
        for index, layer in enumerate(model.layers):
            x = layer(x, None, step)[0]
            if index < len(deep):
                x[rows] = x[rows] + deep[index]
        return model.norm(x)

    found, tapped = hidden(deep)
    assert mx.allclose(found, by_hand(), atol=1e-5)
    assert not mx.allclose(found, hidden(())[0], atol=1e-3)
    width = model.config.hidden_size
    first = hidden(())[1][:, :width]
    assert mx.allclose(tapped[rows, :width], first[rows] + deep[0], atol=1e-5)
