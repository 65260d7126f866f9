// The second pass over split sequences: the partials of a sequence's items become its outputs.
//
// One threadgroup serves one query head of one query token. Its threads read the items' peaks and
// totals side by side; then each of its SIMD groups adds up every so many items: its lanes share
// their numbers, and what they found is added in threadgroup memory, 256 numbers at a time (8 KB).

constant constexpr int REDUCERS = 8;    // SIMD groups
constant constexpr int ROUND_CHUNKS = 8;  // of 32 numbers that are brought together at a time

struct ReduceScratch {
  threadgroup float* found;   // (REDUCERS): of peaks, then of totals
  threadgroup float* slices;  // (REDUCERS, ROUND_CHUNKS, 32)
};

// What all threads of the threadgroup agree on; `of` each SIMD group.
METAL_FUNC float largest(threadgroup float* of, float mine, uint simd_group, uint lane) {
  const float top = simd_max(mine);
  if (lane == 0) of[simd_group] = top;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float all = of[0];
  for (int s = 1; s < REDUCERS; s++) all = max(all, of[s]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return all;
}

METAL_FUNC float together(threadgroup float* of, float mine, uint simd_group, uint lane) {
  const float sum = simd_sum(mine);
  if (lane == 0) of[simd_group] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float all = 0;
  for (int s = 0; s < REDUCERS; s++) all += of[s];
  return all;
}

template <int D, bool SINKS, bool LOG_SUMS, typename O, typename F, typename P>
METAL_FUNC void attention_reduce(
    const device float* partials,  // (items, heads, rows, D)
    F figures,                     // (items, heads, rows, 2): peak, total
    P sink_logits,
    StepPlan plan,
    int heads,
    device O* outputs,            // (T, query heads, D)
    device float* log_sum_exp,    // LOG_SUMS: (T, query heads)
    ReduceScratch scratch,
    int query_head,
    int place,  // sequence and query of it
    uint simd_group,
    uint lane,
    int query_heads) {
  const int max_queries = plan.max_queries();
  const int sequence = place / max_queries;
  const int query = place % max_queries;
  const Span span = plan.span(sequence);
  const bool real = query < span.num_queries();  // the same for the whole threadgroup
  const int first = span.first_item;
  const int last = real ? plan.span(sequence + 1).first_item : first;
  const int group = query_heads / heads;
  const int row = query * group + query_head % group;
  const int rows = max_queries * group;
  const long item_vectors = long(heads) * rows;
  const long own = long(query_head / group) * rows + row;  // vector of item 0

  const int thread_index = simd_group * 32 + lane;
  float peak = LOWEST;
  for (int i = first + thread_index; i < last; i += REDUCERS * 32) {
    peak = max(peak, figures[(i * item_vectors + own) * 2]);
  }
  peak = largest(scratch.found, peak, simd_group, lane);
  float total = 0;
  for (int i = first + thread_index; i < last; i += REDUCERS * 32) {
    const long vector = i * item_vectors + own;
    total += figures[vector * 2 + 1] * fast::exp2(figures[vector * 2] - peak);
  }
  RowFigures all = {peak, together(scratch.found, total, simd_group, lane)};

  constexpr int CHUNKS = (D + 31) / 32;  // numbers of a lane, 32 apart
  float sums[CHUNKS] = {0};
  for (int i = first + int(simd_group); i < last; i += REDUCERS) {
    const long vector = i * item_vectors + own;
    const float fade = fast::exp2(figures[vector * 2] - peak);
    UNROLL
    for (int j = 0; j < CHUNKS; j++) {
      const int number = j * 32 + lane;
      if (number < D) sums[j] += partials[vector * D + number] * fade;
    }
  }
  if (SINKS && real) all = all.with_sink(sink_logits, query_head);
  const float share = fast::exp2(peak - all.peak) / all.total;
  const long vector = long(span.row + query) * query_heads + query_head;
  UNROLL
  for (int from = 0; from < CHUNKS; from += ROUND_CHUNKS) {
    UNROLL
    for (int j = from; j < CHUNKS && j < from + ROUND_CHUNKS; j++) {
      scratch.slices[(int(simd_group) * ROUND_CHUNKS + j - from) * 32 + lane] = sums[j];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int chunk = from + int(simd_group);
    const int number = chunk * 32 + lane;
    if (real && number < D) {
      float sum = 0;
      for (int s = 0; s < REDUCERS; s++) {
        sum += scratch.slices[(s * ROUND_CHUNKS + int(simd_group)) * 32 + lane];
      }
      outputs[vector * D + number] = O(sum * share);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (LOG_SUMS && real && thread_index == 0) log_sum_exp[vector] = all.log_sum_exp();
}
