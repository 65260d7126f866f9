// Attention over a latent cache: one vector a token is the key of every head, and its first VD
// numbers are the value of every head (multi-head latent attention with absorbed projections).
//
// One threadgroup, a team of 8 SIMD groups, serves one item of the work list and up to 16 query
// rows (query token and head). Each SIMD group owns an eighth of the numbers: VD / 8 that are key
// and value, and an eighth of the rest, which is key only. So it reads each of its numbers once, 16
// bytes at a time where it can, into fragments (token, number) that serve twice: as the left side
// of keys . queries, for partial sums that the team adds up in threadgroup memory, and as the right
// side of weights . values. In between each thread has one (row, token).
//
// Registers of a lane at 576 numbers, in floats: outputs 32, queries 18 (36 where they are
// float32), latents of 16 tokens 36, scores 8, two fragments, about 14 for places: near 110. Two
// teams would share what they read, but 512 threads with 110 registers each are more than a core of
// the smallest chips has. Threadgroup memory: 8 KB.

constant constexpr int TEAM = 8;  // SIMD groups
constant constexpr int TEAM_ROWS = 16;
constant constexpr int SCORES = TEAM_ROWS * BLOCK;  // one for each thread
constant constexpr int HALF_RUN = 4;

// Where the score of a row and a token stands: rows of 16, every other pair of rows with its
// halves exchanged, so that lanes with a column of rows meet other banks.
METAL_FUNC int score_place(int row, int token) { return row * BLOCK + (token ^ (row / 2 % 2 * 8)); }

// Which number stands at place k of chunk c of a SIMD group's chunks: VD / 64 shared ones, then
// those that are key only.
template <int KD, int VD>
METAL_FUNC int latent_index(int part, int c, int k) {
  constexpr int SHARED = VD / TEAM;
  if (c < SHARED / 8) {
    return part * SHARED + c / HALF_RUN * 8 * HALF_RUN + k * HALF_RUN + c % HALF_RUN;
  }
  return VD + part * (KD - VD) / TEAM + (c * 8 - SHARED) + k;
}

// Fragments (token, number) of 8 tokens: the lane's token is `token`.
template <int KD, int VD, int CHUNKS, typename Rows>
METAL_FUNC void read_latents(
    thread Fragment (&latents)[CHUNKS], const thread Rows& rows, int token, bool seen, int part,
    Place at) {
  constexpr int SPAN = 8 * HALF_RUN;
  constexpr int SHARED = Rows::template spans<SPAN>() * HALF_RUN;
  typename Rows::template Run<2 * HALF_RUN> run;
  UNROLL
  for (int c = 0; c < VD / TEAM / 8; c += HALF_RUN) {
    const int first = latent_index<KD, VD>(part, c, 0);
    rows.template read<2 * HALF_RUN, SPAN>(
        run, token, first, at.column * HALF_RUN, seen, c % SHARED != 0);
    UNROLL
    for (int j = 0; j < HALF_RUN; j++) {
      latents[c + j].thread_elements()[0] = run.at(j);
      latents[c + j].thread_elements()[1] = run.at(j + HALF_RUN);
    }
  }
  UNROLL
  for (int c = VD / TEAM / 8; c < CHUNKS; c++) {
    const int first = latent_index<KD, VD>(part, c, 0);
    typename Rows::template Run<2> pair;
    rows.template read<2, 8>(pair, token, first, at.column, seen, false);
    latents[c].thread_elements()[0] = pair.at(0);
    latents[c].thread_elements()[1] = pair.at(1);
  }
}

// Queries of 16 rows as fragments (number, row), two of rows for each chunk.
template <int KD, int VD, typename T>
struct LatentQueries {
  vec<T, 2> pairs[2][KD / TEAM / 8];

  void load(const device T* first, int base, int num_rows, int part, Place at) thread {
    UNROLL
    for (int r = 0; r < 2; r++) {
      UNROLL
      for (int c = 0; c < KD / TEAM / 8; c++) {
        const int number = latent_index<KD, VD>(part, c, at.row);
        UNROLL
        for (int e = 0; e < 2; e++) {
          const int row = base + r * 8 + at.column + e;
          pairs[r][c][e] = row < num_rows ? first[long(row) * KD + number] : T(0);
        }
      }
    }
  }

  Fragment at(int r, int c) const thread {
    Fragment part;
    part.thread_elements()[0] = float(pairs[r][c][0]);
    part.thread_elements()[1] = float(pairs[r][c][1]);
    return part;
  }
};

// The softmax of one row, as one of the 16 threads knows it that have a token of it each.
struct RowSoftmax {
  float peak;
  float total;

  // A score becomes a weight; returns by how much what was summed so far fades.
  float weigh(thread float& score) thread {
    float top = score;
    for (ushort step = 1; step < BLOCK; step *= 2) top = max(top, simd_shuffle_xor(top, step));
    top = max(top, peak);
    const float fade = fast::exp2(peak - top);
    score = fast::exp2(score - top);
    float sum = score;
    for (ushort step = 1; step < BLOCK; step *= 2) sum += simd_shuffle_xor(sum, step);
    peak = top;
    total = total * fade + sum;
    return fade;
  }
};

template <int KD, int VD, bool SPLIT, bool LOG_SUMS, typename T, typename Latents,
          typename O, typename N>
METAL_FUNC void mla_attention(
    const device T* queries, Latents latents,
    StepPlan plan, const device int* pages, N scale,
    int query_heads, long pool_tokens,
    device O* outputs, device float* figures,
    threadgroup float* scores,
    uint item, uint row_block, uint part, uint lane) {
  constexpr int CHUNKS = KD / TEAM / 8;
  constexpr int VALUE_CHUNKS = VD / TEAM / 8;
  const Item own = plan.item(item);
  const Span span = plan.span(own.sequence);
  const Reach reach = plan.reach();
  const int num_rows = span.num_queries() * query_heads;
  const int base = row_block * TEAM_ROWS;
  const Place at = place_of(lane);
  const long first = long(span.row) * query_heads;

  LatentQueries<KD, VD, T> rows;
  rows.load(queries + first * KD, base, num_rows, part, at);
  Fragment sums[2][VALUE_CHUNKS];
  UNROLL
  for (int r = 0; r < 2; r++) {
    UNROLL
    for (int c = 0; c < VALUE_CHUNKS; c++) sums[r][c] = Fragment(0);
  }
  // Scores: of (parts, rows, tokens); then weights in part 0, fades at token 0 of part 1.
  const int mine = part * 32 + lane;  // this thread's (row, token)
  const int my_row = base + mine / BLOCK;
  const int my_place = score_place(mine / BLOCK, mine % BLOCK);
  const int my_query = min(span.start + my_row / query_heads, span.stop - 1);
  RowSoftmax softmax = {LOWEST, 0};
  const device int* table = pages + own.table * plan.max_pages();
  const int page_size = plan.page_size();

  for (int i = own.first; i < own.last; i++) {
    const int position = span.block_start(i);
    const BlockPlace place = find_block(span, table, position, page_size, 0, 1, pool_tokens);
    if (!place.held) continue;
    const auto stored = latents.at(place);
    Fragment held[2][CHUNKS];
    UNROLL
    for (int g = 0; g < 2; g++) {
      const int token = 8 * g + at.row;
      read_latents<KD, VD>(
          held[g], stored, token, reach.seen(span, position + token), part, at);
      UNROLL
      for (int r = 0; r < 2; r++) {
        Fragment partial = Fragment(0);
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
          simdgroup_multiply_accumulate(partial, held[g][c], rows.at(r, c), partial);
        }
        threadgroup float* out = scores + part * SCORES;
        const int row = r * 8 + at.column;
        out[score_place(row, token)] = partial.thread_elements()[0];
        out[score_place(row + 1, token)] = partial.thread_elements()[1];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float score = 0;
    for (int p = 0; p < TEAM; p++) score += scores[p * SCORES + my_place];
    const bool sees = reach.sees(my_query, position + mine % BLOCK);
    score = sees ? score * scale * M_LOG2E_F : HIDDEN;
    const float fade = softmax.weigh(score);
    scores[my_place] = score;
    if (mine % BLOCK == 0) scores[SCORES + my_place] = fade;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int r = 0; r < 2; r++) {
      const int row = r * 8 + at.row;
      const float faded = scores[SCORES + score_place(row, 0)];
      UNROLL
      for (int c = 0; c < VALUE_CHUNKS; c++) {
        sums[r][c].thread_elements()[0] *= faded;
        sums[r][c].thread_elements()[1] *= faded;
      }
      UNROLL
      for (int g = 0; g < 2; g++) {
        Fragment weights;
        weights.thread_elements()[0] = scores[score_place(row, 8 * g + at.column)];
        weights.thread_elements()[1] = scores[score_place(row, 8 * g + at.column + 1)];
        UNROLL
        for (int c = 0; c < VALUE_CHUNKS; c++) {
          simdgroup_multiply_accumulate(sums[r][c], weights, held[g][c], sums[r][c]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const long partial = long(item) * plan.max_queries() * query_heads;
  const Outputs<O, SPLIT, LOG_SUMS> to = {
      outputs, figures, SPLIT ? partial : first, query_heads, query_heads, num_rows};
  const RowFigures found = {softmax.peak, softmax.total};
  if (mine % BLOCK == 0) {
    scores[my_place] = SPLIT ? 1.0f : 1.0f / softmax.total;
    if (my_row < num_rows) put_figures<false>(to, found, my_row, figures, 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int r = 0; r < 2; r++) {
    const int row = base + r * 8 + at.row;
    if (row >= num_rows) continue;
    const float share = scores[score_place(r * 8 + at.row, 0)];
    device O* out = to.numbers + to.vector_of(row) * VD;
    UNROLL
    for (int c = 0; c < VALUE_CHUNKS; c++) {
      const int number = latent_index<KD, VD>(part, c, at.column);
      out[number] = O(sums[r][c].thread_elements()[0] * share);
      out[number + HALF_RUN] = O(sums[r][c].thread_elements()[1] * share);
    }
  }
}
