"""Runs a kernel over buffers. Knows neither MLX nor where kernels come from."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock

import numpy as np

from metal_cpu import arrays
from metal_cpu.native import ARENA_BYTES, STACKS_BYTES, NativeBuffer, NativeDispatch
from metal_cpu.program import program
from metal_cpu.report import Fault, Report, Size
from metal_cpu.source import Kernel

_one_at_a_time = Lock()  # the machine's state is a kernel's library's


@dataclass(slots=True)
class Buffer:
    """Memory that one parameter of a kernel is bound to.

    Attributes:
        bytes: of an output, every bit is set before.
        written: one flag per byte that holds data; None: all do.
        before: bytes that a kernel believes to be there before `bytes`; none may be touched.
    """

    name: str
    bytes: arrays.Bytes
    is_output: bool
    written: arrays.Bytes | None = None
    may_stay_unwritten: bool = False
    before: int = 0

    @classmethod
    def of_input(
        cls,
        name: str,
        data: arrays.Bytes,
        *,
        alignment: int = arrays.ALIGNMENT,
        written: arrays.Bytes | None = None,
    ) -> "Buffer":
        """A copy of data at an address of that alignment."""
        memory = arrays.aligned(data.size, alignment)
        memory[:] = data
        return cls(name, memory, False, written)

    @classmethod
    def of_output(cls, name: str, num_bytes: int, *, may_stay_unwritten: bool = False) -> "Buffer":
        """Memory that holds nothing yet."""
        memory = arrays.aligned(num_bytes, arrays.ALIGNMENT, fill=0xFF)
        return cls(name, memory, True, np.zeros(num_bytes, np.uint8), may_stay_unwritten)


def dispatch(
    kernel: Kernel,
    buffers: Sequence[Buffer | None],
    *,
    grid: Size,
    threadgroup: Size,
    seed: int = 0,
    checked: bool = True,
) -> Report:
    """Run a grid of threads to its end, or to the fault that stops it.

    Args:
        buffers: in the order of the kernel's buffer parameters; None: not bound.
        grid: in threads.
    """
    compiled = program(kernel, checked=checked)
    slots = [parameter for parameter in compiled.parameters if parameter.is_buffer]
    assert len(slots) == len(buffers), f"{kernel.function} takes {[slot.name for slot in slots]}"
    bound = [(s.index, s.name, b) for s, b in zip(slots, buffers, strict=True) if b is not None]
    native = (NativeBuffer * max(1, len(bound)))(*(_native(*one) for one in bound))
    memory = (_memory(STACKS_BYTES), _memory(ARENA_BYTES))
    call = NativeDispatch(grid, threadgroup, seed, native, *memory, len(bound), int(checked))
    with _one_at_a_time:
        compiled.library.msl_dispatch(ctypes.byref(call))
    report = _report(kernel, grid, threadgroup, call)
    if checked:
        for record, (_, name, _) in zip(native, bound, strict=False):
            report.buffers[name] = record.traffic.as_traffic()
        if not report.faults:
            report.faults += [fault for _, _, buffer in bound for fault in _unwritten(buffer)]
    return report


def _unwritten(buffer: Buffer) -> list[Fault]:
    if not buffer.is_output or buffer.written is None or buffer.may_stay_unwritten:
        return []
    missing = np.flatnonzero(buffer.written == 0)
    if not missing.size:
        return []
    text = f"{missing.size} of {buffer.written.size} bytes of {buffer.name}, from {missing[0]} on"
    return [Fault("unwritten output", text, "", 0)]


def _report(kernel: Kernel, grid: Size, threadgroup: Size, call: "NativeDispatch") -> Report:
    return Report(
        kernel.function,
        grid,
        threadgroup,
        faults=[fault.as_fault() for fault in call.faults[: call.num_faults]],
        threadgroup_bytes=call.threadgroup_bytes,
        num_threadgroups=call.num_threadgroups,
        num_threads=call.num_threads,
        num_simd_ops=call.num_simd_ops,
        num_simdgroup_barriers=call.num_simdgroup_barriers,
        num_threadgroup_barriers=call.num_threadgroup_barriers,
        threadgroup_memory=call.threadgroup_memory.as_traffic(),
        bank_ways=call.bank.ways,
        bank_place=call.bank.place,
    )


def _native(index: int, name: str, buffer: Buffer) -> "NativeBuffer":
    written = buffer.written
    return NativeBuffer(
        buffer.bytes.ctypes.data,
        buffer.bytes.size,
        buffer.before,
        written.ctypes.data if written is not None else None,
        name.encode(),
        index,
        int(buffer.is_output),
    )


@cache
def _memory(num_bytes: int) -> int:
    """Address of memory that all dispatches use; the system gives pages as they are touched."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _kept.append(pages)
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


_kept: list[mmap.mmap] = []
