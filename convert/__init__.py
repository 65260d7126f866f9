"""Any checkpoint in, a verified MLX folder out, one tensor group at a time.

All readers raise CheckpointError for a broken file, and UnsupportedModelError for what no
converter can read.

The package can be called: `mlxinfer.convert(source, out)` is `mlxinfer.convert_model`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        library: Any = sys.modules["mlxinfer"]  # its names are loaded when they are used
        return library.convert_model(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
