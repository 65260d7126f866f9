// The part of type traits that kernels use, as metal:: and std::.
#pragma once

namespace std {

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
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
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct remove_const {
  typedef __remove_const(T) type;
};
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
struct decay {
  typedef __decay(T) type;
};
template <class T>
struct make_unsigned {
  typedef __make_unsigned(T) type;
};
template <class T>
using make_unsigned_t = __make_unsigned(T);
template <class T>
struct make_signed {
  typedef __make_signed(T) type;
};
template <class T>
T&& declval();

#define MSL_TRAIT(name, value)                \
  template <class T>                          \
  inline constexpr bool name##_v = value;     \
  template <class T>                          \
  struct name : bool_constant<value> {};
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_floating_point, __is_floating_point(T))
MSL_TRAIT(is_arithmetic, __is_arithmetic(T))
MSL_TRAIT(is_pointer, __is_pointer(T))
MSL_TRAIT(is_reference, __is_reference(T))
MSL_TRAIT(is_signed, __is_signed(T))
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_void, __is_void(T))
MSL_TRAIT(is_empty, __is_empty(T))
MSL_TRAIT(is_const, __is_const(T))
#undef MSL_TRAIT

template <class A, class B>
inline constexpr bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
inline constexpr bool is_convertible_v = __is_convertible_to(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};

template <class T, T... I>
struct integer_sequence {};
template <size_t... I>
using index_sequence = integer_sequence<size_t, I...>;
template <size_t N>
using make_index_sequence = __make_integer_seq<integer_sequence, size_t, N>;

} // namespace std

namespace metal {
using namespace std;

template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
using remove_addrspace_t = T;
} // namespace metal
