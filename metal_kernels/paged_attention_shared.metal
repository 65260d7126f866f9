// Attention of many query rows over pages and a tail: all SIMD groups share each tile of tokens.
//
// One threadgroup serves one item of the work list and one KV head, as in paged_attention.metal,
// but each pair (or each one) of its SIMD groups has query rows of its own, 8 * ROWS of them. So
// tokens are read and dequantised once into threadgroup memory, 16 keys and 16 values at a time,
// and each SIMD group fills its fragments from there. The two of a pair take 8 tokens each and
// merge at the end.
//
// Registers of a lane, in floats: outputs 2 * ROWS * D / 8 (<= 32, 64 at D 256), queries as they
// come half as many in 16 bits, scores 4 * ROWS, two fragments, about 12 for places: 64 at D 128,
// 112 at D 256; float32 queries at D 192 and 256 do not fit and spill. Threadgroup memory: the
// tile, (KD + VD) * 16 numbers of the queries' type, 16 KB at most (8 tokens where 16 would be
// more); the merge takes the same place afterwards.

constexpr int tile_tokens(int dims, int bytes) { return 16 * dims * bytes <= 16384 ? 16 : 8; }

// Of the tile, or of the figures and slices of SIMD groups that merge.
constexpr int scratch_floats(int dims, int bytes, int merged) {
  const int tile = tile_tokens(dims, bytes) * dims * bytes / 4;
  return tile > merged ? tile : merged;
}

// Queries of one SIMD group's rows, as they come.
template <typename T, int D, int ROWS>
struct OwnQueries {
  vec<T, 2> pairs[ROWS][D / 8];

  Fragment at(int r, int c) const {
    Fragment part;
    part.thread_elements()[0] = float(pairs[r][c][0]);
    part.thread_elements()[1] = float(pairs[r][c][1]);
    return part;
  }

  void load(const device T* first, int query_heads, int group, int base, int num_rows, Place at) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const int row = base + r * 8 + at.row;
      const long vector = long(row / group) * query_heads + row % group;
      UNROLL
      for (int c = 0; c < D / 8; c++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          const int number = key_index<D>(c, at.column + e);
          pairs[r][c][e] = row < num_rows ? first[vector * D + number] : T(0);
        }
      }
    }
  }
};

// Vectors of D numbers in threadgroup memory.
template <int D, typename T>
struct Tile {
  template <int N>
  using Run = PlainRun<T, N>;
  const threadgroup T* numbers;

  template <int SPAN>
  static constexpr int spans() { return 1; }

  template <int N, int SPAN>
  void read(thread Run<N>& run, int token, int span, int first, bool, bool) const {
    constexpr int WIDE = Run<N>::WIDE;
    const threadgroup T* at = numbers + token * D + span + first;
    UNROLL
    for (int i = 0; i < N / WIDE; i++) {
      run.parts[i] = reinterpret_cast<const threadgroup vec<T, WIDE>*>(at)[i];
    }
  }
};

// Tokens of a block, from `skipped` on, into a tile.
template <int D, int TOKENS, typename T, typename Rows>
inline void fill_tile(
    threadgroup T* tile, const thread Rows& rows, int skipped, Span span, Reach reach,
    int position, int thread_index, int num_threads) {
  for (int i = thread_index; i < TOKENS * (D / 8); i += num_threads) {
    const int token = i / (D / 8);
    const int first = i % (D / 8) * 8;
    const bool seen = reach.seen(span, position + token);
    typename Rows::template Run<8> run;
    rows.template read<8, 8>(run, skipped + token, first, 0, seen, false);
    UNROLL
    for (int j = 0; j < 8; j++) tile[token * D + first + j] = T(run.at(j));
  }
}

// Puts down the rows of a SIMD group that has them to itself, the first of which is `base`.
template <int VD, bool SINKS, int ROWS, typename O, bool SPLIT, bool LOG_SUMS, typename P>
inline void put_alone(
    thread RunningSoftmax<ROWS, VD / 8>& state,
    thread const Outputs<O, SPLIT, LOG_SUMS>& to,
    P sink_logits,
    int head,
    int base,
    uint lane) {
  const Place at = place_of(lane);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int row = base + r * 8 + at.row;
    const RowFigures found = {state.peak[r], row_sum(state.total[r])};
    if (row >= to.num_rows) continue;
    const float share = row_share<SINKS>(to, found, row, sink_logits, head);
    device O* out = to.numbers + to.vector_of(row) * VD;
    UNROLL
    for (int c = 0; c < VD / 8; c++) {
      const int number = value_index<VD>(c, at.column);
      out[number] = O(state.outputs[r][c].thread_elements()[0] * share);
      out[number + value_run(VD) / 2] = O(state.outputs[r][c].thread_elements()[1] * share);
    }
    if (at.column == 0) put_figures<SINKS>(to, found, row, sink_logits, head);
  }
}

template <int KD, int VD, int ROWS, int SIMD_GROUPS, int PARTNERS, bool SPLIT, bool SINKS,
          bool LOG_SUMS, typename T, typename Keys, typename Values, typename O, typename N,
          typename P>
inline void paged_attention_shared(
    const device T* queries, Keys keys, Values values, P sink_logits,
    StepPlan plan, const device int* pages, N numbers,
    int query_heads, int heads, int tail_heads, long pool_tokens,
    device O* outputs, device float* figures_out,
    threadgroup float* scratch,
    uint item, uint head, uint simd_group, uint lane) {
  constexpr int TOKENS = tile_tokens(KD + VD, sizeof(T));
  constexpr int GROUPS = TOKENS / 8 / PARTNERS;
  const Item own = plan.item(item);
  const Span span = plan.span(own.sequence);
  const Reach reach = plan.reach();
  const int group = query_heads / heads;
  const int num_rows = span.num_queries() * group;
  const Place at = place_of(lane);
  const int team = simd_group / PARTNERS;
  const int stream = simd_group % PARTNERS;
  const int base = team * ROWS * 8;

  const long first = long(span.row) * query_heads + head * group;  // vector of row 0
  OwnQueries<T, KD, ROWS> rows;
  rows.load(queries + first * KD, query_heads, group, base, num_rows, at);
  int query_positions[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    query_positions[r] = min(span.start + (base + r * 8 + at.row) / group, span.stop - 1);
  }
  RunningSoftmax<ROWS, VD / 8> state;
  state.clear();
  threadgroup T* key_tile = reinterpret_cast<threadgroup T*>(scratch);
  threadgroup T* value_tile = key_tile + TOKENS * KD;
  const Tile<KD, T> own_keys = {key_tile + stream * GROUPS * 8 * KD};
  const Tile<VD, T> own_values = {value_tile + stream * GROUPS * 8 * VD};
  const device int* table = pages + own.sequence * plan.max_pages();
  const int page_size = plan.page_size();
  const int to_values = (tail_heads - heads) * 2 * page_size;
  const int thread_index = simd_group * 32 + lane;
  for (int i = own.first; i < own.last; i++) {
    const int block = span.block_start(i);
    const BlockPlace place =
        find_block(span, table, block, page_size, head, tail_heads, pool_tokens);
    if (!place.held) continue;
    for (int skipped = 0; skipped < BLOCK; skipped += TOKENS) {
      const int position = block + skipped;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fill_tile<KD, TOKENS>(key_tile, keys.at(place), skipped, span, reach, position,
                            thread_index, SIMD_GROUPS * 32);
      fill_tile<VD, TOKENS>(value_tile, values.at(place.later(to_values)), skipped, span, reach,
                            position, thread_index, SIMD_GROUPS * 32);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      attend_tokens<KD, VD, GROUPS>(
          state, rows, own_keys, own_values, span, reach, score_scale(numbers),
          position + stream * GROUPS * 8, query_positions, at);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int rows_per_item = plan.max_queries() * group;
  const long partial = (long(item) * heads + head) * rows_per_item;
  const Outputs<O, SPLIT, LOG_SUMS> to = {
      outputs, figures_out, SPLIT ? partial : first, query_heads, group, num_rows};
  if constexpr (PARTNERS == 1) {
    put_alone<VD, SINKS>(state, to, sink_logits, head, base, lane);
  } else {
    threadgroup float* slices = scratch + SIMD_GROUPS * ROWS * 16;
    put_merged<VD, PARTNERS, SINKS>(
        state, to, scratch + team * PARTNERS * ROWS * 16,
        slices + team * PARTNERS * 8 * slice_width(VD), sink_logits, head, base, stream, lane);
  }
}
