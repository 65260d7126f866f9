"""Bonsai 2 (`prism_hadamard_qwen35`): Qwen 3.5 with 2-bit matrices that read rotated inputs."""

from dataclasses import replace
from typing import Any, ClassVar

from ...errors import CheckpointError, UnsupportedModelError
from ..config import ModelConfig
from ..jsonfields import Fields
from .qwen_hybrid import Qwen3_5

_PACK = {  # schema_version -> tensor_namespace
    1: "mlx-lm-text",
    2: "mlx-vlm-qwen3_5",
}
_MANIFEST = ("schema_version", "tensor_namespace", "gdn_activation_layout", "modules")
_BLOCKS = (0, 512, 1024, 2048, 4096, 8192)  # 0: a matrix that is not rotated


class Bonsai2(Qwen3_5):
    """Packed matrices are rotated along their inputs; `modules` lists them.

    Source: mlx-lm 0.32.2, models/prism_hadamard_qwen35.py.
    """

    defaults: ClassVar = Qwen3_5.defaults

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The text_config, under the type of the whole, with the list of packed matrices."""
        inner = super().language_model(config)
        manifest = {name: config.get(name) for name in _MANIFEST}
        kind = {"model_type": config.text("model_type")}
        return Fields({**inner.values, **manifest, **kind}, config.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config, fields = super().configure(config), config.fields
        version = fields.integer("schema_version")
        fields.require(
            {
                "schema_version": list(_PACK),
                "tensor_namespace": [_PACK.get(version)],
                "gdn_activation_layout": ["grouped"],
            }
        )
        if config.quantization is None:
            raise CheckpointError(
                f"{fields.where} states no quantization. Matrices of this model_type are packed "
                "in a rotated basis: they run as they are, and are not converted."
            )
        blocks = dict(_block(module, fields.where) for module in fields.items("modules") or ())
        if not blocks:
            raise CheckpointError(f"modules in {fields.where} lists no packed matrix.")
        return replace(config, quantization=replace(config.quantization, blocks=blocks))


def _block(module: Any, where: str) -> tuple[str, int]:
    """The path of a packed matrix, and the block in which its inputs are rotated."""
    if not isinstance(module, dict):
        raise CheckpointError(f"modules in {where} holds {str(module)[:60]!r}; expected objects.")
    fields = Fields(module, f"modules in {where}")
    block, path = fields.integer("block", low=0), fields.text("path")
    if block not in _BLOCKS or fields.get("dtype") != "float16":
        raise UnsupportedModelError(
            f"{path[:100]} in {fields.where} has block {block} and dtype "
            f"{str(fields.get('dtype'))[:40]!r}; supported are blocks of {_BLOCKS[1:]} or 0, and "
            "float16."
        )
    return path, block
