// Conversions between float widths that a processor may lack. Compilers call them by these names.
#pragma once
#include "state.h"

namespace machine {

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t bits_of_bfloat(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (x != x) {
    return (bits >> 16) | 0x40;
  }
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint16_t bits_of_half(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 16 & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return sign | 0x7e00;
  }
  if (magnitude >= 0x477ff000) { // rounds to 65536 or more
    return sign | 0x7c00;
  }
  if (magnitude < 0x38800000) { // subnormal: adding 0.5 leaves multiples of 2^-24 at the end
    float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000);
  }
  return sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline float float_of_half(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) {
    return __builtin_bit_cast(float, sign | 0x7f800000 | (rest & 0x3ff) << 13);
  }
  float magnitude = __builtin_bit_cast(float, rest << 13) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, magnitude));
}

} // namespace machine

extern "C" {
__bf16 __truncsfbf2(float x) {
  return __builtin_bit_cast(__bf16, machine::bits_of_bfloat(x));
}
_Float16 __truncsfhf2(float x) {
  return __builtin_bit_cast(_Float16, machine::bits_of_half(x));
}
float __extendhfsf2(_Float16 x) {
  return machine::float_of_half(__builtin_bit_cast(uint16_t, x));
}
}
