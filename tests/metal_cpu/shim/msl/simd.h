// What lanes of a SIMD-group say to each other, and barriers.
#pragma once

#define MSL_AT ::msl::Site at = ::msl::Site::here()

namespace msl {

template <class T>
MSL_HIDDEN T slot(const Exchange* exchange, int lane) {
  T value;
  __builtin_memcpy(&value, exchange->slots[lane], sizeof(T));
  return value;
}

template <class T>
MSL_INLINE Exchange* show(const T& value, const char* operation, Site at) {
  static_assert(sizeof(T) <= kSlotBytes, "larger than any type that SIMD operations take");
  return msl_exchange(&value, sizeof(T), operation, at);
}

// Over all lanes as a tree: halves, quarters and so on are combined with each other.
template <class T, class Op>
MSL_HIDDEN T reduced(const T& value, Op op, const char* operation, Site at) {
  Exchange* exchange = msl_exchange(&value, sizeof(T), operation, at);
  T result;
  if (!exchange->has_result) {
    T all[kSimdWidth];
    int count = exchange->num_lanes;
    for (int i = 0; i < count; i++) {
      __builtin_memcpy(&all[i], exchange->slots[i], sizeof(T));
    }
    for (int step = 1; step < count; step *= 2) {
      for (int i = 0; i + step < count; i += 2 * step) {
        all[i] = op(all[i], all[i + step]);
      }
    }
    __builtin_memcpy(exchange->result, &all[0], sizeof(T));
    exchange->has_result = true;
  }
  __builtin_memcpy(&result, exchange->result, sizeof(T));
  return result;
}

// The value of a lane that must be there.
template <class T>
MSL_HIDDEN T of_lane(const T& value, int lane, const char* operation, Site at) {
  Exchange* exchange = msl_exchange(&value, sizeof(T), operation, at);
  if (lane < 0 || lane >= (int)exchange->num_lanes) {
    msl_bad_lane(operation, lane, at);
    return value;
  }
  return slot<T>(exchange, lane);
}

// The value of a lane, or `fill` if its number is beyond either end of a SIMD-group.
template <class T>
MSL_HIDDEN T of_lane_or(const T& value, const T& fill, int lane, const char* operation, Site at) {
  Exchange* exchange = msl_exchange(&value, sizeof(T), operation, at);
  if (lane < 0 || lane >= (int)kSimdWidth) {
    return fill;
  }
  if (lane >= (int)exchange->num_lanes) {
    msl_bad_lane(operation, lane, at);
    return fill;
  }
  return slot<T>(exchange, lane);
}

// Over the lanes from `first` on, up to and without `end`.
template <class T, class Op>
MSL_HIDDEN T over(const T& value, T start, int first, int end, Op op, const char* name, Site at) {
  Exchange* exchange = msl_exchange(&value, sizeof(T), name, at);
  for (int i = first; i < end; i++) {
    start = op(start, slot<T>(exchange, i));
  }
  return start;
}

} // namespace msl

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

MSL_INLINE void threadgroup_barrier(mem_flags memory, MSL_AT) {
  msl_threadgroup_barrier(int(memory), at);
}
MSL_INLINE void simdgroup_barrier(mem_flags memory, MSL_AT) {
  msl_simdgroup_barrier(int(memory), at);
}

#define MSL_REDUCTION(name, expression)                                              \
  template <class T>                                                                 \
  MSL_INLINE T name(T value, MSL_AT) {                                               \
    return ::msl::reduced(value, [](T a, T b) { return (T)(expression); }, #name, at); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a * b)
MSL_REDUCTION(simd_max, a < b ? b : a)
MSL_REDUCTION(simd_min, b < a ? b : a)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_and, a & b)
MSL_REDUCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION

MSL_INLINE bool simd_all(bool value, MSL_AT) {
  return ::msl::reduced(value, [](bool a, bool b) { return a && b; }, "simd_all", at);
}
MSL_INLINE bool simd_any(bool value, MSL_AT) {
  return ::msl::reduced(value, [](bool a, bool b) { return a || b; }, "simd_any", at);
}

struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool all() const { return bits == 0xffffffffu; }
  bool any() const { return bits != 0; }
};
MSL_INLINE simd_vote simd_ballot(bool value, MSL_AT) {
  ulong bit = value ? 1ul << msl_lane() : 0;
  return {::msl::reduced(bit, [](ulong a, ulong b) { return a | b; }, "simd_ballot", at)};
}
MSL_INLINE bool simd_is_first() { return msl_lane() == 0; }

#define MSL_LANE (int)msl_lane()
#define MSL_SHUFFLE(name, parameter, lane)                      \
  template <class T>                                            \
  MSL_INLINE T name(T value, ushort parameter, MSL_AT) {        \
    return ::msl::of_lane(value, lane, #name, at);              \
  }
MSL_SHUFFLE(simd_shuffle, lane, lane)
MSL_SHUFFLE(simd_broadcast, lane, lane)
MSL_SHUFFLE(simd_shuffle_xor, mask, MSL_LANE ^ mask)
MSL_SHUFFLE(simd_shuffle_rotate_down, delta, (MSL_LANE + delta) % 32)
MSL_SHUFFLE(simd_shuffle_rotate_up, delta, (MSL_LANE + 32 - delta) % 32)
MSL_SHUFFLE(quad_shuffle, lane, (MSL_LANE & ~3) + lane)
MSL_SHUFFLE(quad_broadcast, lane, (MSL_LANE & ~3) + lane)
MSL_SHUFFLE(quad_shuffle_xor, mask, MSL_LANE ^ mask)
#undef MSL_SHUFFLE

template <class T>
MSL_INLINE T simd_broadcast_first(T value, MSL_AT) {
  return ::msl::of_lane(value, 0, "simd_broadcast_first", at);
}
template <class T>
MSL_INLINE T simd_shuffle_down(T value, ushort delta, MSL_AT) {
  return ::msl::of_lane_or(value, value, MSL_LANE + delta, "simd_shuffle_down", at);
}
template <class T>
MSL_INLINE T simd_shuffle_up(T value, ushort delta, MSL_AT) {
  return ::msl::of_lane_or(value, value, MSL_LANE - delta, "simd_shuffle_up", at);
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_down(T value, T fill, ushort delta, MSL_AT) {
  return ::msl::of_lane_or(value, fill, MSL_LANE + delta, "simd_shuffle_and_fill_down", at);
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_up(T value, T fill, ushort delta, MSL_AT) {
  return ::msl::of_lane_or(value, fill, MSL_LANE - delta, "simd_shuffle_and_fill_up", at);
}

#define MSL_OVER(name, start, first, end, expression)                              \
  template <class T>                                                               \
  MSL_INLINE T name(T value, MSL_AT) {                                             \
    return ::msl::over(                                                            \
        value, (T)(start), first, end, [](T a, T b) { return (T)(expression); }, #name, at); \
  }
MSL_OVER(simd_prefix_inclusive_sum, 0, 0, MSL_LANE + 1, a + b)
MSL_OVER(simd_prefix_exclusive_sum, 0, 0, MSL_LANE, a + b)
MSL_OVER(simd_prefix_inclusive_product, 1, 0, MSL_LANE + 1, a * b)
MSL_OVER(simd_prefix_exclusive_product, 1, 0, MSL_LANE, a * b)
MSL_OVER(quad_sum, 0, MSL_LANE & ~3, (MSL_LANE & ~3) + 4, a + b)
MSL_OVER(quad_product, 1, MSL_LANE & ~3, (MSL_LANE & ~3) + 4, a * b)
MSL_OVER(quad_max, value, MSL_LANE & ~3, (MSL_LANE & ~3) + 4, a < b ? b : a)
MSL_OVER(quad_min, value, MSL_LANE & ~3, (MSL_LANE & ~3) + 4, b < a ? b : a)
#undef MSL_OVER
#undef MSL_LANE

} // namespace metal
