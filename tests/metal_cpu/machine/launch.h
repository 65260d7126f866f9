// Runs the threadgroups of a dispatch, one after the other.
#pragma once

#include "memory.h"
#include "schedule.h"

extern "C" void msl_entry(void* const* buffers);

namespace machine {

inline void run_thread() {
  msl_entry(m.table);
  Thread& self = *m.current;
  self.state = State::returned;
  SimdGroup& group = m.simdgroups[self.simdgroup];
  group.num_returned++;
  m.num_returned++;
  if (group.num_arrived && group.num_arrived == group.num_threads - group.num_returned) {
    diverged(group);
  }
  if (m.num_returned == m.num_threads) {
    msl_switch(&self.stack, m.caller);
  }
  wait();
  __builtin_unreachable();
}

inline void start_thread(unsigned index) {
  Thread& t = m.threads[index];
  t = {};
  t.index = index;
  t.lane = index % msl::kSimdWidth;
  t.simdgroup = index / msl::kSimdWidth;
  t.position[0] = index % m.size[0];
  t.position[1] = index / m.size[0] % m.size[1];
  t.position[2] = index / m.size[0] / m.size[1];
  // Tops at different offsets, so that stacks do not share cache sets.
  unsigned char* top = m.dispatch->stacks + (index + 1) * kStackBytes - (index % 64) * 192;
  t.stack = new_stack(top, run_thread);
}

inline void start_simdgroup(unsigned index) {
  SimdGroup& group = m.simdgroups[index];
  unsigned first = index * msl::kSimdWidth;
  group.threads = m.threads + first;
  group.num_threads = m.num_threads - first;
  if (group.num_threads > msl::kSimdWidth) {
    group.num_threads = msl::kSimdWidth;
  }
  group.num_arrived = group.num_returned = 0;
  group.phase = new_phase();
  for (unsigned i = 0; i < group.num_threads; i++) {
    group.order[i] = i;
  }
  shuffle(group.order, group.num_threads);
  for (unsigned i = 0; i < group.num_threads; i++) {
    group.threads[group.order[i]].rank = i;
  }
  m.order[index] = index;
}

inline void run_threadgroup(uint32_t serial) {
  m.group[0] = serial % m.num_groups[0];
  m.group[1] = serial / m.num_groups[0] % m.num_groups[1];
  m.group[2] = serial / m.num_groups[0] / m.num_groups[1];
  m.num_threads = 1;
  for (int i = 0; i < 3; i++) { // threadgroups at an edge of the grid are smaller
    uint32_t left = m.dispatch->grid[i] - m.group[i] * m.full_size[i];
    m.size[i] = left < m.full_size[i] ? left : m.full_size[i];
    m.num_threads *= m.size[i];
  }
  m.num_simdgroups = (m.num_threads + msl::kSimdWidth - 1) / msl::kSimdWidth;
  m.num_waiting = m.num_returned = m.num_variables = 0;
  m.variable_bytes = 0;
  m.group_serial = serial + 1;
  for (unsigned i = 0; i < m.num_threads; i++) {
    start_thread(i);
  }
  for (unsigned s = 0; s < m.num_simdgroups; s++) {
    start_simdgroup(s);
  }
  shuffle(m.order, m.num_simdgroups);
  m.dispatch->num_threads += m.num_threads;
  m.dispatch->num_threadgroups++;
  SimdGroup& first = m.simdgroups[m.order[0]];
  m.current = &first.threads[first.order[0]];
  msl_switch(&m.caller, m.current->stack);
  m.current = nullptr;
}

inline bool fits() {
  Dispatch& d = *m.dispatch;
  uint64_t threads = 1;
  for (int i = 0; i < 3; i++) { // as Metal's dispatch of threads, after MLX's clamp
    m.full_size[i] = d.threadgroup[i] < d.grid[i] ? d.threadgroup[i] : d.grid[i];
    m.num_groups[i] = m.full_size[i] ? (d.grid[i] + m.full_size[i] - 1) / m.full_size[i] : 0;
    threads *= m.full_size[i];
  }
  if (threads > kMaxThreads) {
    note("limit", {}, "%llu threads in a threadgroup; Metal has at most %u",
         (unsigned long long)threads, kMaxThreads);
  }
  if (d.num_buffers > kMaxBuffers) {
    note("limit", {}, "%u buffers; Metal has at most %u", d.num_buffers, kMaxBuffers);
  }
  return d.num_faults == 0;
}

} // namespace machine

extern "C" {

using namespace machine;

// It lies at a multiple of what its type asks for, and of no more.
void* msl_threadgroup_variable(
    const void* tag, size_t size, size_t alignment, const char* name, Site at) {
  for (unsigned i = 0; i < m.num_variables; i++) {
    if (m.variables[i].tag == tag) {
      return m.variables[i].address;
    }
  }
  size_t offset = (m.variable_bytes + 15) / 16 * 16;
  m.variable_bytes = offset + size;
  if (m.variable_bytes > m.dispatch->threadgroup_bytes) {
    m.dispatch->threadgroup_bytes = m.variable_bytes;
  }
  if (m.variable_bytes > kThreadgroupBytes || m.num_variables == kMaxVariables) {
    note(
        "limit", at, "%zu bytes of threadgroup memory with %s; Metal has at most %zu",
        m.variable_bytes, name, kThreadgroupBytes);
    stop();
  }
  Variable& v = m.variables[m.num_variables++];
  size_t unaligned = alignment < 16 ? alignment : 0;
  v = {tag, name, size, m.dispatch->arena + offset + kRedZone * m.num_variables + unaligned};
  memset(v.address, 0xff, size);
  watch_variable(v);
  return v.address;
}

const unsigned* msl_builtin(int builtin) {
  static unsigned value[3];
  const Thread& t = *m.current;
  for (int i = 0; i < 3; i++) {
    unsigned all[] = {
        0,
        m.group[i] * m.full_size[i] + t.position[i],
        t.position[i],
        m.group[i],
        m.num_groups[i],
        m.size[i],
        m.full_size[i],
        m.dispatch->grid[i],
        t.simdgroup,
        t.lane,
        t.index,
        m.num_simdgroups,
        (m.full_size[0] * m.full_size[1] * m.full_size[2] + msl::kSimdWidth - 1) / msl::kSimdWidth,
        msl::kSimdWidth,
        t.index / 4u,
        t.lane % 4u,
    };
    value[i] = all[builtin];
  }
  return value;
}

__attribute__((visibility("default"))) void msl_dispatch(Dispatch* dispatch) {
  m.dispatch = dispatch;
  m.current = nullptr;
  m.stopped = false;
  m.random = dispatch->seed * 0x9e3779b97f4a7c15u;
  if (!fits()) {
    return;
  }
  for (void*& address : m.table) {
    address = nullptr;
  }
  for (unsigned i = 0; i < dispatch->num_buffers; i++) {
    m.table[dispatch->buffers[i].index] = dispatch->buffers[i].address - dispatch->buffers[i].before;
  }
  watch_buffers();
  uint32_t count = m.num_groups[0] * m.num_groups[1] * m.num_groups[2];
  uint32_t* order = (uint32_t*)malloc(count * sizeof(uint32_t));
  for (uint32_t i = 0; i < count; i++) {
    order[i] = i;
  }
  shuffle(order, count);
  for (uint32_t i = 0; i < count && !m.stopped; i++) {
    run_threadgroup(order[i]);
  }
  free(order);
  count_banks();
  unwatch_buffers();
}
}
