"""Vectors in place of the embeddings of some rows: the model reads them as it reads tokens."""

import mlx.core as mx
from models.dense_kv import DenseCache
from models.tiny import tiny_checkpoint

from mlxinfer.layers.step import Step, StepFeatures
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
