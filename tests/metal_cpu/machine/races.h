// Whether two accesses to a byte are ordered: by a barrier for that memory, or by being of one
// thread. SIMD operations order no memory, and nothing orders threadgroups of one dispatch.
#pragma once
#include "state.h"

namespace machine {

constexpr uint32_t kManyGroups = ~0u;
constexpr uint16_t kMany = 0xffff;

// The last access of one kind, or what several unordered ones have in common.
struct Access {
  uint32_t group; // 0: none yet
  uint32_t epoch, simd_epoch;
  uint16_t thread, simdgroup;
  bool atomic;
};

struct Cell { // of one byte
  Access write, read;
};

inline Access access_now(int memory, bool atomic) {
  const Thread& t = *m.current;
  return {
      m.group_serial, m.epochs.of[memory], m.simdgroups[t.simdgroup].epochs.of[memory],
      t.index,        t.simdgroup,         atomic};
}

inline bool ordered(const Access& before, const Access& now) {
  if (before.group == 0 || (before.atomic && now.atomic)) {
    return true;
  }
  if (before.group != now.group) {
    return false;
  }
  bool same_thread = before.thread == now.thread;
  bool same_simdgroup = before.simdgroup == now.simdgroup;
  return same_thread || before.epoch != now.epoch ||
      (same_simdgroup && before.simd_epoch != now.simd_epoch);
}

inline void add_reader(Access& readers, const Access& now) {
  if (readers.group != kManyGroups && readers.group != now.group && readers.group != 0) {
    readers.group = kManyGroups;
    readers.thread = readers.simdgroup = kMany;
  } else if (readers.group != kManyGroups && ordered(readers, now)) {
    readers = now;
  } else if (readers.group != kManyGroups) {
    readers.thread = readers.thread == now.thread ? now.thread : kMany;
    readers.simdgroup = readers.simdgroup == now.simdgroup ? now.simdgroup : kMany;
    readers.simd_epoch = now.simd_epoch;
  }
  readers.atomic = readers.atomic && now.atomic;
}

// Put an access into a byte's history; the earlier access that it races with, if any.
inline const Access* race(Cell& cell, const Access& now, bool store, Access& earlier) {
  bool after_write = ordered(cell.write, now);
  bool after_reads = !store || ordered(cell.read, now);
  earlier = after_write ? cell.read : cell.write;
  if (store) {
    cell.write = now;
    cell.read = {};
  } else {
    add_reader(cell.read, now);
  }
  return after_write && after_reads ? nullptr : &earlier;
}

} // namespace machine
