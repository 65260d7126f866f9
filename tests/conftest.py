"""For all tests: a fast BLAS before MLX is imported, and the same drawn examples every time."""

import os

from mlxinfer.bench.blas import preload_openblas

preload_openblas()

from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "default",
    derandomize="HYPOTHESIS_SEED" not in os.environ,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")
