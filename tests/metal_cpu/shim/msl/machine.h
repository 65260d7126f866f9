// What a kernel's code asks of the machine that runs it. Knows no Metal types.
#pragma once

typedef unsigned long size_t;

namespace msl {

// Where in the source something stands. Distinct operations on one line differ by column.
struct Site {
  const char* file;
  unsigned line;
  unsigned column;
  static constexpr Site here(
      const char* file = __builtin_FILE(),
      unsigned line = __builtin_LINE(),
      unsigned column = __builtin_COLUMN()) {
    return {file, line, column};
  }
};

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kSlotBytes = 16;

// Values that the lanes of a SIMD-group show each other. Whoever reads first may leave a result.
struct Exchange {
  alignas(16) unsigned char slots[kSimdWidth][kSlotBytes];
  alignas(16) unsigned char result[kSlotBytes];
  bool has_result;
  unsigned num_lanes;
};

} // namespace msl

extern "C" {

// Show a value to the SIMD-group and wait until all of its lanes have come to this operation.
msl::Exchange* msl_exchange(const void* value, unsigned size, const char* operation, msl::Site);

void msl_threadgroup_barrier(int memory, msl::Site);
void msl_simdgroup_barrier(int memory, msl::Site);

// Memory of a threadgroup variable; the first thread that comes allots it.
void* msl_threadgroup_variable(
    const void* tag, size_t size, size_t alignment, const char* name, msl::Site);

// A lane asks for the value of one that does not take part.
void msl_bad_lane(const char* operation, int lane, msl::Site);

// An atomic operation is about to touch memory.
void msl_atomic(const volatile void* address, unsigned size, bool loads, bool stores, msl::Site);

unsigned msl_lane();

// Values of the builtins of the running thread, by number; see entry.h.
const unsigned* msl_builtin(int builtin);
}

// Code of the library: inlined, or where it touches the machine's own memory kept out of sight of
// the checks.
#define MSL_INLINE inline __attribute__((always_inline))
#define MSL_HIDDEN __attribute__((noinline, no_sanitize("address", "undefined")))
