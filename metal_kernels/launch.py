"""A custom Metal kernel, a call of it, and the device that runs it. Knows no kernel by name.

A kernel is a file `name.metal` with a template function; MLX compiles it with a signature of its
own around a body that calls that function. Every call goes through one `Device`: Metal on a Mac;
in the tests a machine that executes the same source on the CPU.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import mlx.core as mx

MAX_LAUNCHES = 512  # that are remembered
MOST_THREADS = 1024  # of a threadgroup, on any GPU
Size = tuple[int, int, int]
TemplateValue = int | bool | mx.Dtype

# Of an array for a kernel: MLX passes shorter ones in another address space, and that would be
# another variant of the kernel.
MIN_NUMBERS = 8

# NaN and infinities count: masks are -inf, and what holds no data is NaN. Where precision is worth
# less than time the kernels say `fast::`.
MATH_MODE = "safe"

TYPE_NAMES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}  # in Metal


@dataclass(frozen=True, slots=True, eq=False)
class MetalKernel:
    """The source of a kernel as MLX compiles it. Equal to itself alone: its text is long.

    Args:
        name: of the kernel, and of `name.metal`: its text comes before the body.
        inputs, outputs: names of the buffers, as the body calls them.
        body: the call of the template function. MLX passes `x_shape`, `x_strides` and thread
            positions where the body mentions them.
        includes: other files of this folder that come before `name.metal`.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    includes: tuple[str, ...] = ()

    @property
    def header(self) -> str:
        """The text of the kernel's files, in order; compilers name file and line in messages."""
        names = *self.includes, f"{self.name}.metal"
        return "\n".join(f'#line 1 "{name}"\n{source(name)}' for name in names)


@dataclass(slots=True)
class Launch:
    """A call of a kernel without its inputs, computed once for all layers that make it."""

    kernel: MetalKernel
    # values that are compiled in; each set of values is a variant of the kernel
    template: Sequence[tuple[str, TemplateValue]]
    grid: Size  # in threads
    threadgroup: Size  # threads of one threadgroup
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]
    function: Callable[..., list[mx.array]] = field(init=False, repr=False)  # MLX's, see `on_metal`

    def __post_init__(self) -> None:
        self.function = compiled(self.kernel, tuple(self.template), math.prod(self.threadgroup))

    def most_threads(self, inputs: Sequence[mx.array]) -> int | None:
        """Threads of a threadgroup for which the compiler leaves room, if none are declared.

        It is Metal's `maxTotalThreadsPerThreadgroup`: fewer, the more registers a thread takes. MLX
        says it where it refuses a launch with one thread more than any GPU takes. Nothing is run.
        None: it said something else.
        """
        threads = MOST_THREADS + 1
        try:
            outputs = compiled(self.kernel, tuple(self.template), 0)(
                inputs=inputs,
                grid=(threads, 1, 1),
                threadgroup=(threads, 1, 1),
                output_shapes=self.output_shapes,
                output_dtypes=self.output_dtypes,
            )
            mx.eval(outputs)
        except (ValueError, RuntimeError) as error:
            said = re.search(r"maximum allowed threads per threadgroup \((\d+)\)", str(error))
            return int(said[1]) if said else None
        return None

    def on_metal(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Lazy outputs, from MLX. Raises RuntimeError: there is no Metal here."""
        return self.function(
            inputs=inputs,
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=self.output_shapes,
            output_dtypes=self.output_dtypes,
        )

    def __call__(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """The outputs; lazy on Metal. Inputs that are not row-contiguous are copied first."""
        return _devices[-1](self, inputs)


Device = Callable[[Launch, Sequence[mx.array]], list[mx.array]]
"""Runs the call of a kernel on inputs; outputs are evaluated or not."""


@cache
def compiled(
    kernel: MetalKernel, template: tuple[tuple[str, TemplateValue], ...], num_threads: int
) -> Any:
    """MLX's callable of a variant. Nothing is compiled before its first call is evaluated.

    The kernel is declared for threadgroups of at most `num_threads`. The compiler then gives each
    thread the registers that this leaves, and spills the rest. Without the declaration it may
    choose registers for fewer threads, and then MLX refuses the launch. The attribute ends the
    header, right before the `[[kernel]]` that MLX writes. With 0 nothing is declared.

    Template values stand in the body, because MLX would turn its own template arguments into text
    in every call. The name of a compiled kernel has all of its values except the types of its
    arrays: some versions of MLX keep one library for each name. Kernels have those types among
    their values.
    """
    body = "\n".join([*(_declared(name, value) for name, value in template), kernel.body])
    header = f'{kernel.header}\n#line 1 "{kernel.name}, as MLX calls it"\n'
    if num_threads:
        header += f"[[max_total_threads_per_threadgroup({num_threads})]]\n"
    compiled_text = "\n".join([*kernel.inputs, *kernel.outputs, body, header])
    return mx.fast.metal_kernel(
        name=f"{kernel.name}_{sha256(compiled_text.encode()).hexdigest()[:16]}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=body,
        header=header,
        compile_options={"math_mode": MATH_MODE},
    )


def _declared(name: str, value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPE_NAMES[value]};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    return f"constexpr int {name} = {value};"


@contextmanager
def running_on(device: Device) -> Iterator[None]:
    """Send every call, from any thread, to `device` meanwhile."""
    _devices.append(device)
    try:
        yield
    finally:
        _devices.remove(device)


_devices: list[Device] = [Launch.on_metal]


@cache
def source(name: str) -> str:
    """A file of this folder, line by line, without comments and indentation.

    MLX copies the text of a kernel into every call of it.
    """
    text = files(__package__).joinpath(name).read_text()
    return "\n".join(line.partition("//")[0].strip() for line in text.splitlines())
