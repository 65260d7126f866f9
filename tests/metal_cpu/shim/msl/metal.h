// Metal's language and library for clang on a CPU.
#pragma once
#include "machine.h"
#include "traits.h"
#include "types.h"
#include "math.h"
#include "simd.h"
#include "matrix.h"
#include "atomics.h"
#include "keywords.h"
