"""Kernels with their text in a test, not in a file; and small sound ones, for tests to break."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from metal_cpu.device import MetalCPU
from metal_cpu.report import Size
from mlxinfer.metal_kernels.launch import Launch, MetalKernel, TemplateValue


@dataclass(frozen=True, slots=True)
class InlineKernel(MetalKernel):
    """A kernel with its text."""

    text: str = ""

    @property
    def header(self) -> str:
        """The text."""
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A kernel and a launch of it with one output.

    Args:
        body: calls the kernel's function, which `text` holds, or does it all.
        threadgroup: None: all threads are in one.
        output_shape: None: a number for each place along the first axis of the grid.
    """

    text: str = "// nothing before the body"
    body: str
    inputs: dict[str, mx.array]
    grid: Size
    threadgroup: Size | None = None
    output_shape: tuple[int, ...] | None = None
    output_dtype: mx.Dtype = mx.float32
    template: Sequence[tuple[str, TemplateValue]] = ()

    def launch(self) -> Launch:
        """The call, but for its inputs."""
        return Launch(
            InlineKernel("example", tuple(self.inputs), ("out",), self.body, text=self.text),
            self.template,
            self.grid,
            self.threadgroup or self.grid,
            [self.output_shape or (self.grid[0],)],
            [self.output_dtype],
        )

    def run(self, machine: MetalCPU) -> mx.array:
        """The output."""
        (out,) = machine(self.launch(), list(self.inputs.values()))
        return out

    def line_of(self, fragment: str, replaced: dict[str, str]) -> int:
        """Number of the line of the text, after replacements, that holds a fragment."""
        text = self.text
        for old, new in replaced.items():
            text = text.replace(old, new)
        (line,) = [n for n, row in enumerate(text.splitlines(), 1) if fragment in row]
        return line


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
ROW_SUMS = Example(
    text="""
// The sum of each row, by one threadgroup of several SIMD-groups.
template <typename T>
METAL_FUNC void row_sums(
    const device T* x, device float* out, int n, threadgroup float* part,
    uint row, uint rows, uint thread_index, uint num_threads, uint simdgroup, uint lane) {
  float sum = 0;
  for (int i = thread_index; i < n; i += num_threads) {
    sum += float(x[row * n + i]);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    part[simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    float total = lane < num_threads / 32 ? part[lane] : 0.0f;
    total = simd_sum(total);
    if (lane == 0) {
      out[row] = total;
    }
  }
}
""",
    body="""
    threadgroup float part[32];
    row_sums<T>(
        x, out, x_shape[1], part, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
        thread_index_in_threadgroup, threads_per_threadgroup.x, simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);
    """,
    inputs={"x": mx.arange(6 * 200).reshape(6, 200).astype(mx.float16) % 7},
    grid=(6 * 96, 1, 1),
    threadgroup=(96, 1, 1),
    output_shape=(6,),
    template=[("T", mx.float16)],
)

TURNED = Example(
    text="""
// Each SIMD-group turns 32 groups of four halves around, and scales them by what the lanes hold.
struct Four {
  float values[4];
};

METAL_FUNC void turned(
    const device half* x, const device int* shifts, device half* out, threadgroup half4* tile,
    uint position, uint simdgroup, uint lane) {
  half4 own = *(const device half4*)(x + 4 * position);
  threadgroup half4* mine = tile + 32 * simdgroup;
  mine[lane] = own;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  half4 other = mine[31 - lane];
  Four four = {{1, 2, 3, 4}};
  int factor = 1 << (shifts[lane % 8] & 7);
  float next = simd_shuffle(float(factor), ushort(lane ^ 1));
  for (int i = 0; i < 4; i++) {
    out[4 * position + i] = half(float(other[i]) * four.values[i] + next + 8 / factor);
  }
}
""",
    body="""
    threadgroup half4 tile[64];
    turned(
        x, shifts, out, tile, thread_position_in_grid.x, simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);
    """,
    inputs={
        "x": mx.random.normal((128, 4), key=mx.random.key(1)).astype(mx.float16),
        "shifts": mx.array([0, 1, 2, 3, 0, 1, 2, 3]),
    },
    grid=(128, 1, 1),
    threadgroup=(64, 1, 1),
    output_shape=(128, 4),
    output_dtype=mx.float16,
)

COUNTS = Example(
    text="""
// How often each of eight numbers occurs, by any number of threadgroups.
METAL_FUNC void counts(
    const device int* x, device atomic<uint>* out, threadgroup atomic_uint* own, uint position,
    uint thread_index) {
  if (thread_index < 8) {
    atomic_store_explicit(&own[thread_index], 0u, memory_order_relaxed);
    atomic_store_explicit(&out[thread_index], 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&own[x[position]], 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < 8) {
    uint found = atomic_load_explicit(&own[thread_index], memory_order_relaxed);
    atomic_fetch_add_explicit(&out[thread_index], found, memory_order_relaxed);
  }
}
""",
    body="""
    threadgroup atomic_uint own[8];
    counts(
        x, (device atomic<uint>*)out, own, thread_position_in_grid.x, thread_index_in_threadgroup);
    """,
    inputs={"x": mx.arange(64) % 8},
    grid=(64, 1, 1),
    threadgroup=(64, 1, 1),
    output_shape=(8,),
    output_dtype=mx.uint32,
)


def turned_expected() -> mx.array:
    """What TURNED computes."""
    x = TURNED.inputs["x"].reshape(-1, 32, 4)[:, ::-1].reshape(-1, 4).astype(mx.float32)
    factors = 2 ** TURNED.inputs["shifts"][mx.arange(128) % 8]
    neighbours = factors[mx.arange(128) ^ 1]
    scaled = x * mx.array([1.0, 2.0, 3.0, 4.0])
    return scaled + (neighbours + 8 // factors)[:, None]
