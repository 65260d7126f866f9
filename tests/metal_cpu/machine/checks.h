// What clang calls before each access of a checked kernel, and where arithmetic is undefined.
#pragma once
#include "memory.h"

#define MSL_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

extern "C" {

using namespace machine;

constexpr AccessKind load_of(size_t size, unsigned alignment = 1) {
  return {(unsigned)size, true, false, false, alignment};
}
constexpr AccessKind store_of(size_t size, unsigned alignment = 1) {
  return {(unsigned)size, false, true, false, alignment};
}

// clang calls these for types of this alignment, and the ones with N for all others.
#define MSL_CHECK(size)                                             \
  void __asan_load##size##_noabort(uintptr_t address) {             \
    touch(address, load_of(size, size), {MSL_CALLER, {}});          \
  }                                                                 \
  void __asan_store##size##_noabort(uintptr_t address) {            \
    touch(address, store_of(size, size), {MSL_CALLER, {}});         \
  }
MSL_CHECK(1)
MSL_CHECK(2)
MSL_CHECK(4)
MSL_CHECK(8)
MSL_CHECK(16)

void __asan_loadN_noabort(uintptr_t address, size_t size) {
  touch(address, load_of(size), {MSL_CALLER, {}});
}
void __asan_storeN_noabort(uintptr_t address, size_t size) {
  touch(address, store_of(size), {MSL_CALLER, {}});
}
void __asan_handle_no_return() {}

void* __asan_memcpy(void* to, const void* from, size_t size) {
  touch((uintptr_t)from, load_of(size), {MSL_CALLER, {}});
  touch((uintptr_t)to, store_of(size), {MSL_CALLER, {}});
  return memcpy(to, from, size);
}
void* __asan_memmove(void* to, const void* from, size_t size) {
  touch((uintptr_t)from, load_of(size), {MSL_CALLER, {}});
  touch((uintptr_t)to, store_of(size), {MSL_CALLER, {}});
  return memmove(to, from, size);
}
void* __asan_memset(void* to, int value, size_t size) {
  touch((uintptr_t)to, store_of(size), {MSL_CALLER, {}});
  return memset(to, value, size);
}

void msl_atomic(const volatile void* address, unsigned size, bool loads, bool stores, Site at) {
  touch((uintptr_t)address, {size, loads, stores, true, size}, {MSL_CALLER, at});
}

// What clang passes first to its handlers of undefined behaviour begins so.
struct Undefined {
  Site at;
};

void __ubsan_handle_out_of_bounds_abort(Undefined* data, size_t index) {
  note("array bounds", data->at, "index %ld is outside the array", (long)index);
  stop();
}
void __ubsan_handle_shift_out_of_bounds_abort(Undefined* data, size_t, size_t bits) {
  note("undefined", data->at, "a shift by %ld bits", (long)bits);
  stop();
}
void __ubsan_handle_divrem_overflow_abort(Undefined* data, size_t, size_t) {
  note("undefined", data->at, "an integer division by zero, or one that overflows");
  stop();
}
}
