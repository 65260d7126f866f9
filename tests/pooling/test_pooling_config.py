"""What a checkpoint's small files say of pooling, in the spellings of several versions."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxinfer import errors
from mlxinfer.errors import InvalidRequestError, UnsupportedModelError
from mlxinfer.pooling.config import NORMALISE, Head, Module, Task, read_pooling
from tests.tables import table

TABLES: Any = table(__file__, "config.yml")

BERT = {"model_type": "bert", "architectures": ["BertModel"]}
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
MODULES = "sentence_transformers.models"


def folder_of(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    """A folder with config.json and other JSON files: `a__b` is a/b.json."""
    for name, value in {**files, "config": config}.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind.split('.')[-1]}",
            "type": kind if "." in kind else f"{MODULES}.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("stated", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"word_embedding_dimension": 8}, ("mean",)),
        ({"pooling_mode": "max"}, ("max",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
    ],
)
def test_modes_in_both_spellings(tmp_path, stated, modes):
    folder_of(tmp_path, BERT, modules=modules("Transformer", "Pooling"))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    config = read_pooling(tmp_path)
    assert config.task is Task.EMBED
    assert config.modes == modes
    assert config.modules == ()


def test_modules_prompts_and_limits(tmp_path):
    folder_of(
        tmp_path,
        {**BERT, "matryoshka_dimensions": [64, 128]},
        modules=modules(
            "sentence_transformers.base.modules.transformer.Transformer",
            "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
            "Dense",
            "Normalize",
        ),
        **{
            "1_Pooling__config": {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "2_Dense__config": {
                "in_features": 8,
                "out_features": 4,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "config_sentence_transformers": {
                "prompts": {"query": "query: ", "document": ""},
                "default_prompt_name": "query",
                "similarity_fn_name": "dot",
            },
            "sentence_bert_config": {"max_seq_length": 77, "do_lower_case": True},
        },
    )
    config = read_pooling(tmp_path)
    assert config.modules == (Module("Dense", "2_Dense", 8, 4), NORMALISE)
    assert not config.pools_prompt
    assert (config.max_tokens, config.lowercase, config.similarity) == (77, True, "dot")
    assert config.matryoshka == (64, 128)
    assert (config.prompt(None), config.prompt("document")) == ("query: ", "")
    with pytest.raises(InvalidRequestError, match="query, document"):
        config.prompt("passage")


@pytest.mark.parametrize(
    ("config", "name", "task"),
    [
        (BERT, "", Task.EMBED),
        (QWEN, "", None),
        ({**QWEN, "use_bidirectional_attention": True}, "", Task.EMBED),
        (QWEN, "mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ", Task.EMBED),
        (QWEN, "Qwen/Qwen3-Reranker-0.6B", Task.SCORE),
        (QWEN, "embeddings/llama", None),
        ({**BERT, "architectures": ["BertForSequenceClassification"], **ONE_LABEL}, "", Task.SCORE),
        (
            {**QWEN, "architectures": ["Qwen3ForSequenceClassification"], **ONE_LABEL},
            "",
            Task.SCORE,
        ),
    ],
)
def test_what_a_model_is_for(tmp_path, config, name, task):
    result = read_pooling(folder_of(tmp_path / "m", config), name)
    assert (result.task if result else None) == task


def test_a_cached_repositorys_name_counts(tmp_path):
    place = tmp_path / "models--mlx-community--Qwen3-Reranker-4bit" / "snapshots" / "0a1b"
    config = read_pooling(folder_of(place, QWEN), "judge")
    assert config.head is Head.TOKENS


def test_a_task_that_is_asked_for_counts_more_than_files(tmp_path):
    folder_of(tmp_path, QWEN)
    config = read_pooling(tmp_path, "chat", "embed")
    assert (config.modes, config.modules) == (("lasttoken",), (NORMALISE,))
    assert read_pooling(tmp_path, "Qwen3-Embedding", "generate") is None
    with pytest.raises(InvalidRequestError, match="generate, embed, score"):
        read_pooling(tmp_path, "chat", "classify")


@pytest.mark.parametrize(
    ("stated", "activation"),
    [
        ({}, "sigmoid"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "sigmoid",
        ),
    ],
)
def test_the_activation_of_scores(tmp_path, stated, activation):
    config = {**BERT, "architectures": ["BertForSequenceClassification"], **ONE_LABEL, **stated}
    result = read_pooling(folder_of(tmp_path, config))
    assert result.activation == activation


def test_tokens_that_score_are_read(tmp_path):
    kinds = ("Transformer", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore")
    folder_of(
        tmp_path,
        QWEN,
        modules=modules(*kinds),
        **{"1_LogitScore__config": {"true_token_id": 9454, "false_token_id": None}},
    )
    config = read_pooling(tmp_path)
    assert (config.head, config.token_ids) == (Head.TOKENS, (9454, None))


@pytest.mark.parametrize(("files", "error", "words"), TABLES["refused"])
def test_what_is_not_known_is_named(tmp_path, files, error, words):
    if isinstance(files.get("modules"), str):
        files = {**files, "modules": modules(*files["modules"].split())}
    with pytest.raises(getattr(errors, error), match=words):
        read_pooling(folder_of(tmp_path, **{"config": BERT, **files}))


def test_an_encoder_without_a_head_gives_no_scores(tmp_path):
    with pytest.raises(UnsupportedModelError, match="task='embed'"):
        read_pooling(folder_of(tmp_path, BERT), "", "score")


def test_words_of_a_folder_above_do_not_say_what_a_model_is_for(tmp_path):
    folder = tmp_path / "texts to embed and rerank later" / "llama"
    folder.mkdir(parents=True)
    assert read_pooling(folder_of(folder, QWEN), "llama") is None
