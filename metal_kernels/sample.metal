// The next token of each row of logits: temperature, top-k, top-p, min-p, then one draw. No sort.
//
// One threadgroup a row. Everything is one search: put what tokens weigh into up to BINS bins and
// find the bin at which the sum over the bins exceeds a target. For top-k and top-p the bins are
// ranges of logits, largest first; for the draw they are ranges of token ids.
//
// A row is read three times at most where few tokens remain: for its extremes; into bins; and to
// take the tokens down to the range found, up to one a thread, into threadgroup memory, where what
// is left of the search is exact. Where more remain, the range is cut into bins again until it is a
// single value.
//
// A weight is exp((logit - highest) / temperature) in units of 2^-40, a whole number, so sums are
// exact: they depend neither on the order in which threads add nor on how many threads there are.
using namespace metal;

constant constexpr uint SIMDGROUPS = THREADS / 32;
constant constexpr uint MAX_CANDIDATES = THREADS;
constant constexpr float ONE = 1099511627776.0f;  // 2^40
constant constexpr float NO_WEIGHT = 28.0f;        // exp(-28) is less than 2^-40

// The logits of one row. -inf: forbidden by the grammar or by the model, or not a number.
// WIDE neighbours are read at once: 4 where rows are multiples of 4, else 1.
template <typename T, bool MASKED, uint WIDTH, typename Logits, typename Mask>
struct Row {
  static constant constexpr uint WIDE = WIDTH;
  Logits logits;
  Mask mask;
  uint vocab_size;
  uint num_masked;  // tokens that have a bit; the others are forbidden

  float seen(uint id, float x) thread {
    if (MASKED && (id >= num_masked || ((mask[id / 32] >> (id % 32)) & 1u) == 0)) {
      return -INFINITY;
    }
    return x == 0.0f ? 0.0f : (x == x ? min(x, FLT_MAX) : -INFINITY);  // one zero, no NaN
  }

  float at(uint id) thread { return seen(id, float(logits[id])); }

  // WIDE tokens from `id` on, which is a multiple of it.
  void read(uint id, thread float (&x)[WIDTH]) thread {
    if constexpr (WIDTH == 4) {
      const vec<T, 4> four = reinterpret_cast<const device vec<T, 4>*>(logits)[id / 4];
      for (uint i = 0; i < 4; i++) x[i] = seen(id + i, float(four[i]));
    } else {
      x[0] = at(id);
    }
  }
};

// Hands every token of a row to `visitor`, a thread WIDE neighbours at a time.
template <typename Tokens, typename Visitor>
void visit(Tokens row, thread Visitor& visitor, uint thread_id) {
  for (uint id = thread_id * Tokens::WIDE; id < row.vocab_size; id += THREADS * Tokens::WIDE) {
    float x[Tokens::WIDE];
    row.read(id, x);
    for (uint i = 0; i < Tokens::WIDE; i++) visitor.see(id + i, x[i]);
  }
}

// What a token weighs, and which target a sum must exceed, for top-k and for top-p.
struct Count {
  ulong k;
  ulong weight(float) thread { return 1; }
  ulong target(ulong total) thread { return min(k, total) - 1; }
};

struct Mass {
  float highest;
  float temperature;
  float top_p;
  float probability(float x) thread { return precise::exp((x - highest) / temperature); }
  ulong weight(float x) thread { return ulong(probability(x) * ONE); }
  // To reach share * total is to exceed the next smaller whole number.
  ulong target(ulong total) thread {
    const ulong share = ulong(top_p * 4294967296.0f);
    const ulong low = (total & 0xffffffffu) * share;
    const ulong goal = (total >> 32) * share + (low >> 32);
    return goal - (goal > 0 && (low & 0xffffffffu) == 0 ? 1 : 0);
  }
};

// Logits in [lowest, highest] as equal ranges, largest first.
struct Ranges {
  float lowest;
  float highest;
  float scale;  // 0: they are one range

  uint of(float x) const thread {
    return scale > 0.0f ? min(uint((highest - x) * scale), BINS - 1) : 0;
  }
};

METAL_FUNC Ranges ranges_of(float lowest, float highest) {
  const float span = highest - lowest;
  const bool linear = span > 1e-30f && span < 1e30f;  // else the scale would overflow or vanish
  return {lowest, highest, linear ? float(BINS) / span : 0.0f};
}

// Puts what tokens weigh into the bins of their ranges.
template <typename Weigh>
struct Filler {
  Bins bins;
  Weigh weigh;
  Ranges ranges;

  void see(uint, float x) thread {
    if (x < ranges.lowest) return;
    const ulong weight = weigh.weight(x);
    if (weight != 0) bins.add(ranges.of(x), weight);
  }
};

// Of one range, by keys: [bottom, top] in bins of 2^shift.
template <typename T, typename Weigh>
struct KeyFiller {
  Bins bins;
  Weigh weigh;
  Ranges ranges;
  uint range;
  uint bottom;
  uint top;
  uint shift;

  void see(uint, float x) thread {
    const uint key = key_of<T>(x);
    if (x >= ranges.lowest && key >= bottom && key <= top && ranges.of(x) == range) {
      bins.add((top - key) >> shift, weigh.weight(x));
    }
  }
};

// The largest value such that the tokens from it up, of those in [lowest, highest], exceed the target.
template <typename T, typename Tokens, typename Weigh>
float floor_of(Tokens row, Bins bins, Weigh weigh, float lowest, float highest) {
  const Ranges ranges = ranges_of(lowest, highest);
  if (!(highest > lowest)) {
    return highest;
  }
  bins.clear();
  Filler<Weigh> filler = {bins, weigh, ranges};
  visit(row, filler, bins.thread_id);
  ulong target = weigh.target(bins.total());
  const uint range = bins.find(target);
  // The range, and one on either side: where a value falls was rounded.
  uint top = key_of<T>(highest), bottom = key_of<T>(lowest);
  if (ranges.scale > 0.0f) {
    top = min(top, key_of<T>(highest - (float(range) - 1.0f) / ranges.scale));
    bottom = max(bottom, key_of<T>(highest - (float(range) + 2.0f) / ranges.scale));
  }
  while (top > bottom) {
    const uint length = 32 - clz(top - bottom);
    const uint shift = length > 10 ? length - 10 : 0;
    bins.clear();
    KeyFiller<T, Weigh> keys = {bins, weigh, ranges, range, bottom, top, shift};
    visit(row, keys, bins.thread_id);
    bins.total();
    top -= bins.find(target) << shift;
    bottom = max(bottom, top - min(top, (1u << shift) - 1));
  }
  return value_of<T>(top);
}

// SplitMix64, counter-based: the top 24 bits of the number `count` of a stream.
METAL_FUNC uint random_bits(ulong stream, uint count) {
  ulong z = stream + (ulong(count) + 1) * 0x9E3779B97F4A7C15ul;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ul;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBul;
  return uint((z ^ (z >> 31)) >> 40);
}

// The random share of a total.
METAL_FUNC ulong share_of(ulong total, uint random) {
  return (total >> 24) * random + (((total & 0xffffffu) * random) >> 24);
}

// The first token, by id, at which the sum of the weights kept exceeds the random share of them all.
template <typename Tokens>
uint draw(Tokens row, Bins bins, Mass mass, float lowest, float min_p, uint random) {
  constexpr uint STEP = 32 * Tokens::WIDE;  // tokens of a SIMD group at a time
  const uint chunk = ((row.vocab_size + BINS - 1) / BINS + STEP - 1) / STEP * STEP;
  bins.clear();
  const uint lane = bins.thread_id % 32;
  for (uint start = bins.thread_id / 32 * STEP; start < row.vocab_size; start += SIMDGROUPS * STEP) {
    const uint id = start + lane * Tokens::WIDE;
    ulong weight = 0;
    if (id < row.vocab_size) {
      float x[Tokens::WIDE];
      row.read(id, x);
      for (uint i = 0; i < Tokens::WIDE; i++) {
        const bool kept = x[i] >= lowest && mass.probability(x[i]) >= min_p;
        weight += kept ? mass.weight(x[i]) : 0;
      }
    }
    const uint low = simd_sum(uint(weight) & 0xfffffu);  // there is no simd_sum of 64 bits
    const uint high = simd_sum(uint(weight >> 20));
    if (lane == 0 && (low | high) != 0) {
      bins.add(start / chunk, (ulong(high) << 20) + ulong(low));
    }
  }
  const ulong total = bins.total();
  ulong target = share_of(total, random);
  const uint first = bins.find(target) * chunk;
  bins.clear();
  for (uint i = bins.thread_id; i < chunk && first + i < row.vocab_size; i += THREADS) {
    const float x = row.at(first + i);
    if (x >= lowest && mass.probability(x) >= min_p) {
      bins.add(i, mass.weight(x));
    }
  }
  bins.total();
  return first + bins.find(target);
}

// The highest logit, the first token that has it, and the lowest logit that is finite.
struct Extremes {
  float highest;
  uint token;
  float lowest;

  void see(uint id, float x) thread {
    if (x > highest) {
      highest = x;
      token = id;
    }
    lowest = x > -INFINITY ? min(lowest, x) : lowest;
  }
};

// Room for the extremes that each SIMD-group found, and for how many candidates there are.
struct Shared {
  threadgroup float* highest;
  threadgroup uint* token;
  threadgroup float* lowest;
  threadgroup atomic_uint* count;
};

template <typename Tokens>
Extremes extremes_of(Tokens row, Shared shared, uint thread_id) {
  Extremes found = {-INFINITY, 0, INFINITY};
  visit(row, found, thread_id);
  const float highest = simd_max(found.highest);
  const uint token = simd_min(found.highest == highest ? found.token : row.vocab_size);
  const float lowest = simd_min(found.lowest);
  if (thread_id % 32 == 0) {
    shared.highest[thread_id / 32] = highest;
    shared.token[thread_id / 32] = token;
    shared.lowest[thread_id / 32] = lowest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  found = {-INFINITY, row.vocab_size, INFINITY};
  for (uint i = 0; i < SIMDGROUPS; i++) {
    const float other = shared.highest[i];
    found.token = other > found.highest ? shared.token[i]
        : other == found.highest        ? min(found.token, shared.token[i])
                                        : found.token;
    found.highest = max(found.highest, other);
    found.lowest = min(found.lowest, shared.lowest[i]);
  }
  return found;
}

// Tokens that may be kept, at most one a thread, in the memory of bins.
struct Candidates {
  threadgroup uint* ids;
  threadgroup float* values;
  threadgroup ulong* weights;
  uint count;
};

// Writes down the tokens of ranges up to `last`. The lanes that have one at the same time get their
// places by one atomic addition, and write to neighbouring words, which lie in different banks of
// threadgroup memory.
template <typename Tokens>
void collect(
    Tokens row, Candidates to, threadgroup atomic_uint* count, Ranges ranges, uint last,
    uint thread_id) {
  constexpr uint STEP = 32 * Tokens::WIDE;  // tokens of a SIMD group at a time
  const uint lane = thread_id % 32;
  for (uint start = thread_id / 32 * STEP; start < row.vocab_size; start += SIMDGROUPS * STEP) {
    const uint id = start + lane * Tokens::WIDE;
    float x[Tokens::WIDE];
    uint taken[Tokens::WIDE] = {};
    uint num_taken = 0;
    if (id < row.vocab_size) {
      row.read(id, x);
      for (uint i = 0; i < Tokens::WIDE; i++) {
        taken[i] = x[i] >= ranges.lowest && ranges.of(x[i]) <= last ? 1 : 0;
        num_taken += taken[i];
      }
    }
    if (!simd_any(num_taken != 0)) continue;
    for (uint i = 0; i < Tokens::WIDE; i++) {
      const uint before = simd_prefix_exclusive_sum(taken[i]);
      const uint all = simd_sum(taken[i]);
      uint first = 0;
      if (lane == 0) first = atomic_fetch_add_explicit(count, all, memory_order_relaxed);
      const uint place = simd_broadcast_first(first) + before;
      if (taken[i] != 0 && place < MAX_CANDIDATES) {
        to.ids[place] = id + i;
        to.values[place] = x[i];
      }
    }
  }
}

// Sums over candidates. `mine` is this thread's; others are read by all lanes at once.
METAL_FUNC uint number_above(Candidates all, float mine) {
  uint count = 0;
  for (uint i = 0; i < all.count; i++) count += all.values[i] > mine ? 1 : 0;
  return count;
}

METAL_FUNC ulong mass_above(Candidates all, float mine, thread ulong& total) {
  ulong sum = 0;
  total = 0;
  for (uint i = 0; i < all.count; i++) {
    const ulong weight = all.weights[i];
    total += weight;
    sum += all.values[i] > mine ? weight : 0;
  }
  return sum;
}

METAL_FUNC ulong mass_before(Candidates all, uint mine, thread ulong& total) {
  ulong sum = 0;
  total = 0;
  for (uint i = 0; i < all.count; i++) {
    const ulong weight = all.weights[i];
    total += weight;
    sum += all.ids[i] < mine ? weight : 0;
  }
  return sum;
}

// What the settings of a row ask for.
struct Asked {
  uint top_k;  // 0: all
  float min_p;
  uint random;
};

// The drawn one of candidates that hold all that can be kept; `total`: of all tokens' weights,
// where top-k leaves them all. Each thread keeps or drops a candidate of its own.
METAL_FUNC uint drawn_of(
    Candidates all, Shared shared, Mass mass, Asked asked, ulong total, uint thread_id) {
  const bool has_one = thread_id < all.count;
  const uint id = has_one ? all.ids[thread_id] : 0;
  const float x = has_one ? all.values[thread_id] : -INFINITY;
  ulong weight = has_one ? mass.weight(x) : 0;
  if (asked.top_k > 0 && number_above(all, x) >= asked.top_k) weight = 0;
  if (has_one) all.weights[thread_id] = weight;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong sum = 0;
  if (mass.top_p < 1.0f) {
    const ulong above = mass_above(all, x, sum);
    if (above > mass.target(asked.top_k > 0 ? sum : total)) weight = 0;
  }
  if (mass.probability(x) < asked.min_p) weight = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (has_one) all.weights[thread_id] = weight;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong before = mass_before(all, id, sum);
  const ulong target = share_of(sum, asked.random);
  if (has_one && before <= target && target < before + weight) shared.token[0] = id;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return shared.token[0];
}

// The drawn token where at most MAX_CANDIDATES can be kept, else vocab_size.
template <typename Tokens>
uint draw_of_few(Tokens row, Bins bins, Shared shared, Mass mass, Asked asked, float lowest) {
  const float weightless = mass.highest - NO_WEIGHT * mass.temperature;
  const Ranges ranges = ranges_of(max(lowest, weightless), mass.highest);
  ulong total = 0, target = 0;
  bins.clear();
  if (asked.top_k > 0) {
    Filler<Count> filler = {bins, Count{asked.top_k}, ranges};
    visit(row, filler, bins.thread_id);
    total = bins.total();
    target = asked.top_k - 1;
  } else {
    Filler<Mass> filler = {bins, mass, ranges};
    visit(row, filler, bins.thread_id);
    total = bins.total();
    target = mass.target(total);
  }
  const uint last = total > target ? bins.find(target) : BINS - 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (bins.thread_id == 0) atomic_store_explicit(shared.count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup uint* const low = reinterpret_cast<threadgroup uint*>(bins.low);
  Candidates all = {
      low, reinterpret_cast<threadgroup float*>(low + MAX_CANDIDATES),
      reinterpret_cast<threadgroup ulong*>(bins.high), 0};
  collect(row, all, shared.count, ranges, last, bins.thread_id);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  all.count = atomic_load_explicit(shared.count, memory_order_relaxed);
  uint token = row.vocab_size;
  if (all.count <= MAX_CANDIDATES) {
    token = drawn_of(all, shared, mass, asked, total, bins.thread_id);
  }
  return token;
}

// The drawn token, however many are kept.
template <typename T, typename Tokens>
uint draw_of_many(Tokens row, Bins bins, Mass mass, Asked asked, float lowest) {
  if (asked.top_k > 0) {
    lowest = floor_of<T>(row, bins, Count{asked.top_k}, lowest, mass.highest);
  }
  if (mass.top_p < 1.0f) {
    const float weightless = mass.highest - NO_WEIGHT * mass.temperature;
    lowest = floor_of<T>(row, bins, mass, max(lowest, weightless), mass.highest);
  }
  return draw(row, bins, mass, lowest, asked.min_p, asked.random);
}

// settings: 8 words as `SETTINGS` in sample.py: temperature (0: the highest logit), top-k (0: all),
// top-p (1: all), min-p, the random stream in two words, and the index of its number.
template <typename T, typename Tokens, typename Settings>
uint sample(Tokens row, Bins bins, Shared shared, Settings settings) {
  const Extremes found = extremes_of(row, shared, bins.thread_id);
  const float temperature = as_type<float>(settings[0]);
  uint token = found.token;
  if (temperature != 0.0f && found.highest != -INFINITY) {
    const ulong stream = (ulong(settings[5]) << 32) | settings[4];
    const Asked asked = {
        settings[1], as_type<float>(settings[3]), random_bits(stream, settings[6])};
    const Mass mass = {found.highest, temperature, as_type<float>(settings[2])};
    token = row.vocab_size;
    if ((asked.top_k > 0 || mass.top_p < 1.0f) && asked.top_k <= MAX_CANDIDATES) {
      token = draw_of_few(row, bins, shared, mass, asked, found.lowest);
    }
    if (token == row.vocab_size) {
      token = draw_of_many<T>(row, bins, mass, asked, found.lowest);
    }
  }
  return token;
}

template <typename T, bool MASKED, uint WIDE, typename Logits, typename Mask>
Row<T, MASKED, WIDE, Logits, Mask> row_of(
    Logits logits, Mask mask, uint vocab_size, uint num_masked) {
  return {logits, mask, vocab_size, num_masked};
}
