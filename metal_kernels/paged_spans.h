// Where the tokens of a sequence lie, and which of them a query sees.
//
// Positions before `sealed` lie in pages, heads first: (heads, pool tokens, width). The rest lie in
// the sequence's tail, a ring of two pages: (slots, tail heads, 2 * page_size, width). Keys and
// values that are stored alike share tails, the heads of the keys first. A block of 16 tokens never
// crosses a page, so that its vectors are consecutive in either.

constant constexpr int PLAN_SIZES = 8;
constant constexpr int SPAN_FIELDS = 8;
constant constexpr int WORK_FIELDS = 4;

// One sequence of a step, as the plan describes it.
struct Span {
  int row;          // of its first query in the flat list
  int start;        // position of that query
  int stop;         // one past the last position
  int sealed;       // positions that lie in pages
  int slot;         // of its tail
  int sink_blocks;  // blocks at the front that are seen whatever the window is
  int gap;          // blocks after them that no query sees
  int first_item;   // of the work list

  int num_queries() const thread { return stop - start; }

  // The position of the first token of the i-th block that any query sees.
  int block_start(int i) const thread { return (i < sink_blocks ? i : i + gap) * BLOCK; }
};

// What a layer group keeps: a query sees itself, the `window` positions up to it, and the sinks.
struct Reach {
  int window;
  int sinks;

  bool sees(int query, int key) const thread {
    return key <= query && (key > query - window || key < sinks);
  }

  // Whether any query of a sequence sees a key.
  bool seen(Span span, int key) const thread {
    return key < span.stop && (key > span.start - window || key < sinks);
  }
};

// Some blocks of one sequence, [first, last) of those that any query sees.
struct Item {
  int sequence;  // or tile of its queries: a span
  int first;
  int last;
  int table;  // row of the page table
};

// What the host planned: sizes, the spans, one more that ends the items, and the work list.
struct StepPlan {
  const device int* numbers;

  int page_size() const thread { return numbers[0]; }
  Reach reach() const thread { return {numbers[1], numbers[2]}; }
  int max_pages() const thread { return numbers[3]; }
  int max_queries() const thread { return numbers[4]; }

  Span span(int sequence) const thread {
    const device int* at = numbers + PLAN_SIZES + sequence * SPAN_FIELDS;
    return {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
  }

  Item item(int index) const thread {
    const device int* at = numbers + numbers[5] + index * WORK_FIELDS;
    return {at[0], at[1], at[2], at[3]};
  }
};

// Vectors of one block, as an index into pages or into tails; `held` false: a page that was released.
struct BlockPlace {
  bool held;
  bool in_pages;
  long vector;

  // The same tokens of a head that comes so many vectors later in the tail.
  BlockPlace later(int vectors) const thread {
    return {held, in_pages, in_pages ? vector : vector + vectors};
  }
};

template <typename P>
METAL_FUNC BlockPlace find_block(
    Span span, P pages, int position, int page_size, int head, int tail_heads, long pool_tokens) {
  if (position < span.sealed) {
    const int page = pages[position / page_size];
    const long token = long(page) * page_size + position % page_size;
    return {page >= 0, true, head * pool_tokens + token};
  }
  const int ring = 2 * page_size;
  return {true, false, (long(span.slot) * tail_heads + head) * ring + position % ring};
}

// The keys or the values of a layer: pages and tails of each part.
template <typename Rows, typename C, typename S>
struct Plane {
  static constant constexpr bool RAW = Rows::RAW;
  const device C* tail_codes;
  const device C* codes;
  const device S* tail_groups;
  const device S* groups;

  Rows at(BlockPlace place) const thread {
    const long number = place.vector * Rows::WIDTH + Rows::FIRST_CODE;
    const long group = 2 * (place.vector * Rows::GROUPS + Rows::FIRST_GROUP);
    return {
        (place.in_pages ? codes : tail_codes) + number,
        (place.in_pages ? groups : tail_groups) + group};
  }
};

// Of vectors of D numbers, read from number FIRST on.
template <int BITS, int D, int FIRST, typename C, typename S>
METAL_FUNC Plane<typename Format<BITS, D, FIRST, C, S>::Rows, C, S> plane_of(
    const device C* tail_codes, const device C* codes,
    const device S* tail_groups, const device S* groups) {
  return {tail_codes, codes, tail_groups, groups};
}

// GROUPS groups of 8 tokens from `position` on join the softmax of all rows.
template <int KD, int VD, int GROUPS, int ROWS, typename Sum, typename Queries, typename Keys,
          typename Values>
METAL_FUNC void attend_tokens(
    thread RunningSoftmax<ROWS, VD / 8, Values::RAW, Sum>& state,
    const thread Queries& queries,
    const thread Keys& keys,
    const thread Values& values,
    Span span,
    Reach reach,
    ScoreScale scaled,
    int position,
    const thread int (&query_positions)[ROWS],
    Place at) {
  bool key_seen[GROUPS][2];
  bool value_seen[GROUPS];
  Fragment scores[ROWS][GROUPS];
  UNROLL
  for (int g = 0; g < GROUPS; g++) {
    const int token = position + 8 * g;
    value_seen[g] = reach.seen(span, token + at.row);
    UNROLL
    for (int e = 0; e < 2; e++) key_seen[g][e] = reach.seen(span, token + at.column + e);
    UNROLL
    for (int r = 0; r < ROWS; r++) scores[r][g] = Fragment(0);
  }
  add_scores<KD>(scores, queries, keys, key_seen, at);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int g = 0; g < GROUPS; g++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        const float score = scaled(scores[r][g].thread_elements()[e]);
        const bool sees = reach.sees(query_positions[r], position + 8 * g + at.column + e);
        scores[r][g].thread_elements()[e] = sees ? score : HIDDEN;
      }
    }
  }
  state.weigh(scores);
  add_values<VD>(state, scores, values, value_seen, key_seen, at);
}
