// The second pass over split sequences: the partials of a sequence's items become its outputs.
//
// One SIMD group serves one query head of one query token; its lanes share the numbers.

template <int D, bool SINKS, bool LOG_SUMS, typename O, typename F, typename P>
METAL_FUNC void attention_reduce(
    const device float* partials,  // (items, heads, rows, D)
    F figures,                     // (items, heads, rows, 2): peak, total
    P sink_logits,
    StepPlan plan,
    int heads,
    device O* outputs,            // (T, query heads, D)
    device float* log_sum_exp,    // LOG_SUMS: (T, query heads)
    int query_head,
    int place,  // sequence and query of it
    uint lane,
    int query_heads) {
  const int max_queries = plan.max_queries();
  const int sequence = place / max_queries;
  const int query = place % max_queries;
  const Span span = plan.span(sequence);
  if (query >= span.num_queries()) return;
  const int last = plan.span(sequence + 1).first_item;
  const int group = query_heads / heads;
  const int row = query * group + query_head % group;
  const int head = query_head / group;
  const int rows = max_queries * group;

  RowFigures all = {LOWEST, 0};
  for (int i = span.first_item; i < last; i++) {
    all.peak = max(all.peak, figures[((long(i) * heads + head) * rows + row) * 2]);
  }
  constexpr int OWN = (D + 31) / 32;  // numbers of a lane, 32 apart
  float sums[OWN] = {0};
  for (int i = span.first_item; i < last; i++) {
    const long vector = (long(i) * heads + head) * rows + row;
    const float fade = fast::exp2(figures[vector * 2] - all.peak);
    all.total += figures[vector * 2 + 1] * fade;
    UNROLL
    for (int j = 0; j < OWN; j++) {
      const int number = j * 32 + lane;
      if (number < D) sums[j] += partials[vector * D + number] * fade;
    }
  }
  const float peak = all.peak;
  if (SINKS) all = all.with_sink(sink_logits, query_head);
  const float share = fast::exp2(peak - all.peak) / all.total;
  const long vector = long(span.row + query) * query_heads + query_head;
  UNROLL
  for (int j = 0; j < OWN; j++) {
    const int number = j * 32 + lane;
    if (number < D) outputs[vector * D + number] = O(sums[j] * share);
  }
  if (LOG_SUMS && lane == 0) log_sum_exp[vector] = all.log_sum_exp();
}
