// Every access of a checked kernel: is it in bounds, initialised, ordered; and how much it moves.
#pragma once

#include "banks.h"
#include "fault.h"
#include "races.h"
#include "traffic.h"

namespace machine {

struct AccessKind {
  unsigned size;
  bool loads, stores, atomic;
  unsigned alignment; // that its type has
  const char* verb() const { return !stores ? "load" : loads ? "atomic operation" : "store"; }
};

enum { kDevice = 0, kThreadgroup = 1 };
constexpr unsigned kTrapped = 16; // bytes that x86-64 loads and stores at multiples only

// Where an access is: of a check's return address only faults look up the line.
struct Place {
  const void* instruction;
  Site known;
  operator Site() const { return known.file ? known : site_of(instruction); }
};

inline Cell* buffer_cells[kMaxBuffers + 33]; // of outputs
inline Loaded loaded[kMaxBuffers + 33];
inline Cell arena_cells[kArenaBytes];
inline unsigned char arena_written[kArenaBytes];

inline void watch_buffers() {
  Dispatch& d = *m.dispatch;
  for (unsigned i = 0; d.checked && i < d.num_buffers; i++) {
    Buffer& b = d.buffers[i];
    buffer_cells[i] = b.is_output ? (Cell*)calloc(b.size + 1, sizeof(Cell)) : nullptr;
    loaded[i].by_group = (uint32_t*)calloc(b.size + 1, sizeof(uint32_t));
    loaded[i].by_any = (unsigned char*)calloc(b.size + 1, 1);
  }
}

inline void unwatch_buffers() {
  for (unsigned i = 0; m.dispatch->checked && i < m.dispatch->num_buffers; i++) {
    free(buffer_cells[i]);
    free(loaded[i].by_group);
    free(loaded[i].by_any);
  }
}

inline void watch_variable(const Variable& v) {
  if (!m.dispatch->checked) {
    return;
  }
  size_t offset = v.address - m.dispatch->arena;
  memset(arena_cells + offset, 0, v.size * sizeof(Cell));
  memset(arena_written + offset, 0, v.size);
}

inline void report_race(
    const char* name, size_t offset, const AccessKind& kind, const Access& earlier, const Place& at) {
  char other[48] = "several threads";
  if (earlier.thread != kMany) {
    snprintf(other, sizeof other, "thread %u", earlier.thread);
  }
  const char* where = earlier.group == m.group_serial ? "the same" : "another";
  note(
      "race", at, "%s of %u bytes at %s + %zu, which %s of %s threadgroup used, without a barrier",
      kind.verb(), kind.size, name, offset, other, where);
}

inline void check_alignment(
    const char* name, size_t offset, uintptr_t address, const AccessKind& kind, const Place& at) {
  if (address % kind.alignment) {
    note(
        "misaligned", at, "%s of %u bytes at %s + %zu, an address that is no multiple of %u",
        kind.verb(), kind.size, name, offset, kind.alignment);
    if (kind.alignment >= kTrapped) {
      stop(); // the processor would end the process
    }
  }
}

inline void check_bytes(
    const char* name, size_t offset, const AccessKind& kind, int memory, Cell* cells,
    unsigned char* written, const Place& at) {
  Access now = access_now(memory, kind.atomic), earlier, found;
  bool races = false, unwritten = false;
  for (unsigned i = 0; i < kind.size; i++) {
    if (written && kind.loads && !written[i]) {
      unwritten = true;
    }
    if (written && kind.stores) {
      written[i] = 1;
    }
    if (cells && race(cells[i], now, kind.stores, found)) {
      earlier = found;
      races = true;
    }
  }
  if (unwritten) {
    note(
        "uninitialised read", at, "load of %u bytes at %s + %zu, where nothing was stored",
        kind.size, name, offset);
  }
  if (races) {
    report_race(name, offset, kind, earlier, at);
  }
}

inline void outside(uintptr_t address, const AccessKind& kind, const Place& at) {
  Dispatch& d = *m.dispatch;
  const char* name = "no buffer";
  long distance = 0;
  uintptr_t nearest = ~(uintptr_t)0;
  for (unsigned i = 0; i < d.num_buffers; i++) {
    long offset = (long)(address - (uintptr_t)d.buffers[i].address);
    uintptr_t gap = offset < 0 ? -offset : offset - d.buffers[i].size;
    if (gap < nearest) {
      nearest = gap;
      name = d.buffers[i].name;
      distance = offset;
    }
  }
  if (nearest > 1u << 20) {
    name = "no buffer";
    distance = 0;
  }
  note("out of bounds", at, "%s of %u bytes at %s %+ld", kind.verb(), kind.size, name, distance);
  stop();
}

inline void touch_arena(uintptr_t address, const AccessKind& kind, const Place& at) {
  Traffic& traffic = m.dispatch->threadgroup_memory;
  kind.stores ? count_store(traffic, kind.size) : count_load(traffic, kind.size);
  size_t place = address - (uintptr_t)m.dispatch->arena;
  for (unsigned i = 0; i < m.num_variables; i++) {
    const Variable& v = m.variables[i];
    size_t offset = address - (uintptr_t)v.address;
    if (offset < v.size && offset + kind.size <= v.size) {
      check_alignment(v.name, offset, address, kind, at);
      const Thread& t = *m.current;
      if (!(kind.loads && kind.stores)) { // where atomic operations go depends on the data
        banks[t.simdgroup].add(
            at.instruction, offset, kind.size, t.lane, m.simdgroups[t.simdgroup].phase);
      }
      check_bytes(
          v.name, offset, kind, kThreadgroup, arena_cells + place, arena_written + place, at);
      return;
    }
  }
  const Variable* below = nullptr;
  for (unsigned i = 0; i < m.num_variables; i++) {
    if ((uintptr_t)m.variables[i].address <= address) {
      below = &m.variables[i];
    }
  }
  note(
      "out of bounds", at, "%s of %u bytes at %s + %zu, threadgroup memory of %zu bytes",
      kind.verb(), kind.size, below ? below->name : "no variable",
      below ? address - (uintptr_t)below->address : 0, below ? below->size : 0);
  stop();
}

inline void touch_buffer(
    unsigned i, size_t offset, const AccessKind& kind, const Place& at) {
  Buffer& b = m.dispatch->buffers[i];
  if (offset + kind.size > b.size) {
    outside((uintptr_t)b.address + offset, kind, at);
  }
  if (kind.stores && !b.is_output) {
    note("write to input", at, "store of %u bytes at %s + %zu", kind.size, b.name, offset);
    stop();
  }
  check_alignment(b.name, offset, (uintptr_t)b.address + offset, kind, at);
  if (kind.loads) {
    count_load(b.traffic, kind.size);
    count_shared(b.traffic, at.instruction, (uintptr_t)b.address + offset, kind.size);
    count_unique(b.traffic, loaded[i], offset, kind.size);
  }
  if (kind.stores) {
    count_store(b.traffic, kind.size);
  }
  Cell* cells = buffer_cells[i];
  if (cells || b.written) {
    check_bytes(
        b.name, offset, kind, kDevice, cells ? cells + offset : nullptr,
        b.written ? b.written + offset : nullptr, at);
  }
}

// Whether an address is in the kernel's own image: constants of the program.
inline bool in_image(uintptr_t address) {
  constexpr unsigned kPages = 256;
  static struct {
    uintptr_t page;
    bool known, ours;
  } pages[kPages];
  uintptr_t page = address >> 12;
  auto& entry = pages[page % kPages];
  if (!entry.known || entry.page != page) {
    Image here, there;
    bool ours = dladdr((void*)&m, &here) && dladdr((void*)address, &there) &&
        here.base == there.base;
    entry = {page, true, ours};
  }
  return entry.ours;
}

inline void touch(uintptr_t address, const AccessKind& kind, const Place& at) {
  bool own = address - (uintptr_t)m.dispatch->stacks < kMaxThreads * kStackBytes; // a thread's variable
  if (m.current == nullptr || !m.dispatch->checked || own) {
    return;
  }
  static unsigned last = 0; // buffers are used in runs
  Dispatch& d = *m.dispatch;
  for (unsigned n = 0; n < d.num_buffers; n++) {
    unsigned i = (last + n) % d.num_buffers;
    size_t offset = address - (uintptr_t)d.buffers[i].address;
    if (offset < d.buffers[i].size) {
      last = i;
      touch_buffer(i, offset, kind, at);
      return;
    }
  }
  if (address - (uintptr_t)m.dispatch->arena < kArenaBytes) {
    touch_arena(address, kind, at);
  } else if (!in_image(address)) {
    outside(address, kind, at);
  }
}

} // namespace machine
