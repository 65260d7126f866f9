// Metal's language and library for clang's C++ for OpenCL, which tells address spaces apart as
// Apple's compiler does. Declarations alone: what is compiled with them is never run.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// Words of OpenCL that are ordinary names in Metal.
#define local msl_local
#define global msl_global
#define generic msl_generic
#define pipe msl_pipe
#define event_t msl_event_t
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_ulong msl_atomic_ulong
#define atomic_float msl_atomic_float
#define atomic_bool msl_atomic_bool
#define memory_order msl_memory_order
#define memory_order_relaxed msl_memory_order_relaxed

// Words of Metal.
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant const
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e38f
#define HALF_MAX ((half)65504.f)
#define M_PI_F 3.14159265358979f
#define M_LN2_F 0.69314718055995f
#define M_LOG2E_F 1.44269504088896f
#define __METAL__ 1
#define __METAL_VERSION__ 410

typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t, ptrdiff_t;
typedef unsigned long ulong, uint64_t, size_t, uintptr_t;
typedef __bf16 bfloat;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}
// clang has no vectors of bool here: those of bytes stand for them.
typedef metal::vec<uchar, 2> bool2;
typedef metal::vec<uchar, 3> bool3;
typedef metal::vec<uchar, 4> bool4;
#define MSL_VECTOR_TYPES(T) \
  typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4; \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
#define MSL_SMALL_INTEGERS(DO) DO(char) DO(uchar) DO(short) DO(ushort)
#define MSL_INTEGERS(DO) MSL_SMALL_INTEGERS(DO) DO(int) DO(uint) DO(long) DO(ulong)
MSL_INTEGERS(MSL_VECTOR_TYPES) MSL_VECTOR_TYPES(half) MSL_VECTOR_TYPES(float)
MSL_VECTOR_TYPES(bfloat)

namespace msl {

template <class T>
struct Width {
  static constexpr __constant int numbers = 1;
};
template <class T, int N>
struct Width<metal::vec<T, N>> {
  static constexpr __constant int numbers = N;
};
template <class... T>
struct Widths {
  static constexpr __constant int numbers = 0;
};
template <class T, class... U>
struct Widths<T, U...> {
  static constexpr __constant int numbers = Width<T>::numbers + Widths<U...>::numbers;
};

// `float4(...)`: from as many numbers as it has, or from one.
template <class V, class... A>
constexpr V make(A... parts) {
  constexpr int given = Widths<A...>::numbers;
  static_assert(given == Width<V>::numbers || given == 0 || (given == 1 && sizeof...(A) == 1),
                "a vector is built from as many values as it has, or from one");
  return V(0);
}

} // namespace msl

namespace metal {

// -- traits ---------------------------------------------------------------------------------------
template <class T, T V>
struct integral_constant {
  static constexpr __constant T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct remove_addrspace {
  typedef T type;
};
#define MSL_SPACE(space)                                                                  \
  template <class T>                                                                      \
  struct remove_addrspace<space T> {                                                      \
    typedef T type;                                                                       \
  };
MSL_SPACE(__private) MSL_SPACE(__global) MSL_SPACE(__local) MSL_SPACE(__constant)
MSL_SPACE(const __private) MSL_SPACE(const __global) MSL_SPACE(const __local)
MSL_SPACE(const __constant)
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

#define MSL_CHANGED(name)                                                                 \
  template <class T>                                                                      \
  struct name {                                                                           \
    typedef __##name(T) type;                                                             \
  };                                                                                      \
  template <class T>                                                                      \
  using name##_t = __##name(T);
MSL_CHANGED(remove_const) MSL_CHANGED(remove_cv) MSL_CHANGED(remove_pointer) MSL_CHANGED(decay)
MSL_CHANGED(make_signed) MSL_CHANGED(make_unsigned)
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct remove_reference {
  typedef remove_reference_t<T> type;
};
template <class T>
T declval();

#define MSL_TRAIT(name, ...)                                                              \
  template <class T>                                                                      \
  struct name : bool_constant<__VA_ARGS__> {};                                            \
  template <class T>                                                                      \
  constexpr __constant bool name##_v = __VA_ARGS__;
#define MSL_IS_BFLOAT(T) __is_same(remove_addrspace_t<T>, bfloat)
MSL_TRAIT(is_integral, __is_integral(remove_addrspace_t<T>))
MSL_TRAIT(is_floating_point, __is_floating_point(remove_addrspace_t<T>) || MSL_IS_BFLOAT(T))
MSL_TRAIT(is_arithmetic, __is_arithmetic(remove_addrspace_t<T>) || MSL_IS_BFLOAT(T))
MSL_TRAIT(is_pointer, __is_pointer(T))
MSL_TRAIT(is_reference, __is_reference(T))
MSL_TRAIT(is_signed, __is_signed(T))
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_void, __is_void(T))
MSL_TRAIT(is_empty, __is_empty(T))
MSL_TRAIT(is_const, __is_const(T))
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
constexpr __constant bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <class A, class B>
constexpr __constant bool is_convertible_v = __is_convertible_to(A, B);

template <class T>
struct numeric_limits;
#define MSL_LIMITS(T, least, smallest, largest, step, unbounded)                          \
  template <>                                                                             \
  struct numeric_limits<T> {                                                              \
    static constexpr __constant bool is_signed = T(-1) < T(0);                            \
    static constexpr __constant int digits = sizeof(T) * 8 - is_signed;                   \
    static constexpr T lowest() { return T(least); }                                      \
    static constexpr T min() { return T(smallest); }                                      \
    static constexpr T max() { return T(largest); }                                       \
    static constexpr T epsilon() { return T(step); }                                      \
    static constexpr T infinity() { return T(unbounded); }                                \
    static constexpr T quiet_NaN() { return T(unbounded); }                               \
  };
#define MSL_UNSIGNED_LIMITS(T) MSL_LIMITS(T, 0, 0, T(~T(0)), 0, 0)
#define MSL_SIGNED_LIMITS(T, largest) MSL_LIMITS(T, -largest - 1, -largest - 1, largest, 0, 0)
MSL_UNSIGNED_LIMITS(uchar) MSL_UNSIGNED_LIMITS(ushort) MSL_UNSIGNED_LIMITS(uint)
MSL_UNSIGNED_LIMITS(ulong)
MSL_SIGNED_LIMITS(char, 127) MSL_SIGNED_LIMITS(int8_t, 127) MSL_SIGNED_LIMITS(short, 32767)
MSL_SIGNED_LIMITS(int, 0x7fffffff) MSL_SIGNED_LIMITS(long, 0x7fffffffffffffffl)
MSL_LIMITS(float, -FLT_MAX, 1.175494351e-38f, FLT_MAX, 1.1920929e-7f, INFINITY)
MSL_LIMITS(half, -65504.f, 6.103515625e-5f, 65504.f, 9.765625e-4f, INFINITY)
MSL_LIMITS(bfloat, -3.3895e38f, 1.175494351e-38f, 3.3895e38f, 7.8125e-3f, INFINITY)

// -- numbers ----------------------------------------------------------------------------------------
// One function a type, no template: arguments of two types are ambiguous, as for Apple's compiler.
#define MSL_WIDTHS(declare, name, T) \
  declare(name, T) declare(name, T##2) declare(name, T##3) declare(name, T##4)
#define MSL_OF_ONE(name, T) constexpr T name(T);
#define MSL_OF_TWO(name, T) constexpr T name(T, T);
#define MSL_OF_THREE(name, T) constexpr T name(T, T, T);
#define MSL_OF_FLOATS(declare, name) \
  MSL_WIDTHS(declare, name, float) MSL_WIDTHS(declare, name, half) MSL_WIDTHS(declare, name, bfloat)
#define MSL_OF_INTEGERS(declare, name)                                                    \
  declare(name, signed char) MSL_WIDTHS(declare, name, char) MSL_WIDTHS(declare, name, uchar) \
  MSL_WIDTHS(declare, name, short) MSL_WIDTHS(declare, name, ushort) MSL_WIDTHS(declare, name, int) \
  MSL_WIDTHS(declare, name, uint) MSL_WIDTHS(declare, name, long) MSL_WIDTHS(declare, name, ulong)
#define MSL_ALL(declare, name) MSL_OF_FLOATS(declare, name) MSL_OF_INTEGERS(declare, name)
#define MSL_UNARY(name) MSL_OF_FLOATS(MSL_OF_ONE, name)
#define MSL_BINARY(name) MSL_OF_FLOATS(MSL_OF_TWO, name)
#define MSL_MATH                                                                          \
  MSL_UNARY(exp) MSL_UNARY(exp2) MSL_UNARY(exp10) MSL_UNARY(log) MSL_UNARY(log2)          \
  MSL_UNARY(log10) MSL_UNARY(sin) MSL_UNARY(cos) MSL_UNARY(tan) MSL_UNARY(asin)           \
  MSL_UNARY(acos) MSL_UNARY(atan) MSL_UNARY(sinh) MSL_UNARY(cosh) MSL_UNARY(tanh)         \
  MSL_UNARY(asinh) MSL_UNARY(acosh) MSL_UNARY(atanh) MSL_UNARY(sqrt) MSL_UNARY(rsqrt)     \
  MSL_UNARY(floor) MSL_UNARY(ceil) MSL_UNARY(round) MSL_UNARY(rint) MSL_UNARY(trunc)      \
  MSL_UNARY(fabs) MSL_UNARY(fract) MSL_UNARY(sign) MSL_UNARY(saturate) MSL_UNARY(abs)     \
  MSL_BINARY(pow) MSL_BINARY(powr) MSL_BINARY(atan2) MSL_BINARY(fmax) MSL_BINARY(fmin)    \
  MSL_BINARY(fmod) MSL_BINARY(copysign) MSL_BINARY(divide) MSL_BINARY(max) MSL_BINARY(min) \
  MSL_OF_FLOATS(MSL_OF_THREE, fma) MSL_OF_FLOATS(MSL_OF_THREE, mix)                       \
  MSL_OF_FLOATS(MSL_OF_THREE, clamp)
MSL_MATH
namespace fast {
MSL_MATH
}
namespace precise {
MSL_MATH
}
MSL_OF_INTEGERS(MSL_OF_ONE, abs) MSL_OF_INTEGERS(MSL_OF_TWO, max)
MSL_OF_INTEGERS(MSL_OF_TWO, min) MSL_OF_INTEGERS(MSL_OF_THREE, clamp)
MSL_OF_INTEGERS(MSL_OF_ONE, popcount) MSL_OF_INTEGERS(MSL_OF_ONE, clz)
MSL_OF_INTEGERS(MSL_OF_ONE, ctz) MSL_OF_INTEGERS(MSL_OF_ONE, reverse_bits)
MSL_OF_INTEGERS(MSL_OF_TWO, mulhi) MSL_OF_INTEGERS(MSL_OF_TWO, rotate)
#define MSL_BITS(T) T extract_bits(T, uint, uint); T insert_bits(T, T, uint, uint);
MSL_INTEGERS(MSL_BITS)
#define MSL_ASKED(T)                                                                      \
  bool isnan(T); bool isinf(T); bool isfinite(T); bool isnormal(T); bool signbit(T);      \
  T ldexp(T, int); T select(T, T, bool);
MSL_ASKED(float) MSL_ASKED(half) MSL_ASKED(bfloat)
#define MSL_CHOSEN(T) T select(T, T, bool);
MSL_INTEGERS(MSL_CHOSEN)
template <class T, int N, class B>
vec<T, N> select(vec<T, N>, vec<T, N>, vec<B, N>);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length(vec<T, N>);
template <class T, int N>
bool any(vec<T, N>);
template <class T, int N>
bool all(vec<T, N>);
template <class To, class From>
constexpr To as_type(From) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return To(0);
}

// -- threads ----------------------------------------------------------------------------------------
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// Of no numbers of 64 bits. MLX's headers add bfloats.
#define MSL_LANES(declare, name)                                                          \
  declare(name, signed char) MSL_WIDTHS(declare, name, char) MSL_WIDTHS(declare, name, uchar) \
  MSL_WIDTHS(declare, name, short) MSL_WIDTHS(declare, name, ushort) MSL_WIDTHS(declare, name, int) \
  MSL_WIDTHS(declare, name, uint) MSL_OF_FLOATS(declare, name)
#define MSL_OF_LANE(name, T) T name(T, ushort);
#define MSL_OF_LANE_OR(name, T) T name(T, T, ushort); T name(T, T, ushort, ushort);
#define MSL_REDUCED(name) MSL_LANES(MSL_OF_ONE, name)
#define MSL_SHUFFLED(name) MSL_LANES(MSL_OF_LANE, name)
MSL_REDUCED(simd_sum) MSL_REDUCED(simd_product) MSL_REDUCED(simd_max) MSL_REDUCED(simd_min)
MSL_REDUCED(simd_or) MSL_REDUCED(simd_and) MSL_REDUCED(simd_xor) MSL_REDUCED(quad_sum)
MSL_REDUCED(quad_max) MSL_REDUCED(quad_min) MSL_REDUCED(simd_broadcast_first)
MSL_REDUCED(simd_prefix_inclusive_sum) MSL_REDUCED(simd_prefix_exclusive_sum)
MSL_REDUCED(simd_prefix_inclusive_product) MSL_REDUCED(simd_prefix_exclusive_product)
MSL_SHUFFLED(simd_shuffle) MSL_SHUFFLED(simd_broadcast) MSL_SHUFFLED(simd_shuffle_xor)
MSL_SHUFFLED(simd_shuffle_up) MSL_SHUFFLED(simd_shuffle_down)
MSL_SHUFFLED(simd_shuffle_rotate_up) MSL_SHUFFLED(simd_shuffle_rotate_down)
MSL_SHUFFLED(quad_shuffle) MSL_SHUFFLED(quad_shuffle_xor) MSL_SHUFFLED(quad_broadcast)
MSL_LANES(MSL_OF_LANE_OR, simd_shuffle_and_fill_up)
MSL_LANES(MSL_OF_LANE_OR, simd_shuffle_and_fill_down)
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);

// As wide as the matrix, whatever of it a lane holds. Elements of a constant matrix are a value.
template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "the only size");
  static_assert(__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat), "the only types");
  typedef vec<T, Columns * Rows> storage_type;
  simdgroup_matrix() = default;
  explicit constexpr simdgroup_matrix(T diagonal) : elements(diagonal) {}
  thread storage_type& thread_elements() thread { return elements; }
  storage_type thread_elements() const thread { return elements; }

 private:
  storage_type elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);

#define MSL_MATRIX_IN(space)                                                              \
  template <class T>                                                                      \
  void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const space T*, ulong per_row = 8, \
                      ulong2 origin = ulong2(0), bool transposed = false);                \
  template <class T>                                                                      \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong per_row = 8,            \
                       ulong2 origin = ulong2(0), bool transposed = false);
MSL_MATRIX_IN(device) MSL_MATRIX_IN(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
    simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

// -- atomics ----------------------------------------------------------------------------------------
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
#define MSL_FETCH(space, name) \
  template <class T, class U>  \
  T atomic_##name##_explicit(volatile space atomic<T>*, U, memory_order);
#define MSL_ATOMICS_IN(space)                                                             \
  template <class T>                                                                      \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                  \
  template <class T, class U>                                                             \
  void atomic_store_explicit(volatile space atomic<T>*, U, memory_order);                 \
  template <class T, class U>                                                             \
  bool atomic_compare_exchange_weak_explicit(                                             \
      volatile space atomic<T>*, thread T*, U, memory_order, memory_order);               \
  MSL_FETCH(space, exchange) MSL_FETCH(space, fetch_add) MSL_FETCH(space, fetch_sub)      \
  MSL_FETCH(space, fetch_max) MSL_FETCH(space, fetch_min) MSL_FETCH(space, fetch_or)      \
  MSL_FETCH(space, fetch_and) MSL_FETCH(space, fetch_xor)
MSL_ATOMICS_IN(device) MSL_ATOMICS_IN(threadgroup)

// Logging is kept quiet.
struct os_log {
  constexpr os_log(constant char*, constant char*) __constant {}
  template <class... A>
  void log_debug(constant char*, A...) const __constant;
};

} // namespace metal
using namespace metal;
