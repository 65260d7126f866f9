"""Makes MLX's CPU backend on Linux multiply matrices with OpenBLAS. Import it before mlx.

The CPU wheel of MLX brings a reference BLAS that is some twenty times slower. A library loaded
first with the same symbols takes its place. Does nothing where MLX has a GPU, and where there is no
`scipy-openblas32` or no C compiler: training is then slow, and right all the same.
"""

import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = """
#define ARGS int order, int ta, int tb, int m, int n, int k, float alpha, \\
             const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc
void scipy_cblas_sgemm(ARGS);
void cblas_sgemm(ARGS) {
    scipy_cblas_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
"""


def preload() -> bool:
    """Load OpenBLAS under the name that MLX looks for; return whether that worked."""
    compiler = shutil.which("cc")
    spec = importlib.util.find_spec("scipy_openblas32")
    wanted = sys.platform == "linux" and _is_cpu_wheel()
    if not wanted or compiler is None or spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent / "lib"
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch, "shim.c"), Path(scratch, "shim.so")
        source.write_text(SOURCE, encoding="utf-8")
        linking = [f"-L{folder}", "-lscipy_openblas", f"-Wl,-rpath,{folder}"]
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), *linking]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return True


def _is_cpu_wheel() -> bool:
    try:
        importlib.metadata.version("mlx-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
