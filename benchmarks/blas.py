"""A fast BLAS under MLX's CPU backend, for benchmarks and tests. The library never does this.

MLX's Linux wheel carries the reference BLAS, some 25 times slower than OpenBLAS. Whatever library
is loaded with global symbols before MLX provides cblas_sgemm and its like instead.
`python -m benchmarks.blas MODULE ARGUMENTS` runs a module with it.
"""

import ctypes
import ctypes.util
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# scipy-openblas32 prefixes its symbols; MLX wants the plain names.
_SHIM = """
#include <stdarg.h>
typedef int i; typedef float f; typedef double d;
void scipy_cblas_sgemm(i,i,i,i,i,i,f,const f*,i,const f*,i,f,f*,i);
void scipy_cblas_dgemm(i,i,i,i,i,i,d,const d*,i,const d*,i,d,d*,i);
void scipy_cblas_cgemm(i,i,i,i,i,i,const void*,const void*,i,const void*,i,const void*,void*,i);
void cblas_sgemm(i o,i s,i t,i m,i n,i k,f al,const f*a,i la,const f*b,i lb,f be,f*c,i lc)
{ scipy_cblas_sgemm(o,s,t,m,n,k,al,a,la,b,lb,be,c,lc); }
void cblas_dgemm(i o,i s,i t,i m,i n,i k,d al,const d*a,i la,const d*b,i lb,d be,d*c,i lc)
{ scipy_cblas_dgemm(o,s,t,m,n,k,al,a,la,b,lb,be,c,lc); }
void cblas_cgemm(i o,i s,i t,i m,i n,i k,const void*al,const void*a,i la,const void*b,i lb,
                 const void*be,void*c,i lc)
{ scipy_cblas_cgemm(o,s,t,m,n,k,al,a,la,b,lb,be,c,lc); }
"""


def preload_openblas() -> str | None:
    """Load OpenBLAS before MLX is imported; returns what was loaded, None where there is none.

    Threads are limited to one unless OPENBLAS_NUM_THREADS says otherwise: timings on a shared
    machine are steadier so.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    system = ctypes.util.find_library("openblas")
    if system is not None:
        ctypes.CDLL(system, mode=ctypes.RTLD_GLOBAL)
        return system
    return _from_package()


def _from_package() -> str | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    try:
        import scipy_openblas32
    except ImportError:
        return None
    if compiler is None:
        return None
    folder = Path(scipy_openblas32.get_lib_dir())
    library = folder / scipy_openblas32.get_library(fullname=True)
    shim = _built_shim(compiler, library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    return library.name


def _built_shim(compiler: str, library: Path) -> Path:
    """Compiled once per library and user; renamed into place, so that two builders cannot clash."""
    name = hashlib.sha256(f"{_SHIM}{library}".encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"mlxinfer-blas-{os.getuid()}-{name}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            source, built = Path(scratch) / "shim.c", Path(scratch) / "shim.so"
            source.write_text(_SHIM)
            command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(built)]
            subprocess.run([*command, str(library)], check=True)
            built.rename(target)
    return target


if __name__ == "__main__":
    preload_openblas()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
