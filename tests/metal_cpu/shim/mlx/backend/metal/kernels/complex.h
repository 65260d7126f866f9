// MLX's own is written by address space. No kernel here computes with complex numbers.
#pragma once
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T r = T(0), T i = T(0)) : real(r), imag(i) {}
};
typedef complex_t<float> complex64_t;
template <typename T>
static constexpr constant bool is_complex_v = false;
