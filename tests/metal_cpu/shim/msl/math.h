// Functions of numbers and vectors. Half and bfloat go through float, and are rounded once.
#pragma once

namespace msl {
MSL_INLINE float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
MSL_INLINE float fractf(float x) { return x - __builtin_floorf(x); }
MSL_INLINE float signf(float x) { return x > 0 ? 1.f : x < 0 ? -1.f : 0.f; }
MSL_INLINE float saturatef(float x) { return x < 0 ? 0.f : x > 1 ? 1.f : x; }
MSL_INLINE float exp10f(float x) { return __builtin_powf(10.0f, x); }
} // namespace msl

#define MSL_UNARY(name, function)                                                        \
  MSL_INLINE float name(float x) { return function(x); }                                 \
  MSL_INLINE half name(half x) { return (half)function((float)x); }                      \
  MSL_INLINE bfloat name(bfloat x) { return (bfloat)function((float)x); }                \
  template <class T, int N>                                                              \
  MSL_INLINE vec<T, N> name(vec<T, N> x) {                                               \
    vec<T, N> result;                                                                    \
    for (int i = 0; i < N; i++) result[i] = (T)function((float)x[i]);                    \
    return result;                                                                       \
  }
#define MSL_BINARY(name, function)                                                       \
  MSL_INLINE float name(float x, float y) { return function(x, y); }                     \
  MSL_INLINE half name(half x, half y) { return (half)function((float)x, (float)y); }    \
  MSL_INLINE bfloat name(bfloat x, bfloat y) { return (bfloat)function((float)x, (float)y); } \
  template <class T, int N>                                                              \
  MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {                                  \
    vec<T, N> result;                                                                    \
    for (int i = 0; i < N; i++) result[i] = (T)function((float)x[i], (float)y[i]);       \
    return result;                                                                       \
  }
#define MSL_FLOAT_FUNCTIONS                                                              \
  MSL_UNARY(exp, __builtin_expf)                                                         \
  MSL_UNARY(exp2, __builtin_exp2f)                                                       \
  MSL_UNARY(exp10, ::msl::exp10f)                                                        \
  MSL_UNARY(log, __builtin_logf)                                                         \
  MSL_UNARY(log2, __builtin_log2f)                                                       \
  MSL_UNARY(log10, __builtin_log10f)                                                     \
  MSL_UNARY(sin, __builtin_sinf)                                                         \
  MSL_UNARY(cos, __builtin_cosf)                                                         \
  MSL_UNARY(tan, __builtin_tanf)                                                         \
  MSL_UNARY(tanh, __builtin_tanhf)                                                       \
  MSL_UNARY(sqrt, __builtin_sqrtf)                                                       \
  MSL_UNARY(rsqrt, ::msl::rsqrtf)                                                        \
  MSL_UNARY(floor, __builtin_floorf)                                                     \
  MSL_UNARY(ceil, __builtin_ceilf)                                                       \
  MSL_UNARY(round, __builtin_roundf)                                                     \
  MSL_UNARY(rint, __builtin_rintf)                                                       \
  MSL_UNARY(trunc, __builtin_truncf)                                                     \
  MSL_UNARY(fabs, __builtin_fabsf)                                                       \
  MSL_UNARY(fract, ::msl::fractf)                                                        \
  MSL_UNARY(sign, ::msl::signf)                                                          \
  MSL_UNARY(saturate, ::msl::saturatef)                                                  \
  MSL_BINARY(pow, __builtin_powf)                                                        \
  MSL_BINARY(powr, __builtin_powf)                                                       \
  MSL_BINARY(atan2, __builtin_atan2f)                                                    \
  MSL_BINARY(fmax, __builtin_fmaxf)                                                      \
  MSL_BINARY(fmin, __builtin_fminf)                                                      \
  MSL_BINARY(fmod, __builtin_fmodf)                                                      \
  MSL_BINARY(copysign, __builtin_copysignf)

#define MSL_FLOAT_OF(T)                                                                  \
  MSL_INLINE T max(T a, T b) { return (T)__builtin_fmaxf((float)a, (float)b); }          \
  MSL_INLINE T min(T a, T b) { return (T)__builtin_fminf((float)a, (float)b); }          \
  MSL_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }              \
  MSL_INLINE T abs(T a) { return (T)__builtin_fabsf((float)a); }                         \
  MSL_INLINE T fma(T a, T b, T c) { return (T)__builtin_fmaf((float)a, (float)b, (float)c); } \
  MSL_INLINE T mix(T a, T b, T t) { return a + (b - a) * t; }                            \
  MSL_INLINE T ldexp(T a, int k) { return (T)__builtin_ldexpf((float)a, k); }            \
  MSL_INLINE bool isnan(T a) { return __builtin_isnan((float)a); }                       \
  MSL_INLINE bool isinf(T a) { return __builtin_isinf((float)a); }                       \
  MSL_INLINE bool isfinite(T a) { return __builtin_isfinite((float)a); }                 \
  MSL_INLINE bool signbit(T a) { return __builtin_signbit((float)a); }
#define MSL_INTEGER_OF(T)                                                                \
  MSL_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                         \
  MSL_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                         \
  MSL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define MSL_SIGNED_OF(T)                                                                 \
  MSL_INTEGER_OF(T)                                                                      \
  MSL_INLINE constexpr T abs(T a) { return a < 0 ? (T)-a : a; }

namespace metal {

MSL_FLOAT_FUNCTIONS
namespace fast {
MSL_FLOAT_FUNCTIONS
}
namespace precise {
MSL_FLOAT_FUNCTIONS
}

MSL_FLOAT_OF(float)
MSL_FLOAT_OF(half)
MSL_FLOAT_OF(bfloat)
MSL_SIGNED_OF(char)
MSL_SIGNED_OF(signed char)
MSL_SIGNED_OF(short)
MSL_SIGNED_OF(int)
MSL_SIGNED_OF(long)
MSL_INTEGER_OF(uchar)
MSL_INTEGER_OF(ushort)
MSL_INTEGER_OF(uint)
MSL_INTEGER_OF(ulong)

#define MSL_BY_ELEMENT(name)                                                             \
  template <class T, int N>                                                              \
  MSL_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) {                                  \
    vec<T, N> result;                                                                    \
    for (int i = 0; i < N; i++) result[i] = name(a[i], b[i]);                            \
    return result;                                                                       \
  }
MSL_BY_ELEMENT(max)
MSL_BY_ELEMENT(min)
#undef MSL_BY_ELEMENT

template <class T, int N>
MSL_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = fma(a[i], b[i], c[i]);
  return result;
}

template <class T, int N>
MSL_INLINE vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}

template <class T, int N>
MSL_INLINE vec<T, N> abs(vec<T, N> x) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = abs(x[i]);
  return result;
}

template <class T, int N>
MSL_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}

template <class T>
MSL_INLINE T select(T a, T b, bool choose_b) {
  return choose_b ? b : a;
}

template <int N>
MSL_INLINE bool any(vec<bool, N> x) {
  for (int i = 0; i < N; i++) if (x[i]) return true;
  return false;
}

template <int N>
MSL_INLINE bool all(vec<bool, N> x) {
  for (int i = 0; i < N; i++) if (!x[i]) return false;
  return true;
}

MSL_INLINE int popcount(uint x) { return __builtin_popcount(x); }
MSL_INLINE int popcount(ulong x) { return __builtin_popcountl(x); }
MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
MSL_INLINE uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
MSL_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0u : (x >> offset) & (~0u >> (32 - bits));
}

} // namespace metal
#undef MSL_UNARY
#undef MSL_BINARY
#undef MSL_FLOAT_FUNCTIONS
#undef MSL_FLOAT_OF
#undef MSL_SIGNED_OF
#undef MSL_INTEGER_OF
