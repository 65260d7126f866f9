// Attention of many query rows over pages and a tail: flash attention over tiles of tokens.
//
// One threadgroup serves one item of the work list, one KV head and one block of query rows. Each
// team of its SIMD groups has 8 * ROWS query rows of its own, so tokens are read and dequantised
// once into threadgroup memory, 16 keys and 16 values at a time, and each SIMD group multiplies
// them from there. Scores stay in registers: nothing grows with the context.
//
// A tile holds numbers of type S: dequantised ones of rows to verify in 32 bits, as the streaming
// kernel multiplies them, others as queries come. It lies in the order of fragments: (groups of 8
// tokens, chunks of 8 numbers, 32 lanes, 2). A lane that fills it has read the numbers which the
// same lane of every SIMD group multiplies, and a SIMD group stores and loads neighbouring words,
// which lie in different banks.
//
// The members of a team differ in one of two ways. PARTNERS 2: each takes 8 tokens of a tile, and
// they merge at the end (few rows). HALVES 2: each has one half of the numbers of keys and values,
// and they add up their scores of each tile (head dims above 256: their outputs do not fit the
// registers of one); then keys and values take turns in one place.
//
// Registers of a lane, in floats: outputs 2 * ROWS * VD / 8 / HALVES, queries as they come half as
// many in 16 bits, scores 4 * ROWS, two fragments, about 12 for places: `registers` in
// attention_shape.py. Threadgroup memory: the tile, 16 KB at most (8 tokens where 16 would be
// more), or what SIMD groups merge in afterwards.

constexpr int tile_tokens(int dims, int bytes, int halves) {
  return halves == 1 && 16 * dims * bytes <= 16384 ? 16 : 8;
}

// Of the tile, or of the figures and slices of SIMD groups that merge.
constexpr int scratch_floats(int dims, int bytes, int halves, int merged) {
  const int tile = tile_tokens(dims, bytes, halves) * dims * bytes / 4;
  return tile > merged ? tile : merged;
}

// Queries of one SIMD group's rows, as they come: CHUNKS chunks of 8 of their D numbers.
template <typename T, int D, int ROWS, int CHUNKS>
struct OwnQueries {
  vec<T, 2> pairs[ROWS][CHUNKS];

  Fragment at(int r, int c) const thread {
    Fragment part;
    part.thread_elements()[0] = float(pairs[r][c][0]);
    part.thread_elements()[1] = float(pairs[r][c][1]);
    return part;
  }

  void load(
      const device T* first, int query_heads, int group, int base, int num_rows, int chunk,
      Place at) thread {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const int row = base + r * 8 + at.row;
      const long vector = long(row / group) * query_heads + row % group;
      UNROLL
      for (int c = 0; c < CHUNKS; c++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          const int number = key_index<D>(chunk + c, at.column + e);
          pairs[r][c][e] = row < num_rows ? first[vector * D + number] : T(0);
        }
      }
    }
  }
};

// Fragments of D / 8 chunks for each group of 8 tokens, in threadgroup memory.
template <typename T, int D>
struct FragmentTile {
  const threadgroup T* pairs;
  uint lane;

  Fragment at(int g, int c) const thread {
    const vec<T, 2> pair =
        reinterpret_cast<const threadgroup vec<T, 2>*>(pairs)[(g * (D / 8) + c) * 32 + lane];
    Fragment part;
    part.thread_elements()[0] = float(pair[0]);
    part.thread_elements()[1] = float(pair[1]);
    return part;
  }
};

// Keys of a block, from `skipped` on, into a tile. Each SIMD group takes every so many units.
template <int D, int TOKENS, typename T, typename Rows>
METAL_FUNC void fill_keys(
    threadgroup T* tile, const thread Rows& rows, int skipped, Span span, Reach reach,
    int position, int simd_group, int num_groups, uint lane) {
  constexpr int RUN = key_run(D);
  constexpr int SPANS = D / (8 * RUN);
  const Place at = place_of(lane);
  for (int unit = simd_group; unit < TOKENS / 8 * SPANS; unit += num_groups) {
    const int g = unit / SPANS;
    const int v = unit % SPANS;
    typename Rows::template Run<RUN> runs[2];
    UNROLL
    for (int e = 0; e < 2; e++) {
      const int token = 8 * g + at.column + e;
      rows.template read<RUN, 8 * RUN>(
          runs[e], skipped + token, v * 8 * RUN, at.row * RUN,
          reach.seen(span, position + token), false);
    }
    threadgroup vec<T, 2>* pairs = reinterpret_cast<threadgroup vec<T, 2>*>(tile);
    const int first = (g * (D / 8) + v * RUN) * 32 + lane;
    UNROLL
    for (int j = 0; j < RUN; j++) {
      pairs[first + j * 32] = vec<T, 2>(T(runs[0].at(j)), T(runs[1].at(j)));
    }
  }
}

// Values likewise; a unit holds whole groups that share a scale where spans allow it.
template <int D, int TOKENS, typename T, typename Rows>
METAL_FUNC void fill_values(
    threadgroup T* tile, const thread Rows& rows, int skipped, Span span, Reach reach,
    int position, int simd_group, int num_groups, uint lane) {
  constexpr int HALF = value_run(D) / 2;
  constexpr int SPAN = 8 * HALF;
  constexpr int JOINED = D % 64 == 0 ? 64 / SPAN : 1;
  constexpr int SHARED = Rows::template spans<SPAN>();
  constexpr int SPANS = D / SPAN / JOINED;
  const Place at = place_of(lane);
  for (int unit = simd_group; unit < TOKENS / 8 * SPANS; unit += num_groups) {
    const int g = unit / SPANS;
    const int token = 8 * g + at.row;
    const bool seen = reach.seen(span, position + token);
    typename Rows::template Run<2 * HALF> run;
    UNROLL
    for (int i = 0; i < JOINED; i++) {
      const int v = unit % SPANS * JOINED + i;
      rows.template read<2 * HALF, SPAN>(
          run, skipped + token, v * SPAN, at.column * HALF, seen,
          JOINED % SHARED == 0 && i % SHARED != 0);
      threadgroup vec<T, 2>* pairs = reinterpret_cast<threadgroup vec<T, 2>*>(tile);
      const int first = (g * (D / 8) + v * HALF) * 32 + lane;
      UNROLL
      for (int j = 0; j < HALF; j++) {
        pairs[first + j * 32] = vec<T, 2>(T(run.at(j)), T(run.at(j + HALF)));
      }
    }
  }
}

// scores += queries . keys, over CHUNKS chunks of a tile from `chunk` on.
template <int CHUNKS, int ROWS, int GROUPS, typename Queries, typename Tile>
METAL_FUNC void add_tile_scores(
    thread Fragment (&scores)[ROWS][GROUPS], const thread Queries& queries,
    const thread Tile& keys, int chunk) {
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int g = 0; g < GROUPS; g++) scores[r][g] = Fragment(0);
  }
  UNROLL
  for (int c = 0; c < CHUNKS; c++) {
    Fragment rows[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) rows[r] = queries.at(r, c);
    UNROLL
    for (int g = 0; g < GROUPS; g++) {
      const Fragment part = keys.at(g, chunk + c);
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        simdgroup_multiply_accumulate(scores[r][g], rows[r], part, scores[r][g]);
      }
    }
  }
}

// outputs += weights . values, over CHUNKS chunks of a tile from `chunk` on.
template <int ROWS, int GROUPS, int CHUNKS, typename Tile>
METAL_FUNC void add_tile_values(
    thread RunningSoftmax<ROWS, CHUNKS>& state, thread Fragment (&weights)[ROWS][GROUPS],
    const thread Tile& values, int chunk) {
  UNROLL
  for (int g = 0; g < GROUPS; g++) {
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
      const Fragment part = values.at(g, chunk + c);
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        thread Fragment& sum = state.outputs[r][c];
        simdgroup_multiply_accumulate(sum, weights[r][g], part, sum);
      }
    }
  }
}

// Scores of one half of the numbers become those of all: the other half's are added. Both halves
// must come here; `sums` has room for the scores of all SIMD groups.
template <int ROWS, int GROUPS>
METAL_FUNC void add_other_half(
    thread Fragment (&scores)[ROWS][GROUPS], threadgroup float2* sums, int simd_group, uint lane) {
  constexpr int SIZE = ROWS * GROUPS * 32;
  threadgroup float2* mine = sums + simd_group * SIZE + lane;
  UNROLL
  for (int i = 0; i < ROWS * GROUPS; i++) {
    thread Fragment& own = scores[i / GROUPS][i % GROUPS];
    mine[i * 32] = float2(own.thread_elements()[0], own.thread_elements()[1]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const threadgroup float2* other = sums + (simd_group ^ 1) * SIZE + lane;
  UNROLL
  for (int i = 0; i < ROWS * GROUPS; i++) {
    thread Fragment& own = scores[i / GROUPS][i % GROUPS];
    const float2 added = other[i * 32];
    own.thread_elements()[0] += added.x;
    own.thread_elements()[1] += added.y;
  }
}

// Puts down CHUNKS chunks, from `chunk` on, of the rows of a SIMD group that has them to itself,
// the first of which is `base`.
template <int VD, bool SINKS, int ROWS, int CHUNKS, typename O, bool SPLIT, bool LOG_SUMS,
          typename P>
METAL_FUNC void put_alone(
    thread RunningSoftmax<ROWS, CHUNKS>& state,
    thread const Outputs<O, SPLIT, LOG_SUMS>& to,
    P sink_logits,
    int head,
    int base,
    int chunk,
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
    for (int c = 0; c < CHUNKS; c++) {
      const int number = value_index<VD>(chunk + c, at.column);
      out[number] = O(state.outputs[r][c].thread_elements()[0] * share);
      out[number + value_run(VD) / 2] = O(state.outputs[r][c].thread_elements()[1] * share);
    }
    if (chunk == 0 && at.column == 0) put_figures<SINKS>(to, found, row, sink_logits, head);
  }
}

// The queries of one SIMD group: where each row stands, to hide what it must not see.
template <int ROWS>
struct RowPositions {
  int of[ROWS];

  // Scores in base 2; HIDDEN where a query must not see a key.
  template <int GROUPS>
  void scale(
      thread Fragment (&scores)[ROWS][GROUPS], Reach reach, ScoreScale scaled, int position,
      Place at) const thread {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          const float score = scaled(scores[r][g].thread_elements()[e]);
          const bool sees = reach.sees(of[r], position + 8 * g + at.column + e);
          scores[r][g].thread_elements()[e] = sees ? score : HIDDEN;
        }
      }
    }
  }
};

template <typename S, int KD, int VD, int ROWS, int SIMD_GROUPS, int PARTNERS, int HALVES,
          bool SPLIT, bool SINKS, bool LOG_SUMS, typename T, typename Keys, typename Values,
          typename O, typename N, typename P>
METAL_FUNC void tiled_attention(
    const device T* queries, Keys keys, Values values, P sink_logits,
    StepPlan plan, const device int* pages, N numbers,
    int query_heads, int heads, int tail_heads, long pool_tokens,
    device O* outputs, device float* figures_out,
    threadgroup float* scratch, threadgroup float2* sums,
    uint item, uint head, uint row_block, uint simd_group, uint lane) {
  constexpr int TOKENS = tile_tokens(KD + VD, sizeof(S), HALVES);
  constexpr int GROUPS = TOKENS / 8 / PARTNERS;
  constexpr int KEY_CHUNKS = KD / 8 / HALVES;
  constexpr int VALUE_CHUNKS = VD / 8 / HALVES;
  constexpr int MEMBERS = PARTNERS * HALVES;
  constexpr int TEAMS = SIMD_GROUPS / MEMBERS;
  const Item own = plan.item(item);
  const Span span = plan.span(own.sequence);
  const Reach reach = plan.reach();
  const int group = query_heads / heads;
  const int num_rows = span.num_queries() * group;
  const Place at = place_of(lane);
  const int team = simd_group / MEMBERS;
  const int stream = PARTNERS == 1 ? 0 : simd_group % PARTNERS;
  const int half_of = HALVES == 1 ? 0 : simd_group % HALVES;
  const int base = (row_block * TEAMS + team) * ROWS * 8;

  const long first = long(span.row) * query_heads + head * group;  // vector of row 0
  OwnQueries<T, KD, ROWS, KEY_CHUNKS> rows;
  rows.load(
      queries + first * KD, query_heads, group, base, num_rows, half_of * KEY_CHUNKS, at);
  RowPositions<ROWS> positions;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    positions.of[r] = min(span.start + (base + r * 8 + at.row) / group, span.stop - 1);
  }
  RunningSoftmax<ROWS, VALUE_CHUNKS> state;
  state.clear();
  threadgroup S* key_tile = reinterpret_cast<threadgroup S*>(scratch);
  threadgroup S* value_tile = HALVES == 1 ? key_tile + TOKENS * KD : key_tile;
  const FragmentTile<S, KD> own_keys = {key_tile + stream * GROUPS * 8 * KD, lane};
  const FragmentTile<S, VD> own_values = {value_tile + stream * GROUPS * 8 * VD, lane};
  const device int* table = pages + own.table * plan.max_pages();
  const int page_size = plan.page_size();
  const int to_values = (tail_heads - heads) * 2 * page_size;
  const ScoreScale scaled = score_scale(numbers);
  for (int i = own.first; i < own.last; i++) {
    const int block = span.block_start(i);
    const BlockPlace place =
        find_block(span, table, block, page_size, head, tail_heads, pool_tokens);
    if (!place.held) continue;
    const auto block_keys = keys.at(place);
    const auto block_values = values.at(place.later(to_values));
    for (int skipped = 0; skipped < BLOCK; skipped += TOKENS) {
      const int position = block + skipped;
      const int own_position = position + stream * GROUPS * 8;
      Fragment scores[ROWS][GROUPS];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fill_keys<KD, TOKENS>(
          key_tile, block_keys, skipped, span, reach, position, simd_group, SIMD_GROUPS, lane);
      if (HALVES == 1) {
        fill_values<VD, TOKENS>(
            value_tile, block_values, skipped, span, reach, position, simd_group, SIMD_GROUPS,
            lane);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      add_tile_scores<KEY_CHUNKS>(scores, rows, own_keys, half_of * KEY_CHUNKS);
      if constexpr (HALVES == 2) {
        add_other_half(scores, sums, simd_group, lane);
        fill_values<VD, TOKENS>(
            value_tile, block_values, skipped, span, reach, position, simd_group, SIMD_GROUPS,
            lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      positions.scale(scores, reach, scaled, own_position, at);
      state.weigh(scores);
      add_tile_values(state, scores, own_values, half_of * VALUE_CHUNKS);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int rows_per_item = plan.max_queries() * group;
  const long partial = (long(item) * heads + head) * rows_per_item;
  const Outputs<O, SPLIT, LOG_SUMS> to = {
      outputs, figures_out, SPLIT ? partial : first, query_heads, group, num_rows};
  if constexpr (PARTNERS == 1) {
    put_alone<VD, SINKS>(state, to, sink_logits, head, base, half_of * VALUE_CHUNKS, lane);
  } else {
    threadgroup float* slices = scratch + SIMD_GROUPS * ROWS * 16;
    put_merged<VD, PARTNERS, SINKS>(
        state, to, scratch + team * PARTNERS * ROWS * 16,
        slices + team * PARTNERS * 8 * slice_pitch(VD), sink_logits, head, base, stream, lane);
  }
}
