"""Adapters of tiny models for random programs, and the models that they are merged into."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from adapters.drawn import DENSE, Drawn, dense_tensors, draw, merge, write_mlx, write_peft
from models.cases import CASES
from models.tiny import tiny_checkpoint

from mlxinfer.models import load
from mlxinfer.models.decoder import Model

QUANTIZED = {"group_size": 32, "bits": 4}
NO_EXPERTS = rf"^(?!.*\.experts\.).*{DENSE}"
NAMES = ("first", "second", "third")


@cache
def base(case: str) -> Path:
    """The checkpoint that `engine.harness.tiny_model` loads quantised."""
    return tiny_checkpoint(Path(mkdtemp()), case, quantize=QUANTIZED)


@cache
def drawn(case: str, name: str) -> Drawn:
    """LoRA of two ranks that share a stack, and DoRA of another rank; experts only in the first."""
    tensors = dense_tensors(base(case))
    if name == "first":
        return draw(tensors, 1, rank=12)
    if name == "second":
        return draw(tensors, 2, rank=4, dora=True, pattern=NO_EXPERTS)
    return draw(tensors, 3, rank=9, pattern=NO_EXPERTS, scale=0.5)


@cache
def folders(case: str) -> dict[str, Path]:
    """The adapters of a case by name; none where the model takes none."""
    if case not in CASES:
        return {}
    write = {"first": write_peft, "second": write_mlx, "third": write_peft}
    return {name: write[name](Path(mkdtemp()), drawn(case, name)) for name in NAMES}


@cache
def merged(case: str, name: str) -> Model:
    """The model with an adapter merged into its weights."""
    return load(merge(base(case), drawn(case, name), Path(mkdtemp())))
