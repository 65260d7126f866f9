"""4-bit checkpoints that mlx-lm itself writes, loaded here: `python -m tests.models.zoo_converted`.

In a process of its own: mlx-lm's package is imported, for its conversion and for its logits.
"""

import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxinfer.models import load_any
from mlxinfer.models.registry import SUPPORTED
from mlxinfer.models.zoo.definitions import BROKEN, architectures

from .zoo_configs import small_config
from .zoo_table import random_parameters

IDS = mx.array([[5, 9, 100, 3, 77, 1, 2, 3, 4, 5, 6, 7, 8]])
# Not ours to fix: need Metal, another package, checkpoints of their own; cannot be quantised.
LEFT_OUT = {"bitnet", "muse_spark", "olmo", "prism_hadamard_qwen35", "afm7", *BROKEN}


def difference(name: str, folder: Path) -> float:
    """The largest one of any logit between mlx-lm and this library, from one checkpoint."""
    module = import_module(f"mlx_lm.models.{name}")
    raw = small_config(name, module)
    model = module.Model(module.ModelArgs.from_dict(raw))
    model.update(random_parameters(model))
    model, config = mlx_lm.utils.quantize_model(model, raw, group_size=32, bits=4)
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
    theirs = mlx_lm.utils.load_model(folder)[0]
    ours = load_any(folder).definition
    expected = theirs(IDS, cache=make_prompt_cache(theirs))
    actual = ours(IDS, ours.own_caches())
    return float(np.abs(np.array(actual) - np.array(expected)).max())


def zoo() -> list[str]:
    """Architectures that mlx-lm defines and no native family does."""
    known = {*SUPPORTED, *LEFT_OUT}
    names = [name for name in architectures() if name not in known]
    return [n for n in names if getattr(import_module(f"mlx_lm.models.{n}"), "Model", None)]


if __name__ == "__main__":
    for name in sys.argv[1:] or zoo():
        with TemporaryDirectory() as folder:
            print(name, difference(name, Path(folder)), flush=True)
