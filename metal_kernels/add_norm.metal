// A block's output joins the residual stream, and the sum is normed: one threadgroup a row.
//
// Sums are rounded before they are normed, as they are where each is an operation of its own.
// Registers of a lane: 4 numbers for each of its vectors, and about 14 more.
using namespace metal;

// The sum over a threadgroup of at most 16 SIMD groups; `shared` is read by all of them.
METAL_FUNC float group_sum(
    float own, threadgroup float* shared, uint simd_groups, uint simd_group, uint lane) {
  own = simd_sum(own);
  if (lane == 0) shared[simd_group] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simd_groups ? shared[lane] : 0.0f);
}

// x, block: (rows, DIMS); AFTER: `after` (DIMS,) weighs the norm of block's row before it is added;
// BEFORE: `before` (DIMS,) weighs the norm of the sum. A lane takes every THREADS-th vector of 4.
template <int DIMS, int THREADS, bool AFTER, bool BEFORE, typename T, typename Weights>
METAL_FUNC void add_norm(
    const device T* x, const device T* block, Weights after, Weights before, float after_eps,
    float before_eps, device T* sums, device T* normed, threadgroup float* shared, uint row,
    uint thread_index, uint simd_group, uint lane) {
  constexpr int VECTORS = DIMS / 4;
  constexpr int OWN = (VECTORS + THREADS - 1) / THREADS;
  constexpr uint SIMD_GROUPS = THREADS / 32;
  const ulong first = ulong(row) * DIMS;
  float numbers[OWN][4];
  float squares = 0.0f;
#pragma clang loop unroll(full)
  for (int i = 0; i < OWN; i++) {
    const int vector = i * THREADS + int(thread_index);
#pragma clang loop unroll(full)
    for (int j = 0; j < 4; j++) {
      numbers[i][j] = vector < VECTORS ? float(block[first + vector * 4 + j]) : 0.0f;
      squares += numbers[i][j] * numbers[i][j];
    }
  }
  float scale = 1.0f;
  if (AFTER) {
    const float total = group_sum(squares, shared, SIMD_GROUPS, simd_group, lane);
    scale = precise::rsqrt(total / DIMS + after_eps);
  }
  squares = 0.0f;
#pragma clang loop unroll(full)
  for (int i = 0; i < OWN; i++) {
    const int vector = i * THREADS + int(thread_index);
    if (vector < VECTORS) {
#pragma clang loop unroll(full)
      for (int j = 0; j < 4; j++) {
        const int place = vector * 4 + j;
        const float weight = AFTER ? float(after[place]) : 1.0f;
        const T added = T(numbers[i][j] * scale * weight);
        const T sum = T(float(x[first + place]) + float(added));
        sums[first + place] = sum;
        numbers[i][j] = float(sum);
        squares += numbers[i][j] * numbers[i][j];
      }
    }
  }
  if (BEFORE) {
    const float total = group_sum(squares, shared + SIMD_GROUPS, SIMD_GROUPS, simd_group, lane);
    scale = precise::rsqrt(total / DIMS + before_eps);
#pragma clang loop unroll(full)
    for (int i = 0; i < OWN; i++) {
      const int vector = i * THREADS + int(thread_index);
      if (vector < VECTORS) {
#pragma clang loop unroll(full)
        for (int j = 0; j < 4; j++) {
          const int place = vector * 4 + j;
          normed[first + place] = T(numbers[i][j] * scale * float(before[place]));
        }
      }
    }
  }
}
