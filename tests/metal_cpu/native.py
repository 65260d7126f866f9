"""The structures of machine/state.h, field by field. Knows nothing else."""

import ctypes

from metal_cpu.report import Fault, Traffic

MAX_FAULTS = 64
STACKS_BYTES = 1024 * 128 * 1024
ARENA_BYTES = 64 * 1024
TRAFFIC = (
    "requested", "requested_once", "unique_per_group", "unique", "stored",
    "num_loads", "num_stores",
)  # fmt: skip


class NativeTraffic(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in TRAFFIC]

    def as_traffic(self) -> Traffic:
        return Traffic(*(getattr(self, name) for name in TRAFFIC))


class NativeBuffer(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("before", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("index", ctypes.c_uint32),
        ("is_output", ctypes.c_uint32),
        ("traffic", NativeTraffic),
    ]


class NativeFault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 24), ("message", ctypes.c_char * 360),
        ("file", ctypes.c_char * 96), ("line", ctypes.c_uint32), ("times", ctypes.c_uint32),
    ]  # fmt: skip

    def as_fault(self) -> Fault:
        kind, message, file = (text.decode() for text in (self.kind, self.message, self.file))
        return Fault(kind, message, file, self.line, self.times)


class NativeBankUse(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char * 96), ("line", ctypes.c_uint32), ("ways", ctypes.c_uint32)]

    @property
    def place(self) -> str:
        return f"{self.file.decode()}:{self.line}"


class NativeDispatch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("threadgroup", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64), ("buffers", ctypes.POINTER(NativeBuffer)),
        ("stacks", ctypes.c_void_p), ("arena", ctypes.c_void_p), ("num_buffers", ctypes.c_uint32),
        ("checked", ctypes.c_uint32), ("num_faults", ctypes.c_uint32), ("unused", ctypes.c_uint32),
        ("faults", NativeFault * MAX_FAULTS), ("threadgroup_bytes", ctypes.c_uint64),
        ("num_threadgroups", ctypes.c_uint64), ("num_threads", ctypes.c_uint64),
        ("num_simd_ops", ctypes.c_uint64), ("num_simdgroup_barriers", ctypes.c_uint64),
        ("num_threadgroup_barriers", ctypes.c_uint64), ("threadgroup_memory", NativeTraffic),
        ("bank", NativeBankUse),
    ]  # fmt: skip
