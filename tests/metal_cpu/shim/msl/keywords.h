// Words of the language. Comes last, because they are ordinary names elsewhere.
#pragma once

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e38f
#define HALF_MAX ((half)65504.f)
#define M_PI_F 3.14159265358979f
#define M_LN2_F 0.69314718055995f
#define M_LOG2E_F 1.44269504088896f
#define __METAL__ 1
#define __METAL_VERSION__ 320

#ifdef MSL_LINT // as address spaces that clang tells apart
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel

using namespace metal;
