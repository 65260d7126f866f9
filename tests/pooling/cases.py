"""Tiny configurations of models that pool, as the hub spells them, and how they pool. No mlx.

Chosen to tell right from nearly right: windows shorter than the texts, positions that do not begin
at 0, several modes side by side, projections of another width, every kind of classification head.
"""

from typing import Any

from models.names import expanded
from models.random_weights import random_tensor

LENGTHS = (3, 17, 9, 9, 1, 30)  # tokens of the rows of a case

_BERT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "hidden_act": "gelu",
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-6,
    "pad_token_id": 1,
}
_DECODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_QWEN3 = {**_DECODER, "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 10_000.0}
_GEMMA = {
    **_DECODER,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 12,
    "use_bidirectional_attention": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_MODERN = {
    "model_type": "modernbert",
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "pad_token_id": 0,
}
_DISTIL = {
    "model_type": "distilbert",
    "vocab_size": 96,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 80,
    "activation": "gelu",
    "max_position_embeddings": 40,
}
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _scores(architecture: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **_ONE_LABEL, **more}


# name -> config.json; modes and modules behind them; which task
CASES: dict[str, dict[str, Any]] = {
    "bert": {
        "config": {**_BERT, "model_type": "bert", "architectures": ["BertModel"]},
        "modes": ["mean"],
        "normalize": True,
    },
    "bert-modes": {
        "config": {**_BERT, "model_type": "bert", "architectures": ["BertModel"]},
        "modes": ["cls", "max", "mean_sqrt_len_tokens", "weightedmean"],
        "dense": [(192, 20, True, "Tanh"), (20, 24, False, "Identity")],
    },
    "bert-scores": {
        "config": {**_BERT, "model_type": "bert", **_scores("BertForSequenceClassification")},
    },
    "roberta": {
        "config": {
            **_BERT,
            "model_type": "roberta",
            "architectures": ["RobertaModel"],
            "type_vocab_size": 1,
        },
        "modes": ["cls"],
        "normalize": True,
    },
    "xlm-roberta-scores": {
        "config": {
            **_BERT,
            "model_type": "xlm-roberta",
            "type_vocab_size": 1,
            **_scores("XLMRobertaForSequenceClassification"),
        },
    },
    "distilbert": {
        "config": {**_DISTIL, "architectures": ["DistilBertModel"]},
        "modes": ["mean"],
    },
    "distilbert-scores": {
        "config": {**_DISTIL, **_scores("DistilBertForSequenceClassification")},
    },
    "nomic_bert": {
        "config": {
            "model_type": "nomic_bert",
            "architectures": ["NomicBertModel"],
            "vocab_size": 96,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 80,
            "max_position_embeddings": 64,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "modes": ["mean"],
        "normalize": True,
    },
    "modernbert": {
        "config": {**_MODERN, "architectures": ["ModernBertModel"]},
        "modes": ["mean"],
        "normalize": True,
    },
    "modernbert-scores": {
        "config": {
            **_MODERN,
            "classifier_pooling": "mean",
            **_scores("ModernBertForSequenceClassification"),
        },
    },
    "qwen3": {
        "config": {**_QWEN3, "architectures": ["Qwen3Model"]},
        "modes": ["lasttoken"],
        "normalize": True,
    },
    "qwen3-tokens": {
        "config": {**_QWEN3, "architectures": ["Qwen3ForCausalLM"]},
        "tokens": [11, 5],
    },
    "qwen3-scores": {
        "config": {**_QWEN3, **_scores("Qwen3ForSequenceClassification")},
    },
    "gemma3": {
        "config": {**_GEMMA, "architectures": ["Gemma3TextModel"]},
        "modes": ["mean"],
        "dense": [(64, 96, False, "Identity"), (96, 32, False, "Identity")],
        "normalize": True,
    },
}


def tensors(case: str, table: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of a case by its name on the hub; `table`: of tensors.json."""
    less_one = CASES[case]["config"]["model_type"].startswith("gemma3")
    made = {}
    for name, shape in expanded(table[case]).items():
        values = random_tensor(name, shape, 0, less_one=less_one)
        if name.endswith(NORMS):
            values = 1 + values / 2
        if name.endswith(SCORERS):
            values = 5 * values
        made[name] = values
    return made


NORMS = ("LayerNorm.weight", "layer_norm.weight", "emb_ln.weight", "norm1.weight", "norm2.weight")
SCORERS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")


def dense_weights(case: str, index: int) -> dict[str, Any]:
    """Weight and perhaps bias of a projection behind pooling."""
    in_dims, out_dims, bias, _ = CASES[case]["dense"][index]
    made = {
        "linear.weight": random_tensor(f"{case}.{index}.w", (out_dims, in_dims), 0, less_one=False)
    }
    if bias:
        made["linear.bias"] = random_tensor(f"{case}.{index}.b", (out_dims,), 0, less_one=False)
    return made
