// Threads, SIMD-groups, buffers and counts of one dispatch. Does nothing.
#pragma once
#include <stdint.h>

#include "machine.h"

#include "libc.h"

namespace machine {

using msl::Exchange;
using msl::Site;

constexpr unsigned kMaxThreads = 1024; // of a threadgroup
constexpr unsigned kMaxSimdGroups = kMaxThreads / msl::kSimdWidth;
constexpr unsigned kMaxBuffers = 31;
constexpr unsigned kMaxFaults = 64;
constexpr unsigned kMaxVariables = 64; // in threadgroup memory
constexpr size_t kThreadgroupBytes = 32768;
constexpr size_t kRedZone = 64; // between threadgroup variables
constexpr size_t kArenaBytes = kThreadgroupBytes + kRedZone * (kMaxVariables + 1);
constexpr size_t kStackBytes = 128 * 1024;

// --- what the caller gives and gets; dispatch.py has the same structures

struct Traffic {
  uint64_t requested_bytes, requested_once_bytes, unique_per_group_bytes, unique_bytes;
  uint64_t stored_bytes, num_loads, num_stores;
};

struct Buffer {
  unsigned char* address;
  uint64_t size;
  uint64_t before; // bytes between the pointer that a kernel gets and the address
  unsigned char* written; // one flag per byte; null: all of it holds data
  const char* name;
  uint32_t index;
  uint32_t is_output;
  Traffic traffic;
};

struct Fault {
  char kind[24];
  char message[360];
  char file[96];
  uint32_t line, times;
};

// The access to threadgroup memory that takes the most turns, and where it is.
struct BankUse {
  char file[96];
  uint32_t line, ways;
};

struct Dispatch {
  uint32_t grid[3], threadgroup[3]; // threads
  uint64_t seed;
  Buffer* buffers;
  unsigned char* stacks; // of threads: kMaxThreads times kStackBytes, one for all kernels
  unsigned char* arena; // threadgroup memory: kArenaBytes
  uint32_t num_buffers;
  uint32_t checked; // 0: memory is not watched
  // results
  uint32_t num_faults, unused;
  Fault faults[kMaxFaults];
  uint64_t threadgroup_bytes, num_threadgroups, num_threads;
  uint64_t num_simd_ops, num_simdgroup_barriers, num_threadgroup_barriers;
  Traffic threadgroup_memory;
  BankUse bank; // of loads and stores
};

// --- threads

enum class State : uint8_t { ready, in_simd_op, in_simdgroup_barrier, in_barrier, returned };

// How often barriers made memory visible, by kind of memory: [0] device, [1] threadgroup.
struct Epochs {
  uint32_t of[2];
};

struct Thread {
  void* stack;
  State state;
  const char* operation; // that it waits in
  Site at;
  uint8_t lane;
  uint8_t next_exchange;
  uint8_t rank; // in its SIMD-group's order
  uint16_t simdgroup;
  uint16_t index; // in the threadgroup
  uint32_t position[3];
};

struct SimdGroup {
  Thread* threads;
  unsigned num_threads, num_arrived, num_returned;
  uint8_t order[msl::kSimdWidth];
  Exchange exchanges[2]; // by turns, so that a fast lane does not overwrite what a slow one reads
  Epochs epochs;
  uint32_t phase; // counts the times that its lanes met
};

struct Variable {
  const void* tag;
  const char* name;
  size_t size;
  unsigned char* address;
};

struct Machine {
  Dispatch* dispatch;
  Thread* current;
  Thread threads[kMaxThreads];
  SimdGroup simdgroups[kMaxSimdGroups];
  uint16_t order[kMaxSimdGroups];
  unsigned num_threads, num_simdgroups, num_waiting, num_returned;
  uint32_t num_groups[3], group[3], full_size[3], size[3];
  uint32_t group_serial; // of the threadgroup that runs, from 1
  Epochs epochs;
  Variable variables[kMaxVariables];
  unsigned num_variables;
  size_t variable_bytes;
  void* caller; // its stack
  void* table[kMaxBuffers + 33];
  uint64_t random;
  bool stopped;
};

extern Machine m;

} // namespace machine
