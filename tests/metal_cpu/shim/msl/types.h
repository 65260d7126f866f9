// Scalars, vectors, their limits, and how vectors are built.
#pragma once

typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t;
typedef unsigned long ulong, uint64_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define MSL_VECTORS(T)                                   \
  typedef T T##2 __attribute__((ext_vector_type(2)));    \
  typedef T T##3 __attribute__((ext_vector_type(3)));    \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS

namespace msl {

template <class T, int N>
using Vector = T __attribute__((ext_vector_type(N)));

template <class V>
struct Parts {
  static constexpr int count = 0; // a scalar
  typedef V type;
};
template <class T, int N>
struct Parts<Vector<T, N>> {
  static constexpr int count = N;
  typedef T type;
};

template <class V, class A>
MSL_INLINE void put(V& result, int& next, const A& part) {
  typedef typename Parts<V>::type T;
  if constexpr (Parts<A>::count == 0) {
    result[next++] = (T)part;
  } else {
    for (int i = 0; i < Parts<A>::count; i++) {
      result[next++] = (T)part[i];
    }
  }
}

// A vector from scalars and shorter vectors, from one scalar for all, or from a vector of another
// element type.
template <class V, class... A>
MSL_INLINE V make(const A&... parts) {
  constexpr int given = (0 + ... + (Parts<A>::count ? Parts<A>::count : 1));
  static_assert(
      given == Parts<V>::count || (sizeof...(A) == 1 && given == 1) || given == 0,
      "a vector is built from as many values as it has, or from one");
  V result = 0;
  int next = 0;
  (put(result, next, parts), ...);
  if constexpr (given == 1) {
    for (int i = 1; i < Parts<V>::count; i++) {
      result[i] = result[0];
    }
  }
  return result;
}

// Three elements without the padding that a vector of three has.
template <class T>
struct Packed3 {
  T x, y, z;
  operator Vector<T, 3>() const { return Vector<T, 3>{x, y, z}; }
};

} // namespace msl

#define MSL_PACKED(T)                                                          \
  typedef msl::Packed3<T> packed_##T##3;                                       \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MSL_PACKED(float)
MSL_PACKED(half)
MSL_PACKED(bfloat)
MSL_PACKED(uchar)
MSL_PACKED(ushort)
MSL_PACKED(uint)
MSL_PACKED(char)
MSL_PACKED(short)
MSL_PACKED(int)
#undef MSL_PACKED

template <class To, class From>
MSL_INLINE To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}

namespace metal {
namespace msl = ::msl;

template <class T, int N>
using vec = ::msl::Vector<T, N>;

template <class T>
struct numeric_limits {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() {
    return is_signed ? T((1ul << (sizeof(T) * 8 - 1)) - 1) : T(~T(0));
  }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};

#define MSL_FLOAT_LIMITS(T, largest, smallest, eps)                       \
  template <>                                                             \
  struct numeric_limits<T> {                                              \
    static constexpr bool is_signed = true;                               \
    static constexpr T infinity() { return (T)__builtin_inff(); }         \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }      \
    static constexpr T max() { return (T)largest; }                       \
    static constexpr T lowest() { return (T)-largest; }                   \
    static constexpr T min() { return (T)smallest; }                      \
    static constexpr T epsilon() { return (T)eps; }                       \
  };
MSL_FLOAT_LIMITS(float, 3.402823466e38f, 1.175494351e-38f, 1.1920929e-7f)
MSL_FLOAT_LIMITS(half, 65504.f, 6.103515625e-5f, 9.765625e-4f)
MSL_FLOAT_LIMITS(bfloat, 3.3895313892515355e38f, 1.175494351e-38f, 7.8125e-3f)
#undef MSL_FLOAT_LIMITS
} // namespace metal
