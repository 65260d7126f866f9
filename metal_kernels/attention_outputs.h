// How a threadgroup puts down what it found: finished outputs, or partials that another kernel
// reduces. And how SIMD groups that saw different tokens for the same rows come together.

// Where rows of one KV head go. A row is (query token, query head of the group).
template <typename O, bool SPLIT, bool LOG_SUMS>
struct Outputs {
  device O* numbers;      // finished: (T, query heads, D); partial: (items, heads, rows, D)
  device float* figures;  // LOG_SUMS: (T, query heads) log-sum-exp; partial: (.., 2) peak, total
  long first;             // vector of the first query token and query head; or of row 0
  int query_heads;
  int group;     // query heads per KV head
  int num_rows;  // of this sequence

  long vector_of(int row) const thread {
    return SPLIT ? first + row : first + long(row / group) * query_heads + row % group;
  }
};

// A row's peak and total once its sink logit has joined: a score without a value.
struct RowFigures {
  float peak;
  float total;

  template <typename P>
  RowFigures with_sink(P logits, int query_head) const thread {
    const float logit = float(logits[query_head]) * M_LOG2E_F;
    const float top = max(peak, logit);
    return {top, total * fast::exp2(peak - top) + fast::exp2(logit - top)};
  }

  float log_sum_exp() const thread { return (peak + fast::log2(total)) * M_LN2_F; }
};

// Numbers of a value that streams merge at a time, and how far apart rows of them lie: lanes that
// store a column of rows meet other banks.
constexpr int slice_width(int D) { return value_run(D) * 4; }
constexpr int slice_pitch(int D) { return slice_width(D) + 1; }

// The figures of row `row` over all `streams`, and the weight of each stream.
template <int ROWS>
METAL_FUNC float merged_peak(const threadgroup float* figures, int streams, int row) {
  float peak = LOWEST;
  for (int s = 0; s < streams; s++) peak = max(peak, figures[(s * ROWS * 8 + row) * 2]);
  return peak;
}

template <int ROWS>
METAL_FUNC float merged_total(const threadgroup float* figures, int streams, int row, float peak) {
  float total = 0;
  for (int s = 0; s < streams; s++) {
    const threadgroup float* at = figures + (s * ROWS * 8 + row) * 2;
    total += at[1] * fast::exp2(at[0] - peak);
  }
  return total;
}

// What the outputs of a row are multiplied by: nothing yet where they are partials.
template <bool SINKS, typename O, bool SPLIT, bool LOG_SUMS, typename P>
METAL_FUNC float row_share(
    thread const Outputs<O, SPLIT, LOG_SUMS>& to, RowFigures row, int index, P sink_logits,
    int head) {
  if (SPLIT) return 1.0f;
  if (!SINKS) return 1.0f / row.total;
  const RowFigures all = row.with_sink(sink_logits, head * to.group + index % to.group);
  return fast::exp2(row.peak - all.peak) / all.total;
}

// Puts down the peak and total of a row, or its log-sum-exp, or nothing.
template <bool SINKS, typename O, bool SPLIT, bool LOG_SUMS, typename P>
METAL_FUNC void put_figures(
    thread const Outputs<O, SPLIT, LOG_SUMS>& to, RowFigures row, int index, P sink_logits,
    int head) {
  const long vector = to.vector_of(index);
  if (SPLIT) {
    to.figures[vector * 2] = row.peak;
    to.figures[vector * 2 + 1] = row.total;
  } else if (LOG_SUMS && SINKS) {
    const int query_head = head * to.group + index % to.group;
    const RowFigures all = row.with_sink(sink_logits, query_head);
    to.figures[vector] = all.log_sum_exp();
  } else if (LOG_SUMS) {
    to.figures[vector] = row.log_sum_exp();
  }
}

// Brings STREAMS SIMD groups together, which saw different tokens for the same rows, and puts the
// rows down, the first of which is `base`. `figures` and `slice` are of these SIMD groups alone.
template <int VD, int STREAMS, bool SINKS, int ROWS, bool RAW, typename Sum, typename O, bool SPLIT,
          bool LOG_SUMS, typename P>
METAL_FUNC void put_merged(
    thread RunningSoftmax<ROWS, VD / 8, RAW, Sum>& state,
    thread const Outputs<O, SPLIT, LOG_SUMS>& to,
    threadgroup float* figures,
    threadgroup float* slice,
    P sink_logits,
    int head,
    int base,
    int stream,
    uint lane) {
  constexpr int HALF = value_run(VD) / 2;
  constexpr int WIDTH = slice_width(VD);
  constexpr int PITCH = slice_pitch(VD);
  const Place at = place_of(lane);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const float total = row_sum(state.total[r]);
    threadgroup float* mine = figures + ((stream * ROWS + r) * 8 + at.row) * 2;
    if (at.column == 0) {
      mine[0] = state.peak[r];
      mine[1] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const float fade = fast::exp2(
        state.peak[r] - merged_peak<ROWS>(figures, STREAMS, r * 8 + at.row));
    UNROLL
    for (int v = 0; v < VD / WIDTH; v++) {
      threadgroup float* mine = slice + (stream * 8 + at.row) * PITCH + at.column * HALF;
      UNROLL
      for (int j = 0; j < HALF; j++) {
        mine[j] = number(state.outputs[r][v * HALF + j], 0) * fade;
        mine[j + HALF] = number(state.outputs[r][v * HALF + j], 1) * fade;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = stream * 32 + lane; i < 8 * WIDTH; i += STREAMS * 32) {
        const int place = r * 8 + i / WIDTH;
        const int row = base + place;
        if (row >= to.num_rows) continue;
        const float peak = merged_peak<ROWS>(figures, STREAMS, place);
        const RowFigures found = {peak, merged_total<ROWS>(figures, STREAMS, place, peak)};
        float sum = 0;
        for (int s = 0; s < STREAMS; s++) {
          sum += slice[(s * 8 + i / WIDTH) * PITCH + i % WIDTH];
        }
        const int number = v * WIDTH + i % WIDTH;
        const float share = row_share<SINKS>(to, found, row, sink_logits, head);
        to.numbers[to.vector_of(row) * VD + number] = O(sum * share);
        if (number == 0) put_figures<SINKS>(to, found, row, sink_logits, head);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
