// Attention of few query rows over pages and a tail: each SIMD group takes blocks of its own.
//
// One threadgroup serves one item of the work list (some blocks of one sequence) and one KV head,
// with all query rows of that head: up to 8 * ROWS of them, where ROWS <= 3 and ROWS * D <= 256. Its
// 4 SIMD groups take turns at blocks of 16 tokens, hold all rows, and never wait for one another
// until the end. Every number of a block is read from the cache and dequantised once, by one lane,
// straight into the fragment that multiplies it: 8 numbers at a time wherever D is a multiple of 64.
//
// Products are of 8 rows whether there are as many or not: with one query row seven eighths of them
// are idle, which costs arithmetic and no memory traffic.
//
// Registers of a lane, in floats: outputs ROWS * D / 4 (<= 64), scores 4 * ROWS, runs of four keys
// as they are stored (16 in 16 bits), fragments of queries and of keys 2 * ROWS + 2, peaks, totals
// and positions 3 * ROWS, about 12 for places. That is 71 at D 128 and 8 rows, 103 at D 256, 112 at
// D 128 and 16 rows, which is the most; of codes 16 more. With PAIRS outputs are no matrices. Queries, which all SIMD groups share, lie in threadgroup
// memory in the order of their fragments: 8 * ROWS * D numbers, 4 KB in 16 bits and 8 KB in 32 at
// most. What SIMD groups found is merged 8 rows and 32 numbers at a time (4 KB and 1 KB).

constant constexpr int STREAMS = 4;

// Queries of all rows in threadgroup memory: (ROWS, D / 8, 32 lanes, 2). `sums` of a lane's rows,
// over each span of 64 numbers.
template <typename T, int D, int ROWS>
struct SharedQueries {
  static constant constexpr int SPANS = D % 64 == 0 ? D / 64 : 1;
  const threadgroup T* pairs;
  uint lane;
  float sums[ROWS][SPANS];

  void add_up() thread {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      UNROLL
      for (int v = 0; v < SPANS; v++) {
        float sum = 0;
        for (int c = 8 * v; c < 8 * v + 8; c++) {
          const Fragment part = at(r, c);
          sum += part.thread_elements()[0] + part.thread_elements()[1];
        }
        sums[r][v] = row_sum(sum);
      }
    }
  }

  Fragment at(int r, int c) const thread {
    const vec<T, 2> pair =
        reinterpret_cast<const threadgroup vec<T, 2>*>(pairs)[(r * (D / 8) + c) * 32 + lane];
    Fragment part;
    part.thread_elements()[0] = float(pair[0]);
    part.thread_elements()[1] = float(pair[1]);
    return part;
  }
};

template <int D, int ROWS, typename T>
METAL_FUNC void share_queries(
    threadgroup T* pairs, const device T* first, int query_heads, int group, int num_rows,
    uint thread_index) {
  for (int i = thread_index; i < ROWS * D * 4; i += STREAMS * 32) {
    const Place at = place_of(i % 32);
    const int c = i / 32 % (D / 8);
    const int row = i / (4 * D) * 8 + at.row;
    const long vector = long(row / group) * query_heads + row % group;
    for (int e = 0; e < 2; e++) {
      const bool real = row < num_rows;
      pairs[2 * i + e] = real ? first[vector * D + key_index<D>(c, at.column + e)] : T(0);
    }
  }
}

template <int KD, int VD, int ROWS, bool SPLIT, bool SINKS, bool LOG_SUMS, bool PAIRS, typename T,
          typename Keys, typename Values, typename O, typename N, typename P>
METAL_FUNC void paged_attention(
    const device T* queries, Keys keys, Values values, P sink_logits,
    StepPlan plan, const device int* pages, N numbers,
    int query_heads, int heads, int tail_heads, long pool_tokens,
    device O* outputs, device float* figures_out,
    threadgroup T* shared_queries, threadgroup float* figures, threadgroup float* slice,
    uint item, uint head, uint stream, uint lane) {
  const Item own = plan.item(item);
  const Span span = plan.span(own.sequence);
  const Reach reach = plan.reach();
  const int group = query_heads / heads;
  const int num_rows = span.num_queries() * group;
  const Place at = place_of(lane);

  const long first = long(span.row) * query_heads + head * group;  // vector of row 0
  share_queries<KD, ROWS>(
      shared_queries, queries + first * KD, query_heads, group, num_rows, stream * 32 + lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  int query_positions[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    query_positions[r] = min(span.start + (r * 8 + at.row) / group, span.stop - 1);
  }
  RunningSoftmax<ROWS, VD / 8, Values::RAW, typename Sums<PAIRS>::Type> state;
  state.clear();
  SharedQueries<T, KD, ROWS> rows;
  rows.pairs = shared_queries;
  rows.lane = lane;
  if (Keys::RAW) rows.add_up();
  const device int* table = pages + own.table * plan.max_pages();
  const int page_size = plan.page_size();
  const ScoreScale scaled = score_scale(numbers);
  const int to_values = (tail_heads - heads) * 2 * page_size;
  for (int i = own.first + int(stream); i < own.last; i += STREAMS) {
    const int position = span.block_start(i);
    const BlockPlace place =
        find_block(span, table, position, page_size, head, tail_heads, pool_tokens);
    if (!place.held) continue;
    const auto block_keys = keys.at(place);
    const auto block_values = values.at(place.later(to_values));
    attend_tokens<KD, VD, 2>(
        state, rows, block_keys, block_values, span, reach, scaled, position, query_positions, at);
  }

  state.add_biases();
  const int rows_per_item = plan.max_queries() * group;
  const long partial = (long(item) * heads + head) * rows_per_item;
  const Outputs<O, SPLIT, LOG_SUMS> to = {
      outputs, figures_out, SPLIT ? partial : first, query_heads, group, num_rows};
  put_merged<VD, STREAMS, SINKS>(
      state, to, figures, slice, sink_logits, head, 0, stream, lane);
}
