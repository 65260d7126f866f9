// Metal's language and library for clang on a CPU.
#ifndef MSL_METAL_H // holds where a precompiled file's times are others; `once` does not
#define MSL_METAL_H
#include "machine.h"
#include "traits.h"
#include "types.h"
#include "math.h"
#include "simd.h"
#include "matrix.h"
#include "atomics.h"
#include "keywords.h"
#endif
