// Sums in bins, and the bin at which they exceed a target: what a search of one pass over the data is
// made of. Knows nothing of what is added up. For threadgroups of THREADS threads, all of which call.
using namespace metal;

constant constexpr uint THREADS = 512;
constant constexpr uint BINS = 1024;

// There is no simd_sum of 64 bits; sums of 22 bits fit into words.
METAL_FUNC ulong sum_of_lanes(ulong x) {
  const uint low = simd_sum(uint(x) & 0x3fffffu);
  const uint middle = simd_sum(uint(x >> 22) & 0x3fffffu);
  const uint high = simd_sum(uint(x >> 44));
  return (ulong(high) << 44) + (ulong(middle) << 22) + low;
}

// 64-bit sums in two words each: threadgroup memory has no wider atomics.
struct Bins {
  threadgroup atomic_uint* low;
  threadgroup atomic_uint* high;
  threadgroup ulong* parts;  // sums of 32 bins each
  uint thread_id;

  void clear() thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_id; i < BINS; i += THREADS) {
      atomic_store_explicit(&low[i], 0u, memory_order_relaxed);
      atomic_store_explicit(&high[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  void add(uint bin, ulong weight) thread {
    const uint word = uint(weight);
    const uint old = atomic_fetch_add_explicit(&low[bin], word, memory_order_relaxed);
    const uint rest = uint(weight >> 32) + (old + word < old ? 1u : 0u);
    if (rest != 0) {
      atomic_fetch_add_explicit(&high[bin], rest, memory_order_relaxed);
    }
  }

  ulong at(uint bin) thread {
    return (ulong(atomic_load_explicit(&high[bin], memory_order_relaxed)) << 32) +
        ulong(atomic_load_explicit(&low[bin], memory_order_relaxed));
  }

  // The sum of all bins; to be called before find().
  ulong total() thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint lane = thread_id % 32;
    for (uint part = thread_id / 32; part < BINS / 32; part += THREADS / 32) {
      const ulong sum = sum_of_lanes(at(part * 32 + lane));  // lanes load neighbours
      if (lane == 0) parts[part] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong sum = 0;
    for (uint i = 0; i < BINS / 32; i++) {
      sum += parts[i];
    }
    return sum;
  }

  // The first bin at which the sum exceeds `target`, which becomes what is left of it there.
  uint find(thread ulong& target) thread {
    uint part = 0;
    while (part < BINS / 32 - 1 && parts[part] <= target) {
      target -= parts[part++];
    }
    uint bin = part * 32;
    while (bin < BINS - 1 && at(bin) <= target) {
      target -= at(bin++);
    }
    return bin;
  }
};

// Numbers that order as floats do; of 16-bit floats without the bits that are always equal.
template <typename T>
METAL_FUNC uint key_of(float x) {
  const uint bits = as_type<uint>(x);
  return ((bits & 0x80000000u) ? ~bits : (bits | 0x80000000u)) >> (sizeof(T) == 2 ? 13 : 0);
}

template <typename T>
METAL_FUNC float value_of(uint key) {
  const uint bits = sizeof(T) == 2 ? (key << 13) : key;
  const uint filled = sizeof(T) == 2 ? (bits | 0x1fffu) : bits;
  return as_type<float>((bits & 0x80000000u) ? (bits & 0x7fffffffu) : ~filled);
}
