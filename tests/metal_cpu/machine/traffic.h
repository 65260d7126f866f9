// Counts bytes that are loaded and stored. Knows no order and no bounds.
#pragma once

#include "state.h"

namespace machine {

// Loads of one SIMD-group since its lanes last met, for counting an address that several lanes
// load by the same instruction at the same turn once. A lane runs until the lanes meet, so that
// the turns of one lane come in a row.
class Together {
 public:
  bool is_first(const void* instruction, uintptr_t address, unsigned lane, uint32_t phase) {
    uint64_t key = mixed((uint64_t)instruction * 0x9e3779b97f4a7c15u + turn(instruction, lane, phase));
    return insert(mixed(key ^ address), phase);
  }

  // How often a lane has come to an instruction in this phase.
  uint32_t turn(const void* instruction, unsigned lane, uint32_t phase) {
    unsigned place = mixed((uintptr_t)instruction) % kTurns;
    for (unsigned tries = 0; tries < kTurns; tries++, place = (place + 1) % kTurns) {
      Turn& t = turns_[place];
      if (t.instruction == instruction && t.phase == phase && t.lane == lane) {
        return ++t.count;
      }
      if (t.instruction == instruction || t.instruction == nullptr) {
        t = {instruction, phase, lane, 0};
        return 0;
      }
    }
    return 0;
  }

 private:
  struct Turn {
    const void* instruction;
    uint32_t phase, lane, count;
  };
  struct Entry {
    uint64_t key;
    uint32_t phase;
  };
  static constexpr unsigned kTurns = 1024;
  Turn turns_[kTurns];
  Entry* entries_;
  unsigned capacity_, used_;
  uint32_t used_phase_;

  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 29);
  }

  bool insert(uint64_t key, uint32_t phase) {
    if (used_phase_ != phase) {
      used_phase_ = phase;
      used_ = 0;
    }
    if (2 * used_ >= capacity_) {
      grow(phase);
    }
    unsigned place = key & (capacity_ - 1);
    while (entries_[place].phase == phase) {
      if (entries_[place].key == key) {
        return false;
      }
      place = (place + 1) & (capacity_ - 1);
    }
    entries_[place] = {key, phase};
    used_++;
    return true;
  }

  void grow(uint32_t phase) {
    Entry* old = entries_;
    unsigned old_capacity = capacity_;
    capacity_ = capacity_ ? 2 * capacity_ : 1024;
    entries_ = (Entry*)calloc(capacity_, sizeof(Entry));
    used_ = 0;
    for (unsigned i = 0; i < old_capacity; i++) {
      if (old[i].phase == phase) {
        insert(old[i].key, phase);
      }
    }
    free(old);
  }
};

inline Together together[kMaxSimdGroups];

// Which bytes of a buffer have been loaded: by anyone, and by the threadgroup that runs.
struct Loaded {
  uint32_t* by_group; // the last threadgroup that did, from 1
  unsigned char* by_any;
};

inline void count_load(Traffic& traffic, unsigned size) {
  traffic.requested_bytes += size;
  traffic.num_loads++;
}

inline void count_store(Traffic& traffic, unsigned size) {
  traffic.stored_bytes += size;
  traffic.num_stores++;
}

inline void count_shared(
    Traffic& traffic, const void* instruction, uintptr_t address, unsigned size) {
  const Thread& t = *m.current;
  uint32_t phase = m.simdgroups[t.simdgroup].phase;
  if (together[t.simdgroup].is_first(instruction, address, t.lane, phase)) {
    traffic.requested_once_bytes += size;
  }
}

inline void count_unique(Traffic& traffic, Loaded& loaded, size_t offset, unsigned size) {
  for (size_t i = offset; i < offset + size; i++) {
    traffic.unique_per_group_bytes += loaded.by_group[i] != m.group_serial;
    traffic.unique_bytes += !loaded.by_any[i];
    loaded.by_group[i] = m.group_serial;
    loaded.by_any[i] = 1;
  }
}

} // namespace machine
