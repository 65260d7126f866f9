"""A process that is shown a photo: `python -m benchmarks.photo FOLDER PHOTO`. Linux.

It prints JSON: the most memory of the process and of MLX's arrays above what they were before, and
the tokens of the prompt.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.blas import preload_openblas
from mlxinfer import LLM

STATUS = Path("/proc/self/status")


def status_bytes(name: str) -> int:
    """A number of kilobytes that the system says about this process, in bytes."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def show(folder: Path, photo: Path) -> dict[str, int]:
    """Reading, tower and prompt of a photo, after those of a small picture."""
    import mlx.core as mx

    with LLM(folder, progress=False) as llm:
        small = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
        llm.chat("What is it?", images=[small], max_tokens=2)
        mx.clear_cache()
        mx.reset_peak_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        held, arrays = status_bytes("VmRSS"), mx.get_active_memory()
        said = llm.chat("What is it?", images=[photo], max_tokens=1)
        return {
            "process_bytes": status_bytes("VmHWM") - held,
            "array_bytes": mx.get_peak_memory() - arrays,
            "prompt_tokens": said.prompt_tokens,
        }


if __name__ == "__main__":
    preload_openblas()
    print(json.dumps(show(Path(sys.argv[1]), Path(sys.argv[2]))))
