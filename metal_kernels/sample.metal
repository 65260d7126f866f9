// The next token of each row of logits: temperature, top-k, top-p, min-p, then one draw. No sort.
//
// One threadgroup a row. Everything is one search: put what tokens weigh into up to BINS bins and
// find the bin at which the sum over the bins exceeds a target. For top-k and top-p the bins are
// ranges of logits, largest first, and the range found is cut into bins again until it is a single
// value; for the draw they are ranges of token ids.
//
// A weight is exp((logit - highest) / temperature) in units of 2^-40, a whole number, so sums are
// exact: they depend neither on the order in which threads add nor on how many threads there are.
using namespace metal;

constant constexpr uint SIMDGROUPS = THREADS / 32;
constant constexpr float ONE = 1099511627776.0f;  // 2^40
constant constexpr float NO_WEIGHT = 28.0f;        // exp(-28) is less than 2^-40

// The logits of one row. -inf: forbidden by the grammar or by the model, or not a number.
template <typename T, bool MASKED, typename Logits, typename Mask>
struct Row {
  Logits logits;
  Mask mask;
  uint vocab_size;
  uint num_masked;  // tokens that have a bit; the others are forbidden

  float at(uint id) {
    if (MASKED && (id >= num_masked || ((mask[id / 32] >> (id % 32)) & 1u) == 0)) {
      return -INFINITY;
    }
    const float x = float(logits[id]);
    return x == 0.0f ? 0.0f : (x == x ? min(x, FLT_MAX) : -INFINITY);  // one zero, no NaN
  }
};

// What a token weighs, and which target a sum must exceed, for top-k and for top-p.
struct Count {
  ulong k;
  ulong weight(float) { return 1; }
  ulong target(ulong total) { return min(k, total) - 1; }
};

struct Mass {
  float highest;
  float temperature;
  float top_p;
  float probability(float x) { return precise::exp((x - highest) / temperature); }
  ulong weight(float x) { return ulong(probability(x) * ONE); }
  // To reach share * total is to exceed the next smaller whole number.
  ulong target(ulong total) {
    const ulong share = ulong(top_p * 4294967296.0f);
    const ulong low = (total & 0xffffffffu) * share;
    const ulong goal = (total >> 32) * share + (low >> 32);
    return goal - (goal > 0 && (low & 0xffffffffu) == 0 ? 1 : 0);
  }
};

// The largest value such that the tokens from it up, of those in [lowest, highest], exceed the target.
template <typename T, typename Tokens, typename Weigh>
float floor_of(Tokens row, Bins bins, Weigh weigh, float lowest, float highest) {
  const float span = highest - lowest;
  if (!(span > 0.0f)) {
    return highest;
  }
  const bool linear = span > 1e-30f && span < 1e30f;  // else the scale would overflow or vanish
  const float scale = linear ? float(BINS) / span : 0.0f;
  bins.clear();
  for (uint id = bins.thread_id; id < row.vocab_size; id += THREADS) {
    const float x = row.at(id);
    if (x >= lowest) {
      const ulong weight = weigh.weight(x);
      if (weight != 0) {
        bins.add(linear ? min(uint((highest - x) * scale), BINS - 1) : 0, weight);
      }
    }
  }
  ulong target = weigh.target(bins.total());
  const uint range = bins.find(target);
  // The range, and one on either side: where a value falls was rounded.
  uint top = key_of<T>(highest), bottom = key_of<T>(lowest);
  if (linear) {
    top = min(top, key_of<T>(highest - (float(range) - 1.0f) / scale));
    bottom = max(bottom, key_of<T>(highest - (float(range) + 2.0f) / scale));
  }
  while (top > bottom) {
    const uint length = 32 - clz(top - bottom);
    const uint shift = length > 10 ? length - 10 : 0;
    bins.clear();
    for (uint id = bins.thread_id; id < row.vocab_size; id += THREADS) {
      const float x = row.at(id);
      const uint key = key_of<T>(x);
      if (x >= lowest && key >= bottom && key <= top &&
          (!linear || min(uint((highest - x) * scale), BINS - 1) == range)) {
        bins.add((top - key) >> shift, weigh.weight(x));
      }
    }
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

// The first token, by id, at which the sum of the weights kept exceeds the random share of them all.
template <typename Tokens>
uint draw(Tokens row, Bins bins, Mass mass, float lowest, float min_p, uint random) {
  const uint chunk = ((row.vocab_size + BINS - 1) / BINS + 31) / 32 * 32;
  bins.clear();
  const uint lane = bins.thread_id % 32;
  for (uint start = bins.thread_id - lane; start < row.vocab_size; start += THREADS) {
    const float x = start + lane < row.vocab_size ? row.at(start + lane) : -INFINITY;
    const bool kept = x >= lowest && mass.probability(x) >= min_p;
    const ulong weight = kept ? mass.weight(x) : 0;
    const uint low = simd_sum(uint(weight) & 0xfffffu);  // there is no simd_sum of 64 bits
    const uint high = simd_sum(uint(weight >> 20));
    if (lane == 0 && (low | high) != 0) {
      bins.add(start / chunk, (ulong(high) << 20) + ulong(low));
    }
  }
  const ulong total = bins.total();
  ulong target = (total >> 24) * random + (((total & 0xffffffu) * random) >> 24);
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
};

// Room for the extremes that each SIMD-group found.
struct Shared {
  threadgroup float* highest;
  threadgroup uint* token;
  threadgroup float* lowest;
};

template <typename Tokens>
Extremes extremes_of(Tokens row, Shared shared, uint thread_id) {
  Extremes found = {-INFINITY, 0, INFINITY};
  for (uint id = thread_id; id < row.vocab_size; id += THREADS) {
    const float x = row.at(id);
    if (x > found.highest) {
      found.highest = x;
      found.token = id;
    }
    found.lowest = x > -INFINITY ? min(found.lowest, x) : found.lowest;
  }
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

// settings: 8 words as `SETTINGS` in sample.py: temperature (0: the highest logit), top-k (0: all),
// top-p (1: all), min-p, the random stream in two words, and the index of its number.
template <typename T, typename Tokens, typename Settings>
uint sample(Tokens row, Bins bins, Shared shared, Settings settings) {
  const Extremes found = extremes_of(row, shared, bins.thread_id);
  const float temperature = as_type<float>(settings[0]);
  if (temperature == 0.0f || found.highest == -INFINITY) {
    return found.token;
  }
  float lowest = found.lowest;
  if (settings[1] > 0) {
    lowest = floor_of<T>(row, bins, Count{settings[1]}, lowest, found.highest);
  }
  const Mass mass = {found.highest, temperature, as_type<float>(settings[2])};
  if (mass.top_p < 1.0f) {
    const float weightless = found.highest - NO_WEIGHT * temperature;
    lowest = floor_of<T>(row, bins, mass, max(lowest, weightless), found.highest);
  }
  const ulong stream = (ulong(settings[5]) << 32) | settings[4];
  const uint random = random_bits(stream, settings[6]);
  return draw(row, bins, mass, lowest, as_type<float>(settings[3]), random);
}

template <typename T, bool MASKED, typename Logits, typename Mask>
Row<T, MASKED, Logits, Mask> row_of(Logits logits, Mask mask, uint vocab_size, uint num_masked) {
  return {logits, mask, vocab_size, num_masked};
}
