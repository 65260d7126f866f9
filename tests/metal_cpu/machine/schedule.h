// Which thread runs next, and where threads wait for each other. Knows no memory.
#pragma once
#include "divergence.h"
#include "state.h"
#include "switch.h"

namespace machine {

inline uint32_t random_below(uint32_t end) {
  m.random ^= m.random << 13;
  m.random ^= m.random >> 7;
  m.random ^= m.random << 17;
  return (uint32_t)((m.random >> 16) % end);
}

template <class T>
void shuffle(T* items, unsigned count) {
  for (unsigned i = count; m.dispatch->seed && i > 1; i--) {
    unsigned j = random_below(i);
    T item = items[i - 1];
    items[i - 1] = items[j];
    items[j] = item;
  }
}

inline uint32_t new_phase() {
  static uint32_t last = 0;
  return ++last;
}

inline void go_on_with(Thread& next) {
  Thread* from = m.current;
  if (&next != from) {
    m.current = &next;
    msl_switch(&from->stack, next.stack);
  }
}

// The next of the SIMD-group's lanes, in its order, or else one of another SIMD-group.
inline Thread* next_ready() {
  SimdGroup& own = m.simdgroups[m.current->simdgroup];
  for (unsigned i = 1; i < own.num_threads; i++) {
    Thread& t = own.threads[own.order[(m.current->rank + i) % own.num_threads]];
    if (t.state == State::ready) {
      return &t;
    }
  }
  for (unsigned s = 0; s < m.num_simdgroups; s++) {
    SimdGroup& other = m.simdgroups[m.order[s]];
    for (unsigned i = 0; i < other.num_threads && &other != &own; i++) {
      Thread& t = other.threads[other.order[i]];
      if (t.state == State::ready) {
        return &t;
      }
    }
  }
  return nullptr;
}

inline void wait() {
  Thread* next = next_ready();
  if (next == nullptr) {
    deadlock();
  }
  go_on_with(*next);
}

// Whether this lane is the last of its SIMD-group to come here; otherwise it has waited.
inline bool last_to_come(State state, const char* operation, Site at) {
  Thread& self = *m.current;
  SimdGroup& group = m.simdgroups[self.simdgroup];
  self.state = state;
  self.operation = operation;
  self.at = at;
  if (++group.num_arrived < group.num_threads - group.num_returned) {
    wait();
    return false;
  }
  for (unsigned i = 0; i < group.num_threads; i++) {
    if (!same_place(group.threads[i], self)) {
      diverged(group);
    }
  }
  for (unsigned i = 0; i < group.num_threads; i++) {
    group.threads[i].state = State::ready;
  }
  group.num_arrived = 0;
  group.phase = new_phase();
  return true;
}

inline void add_epochs(Epochs& epochs, int memory) {
  epochs.of[0] += (memory & 1) != 0;
  epochs.of[1] += (memory & 2) != 0;
}

// All threads have come to one threadgroup barrier: they go on, in a new order.
inline void pass_barrier(int memory) {
  for (unsigned i = 0; i < m.num_threads; i++) {
    if (!same_place(m.threads[i], *m.current)) {
      note(
          "divergence", m.threads[i].at, "threads wait at different barriers, also at line %u",
          m.current->at.line);
      stop();
    }
  }
  for (unsigned i = 0; i < m.num_threads; i++) {
    m.threads[i].state = State::ready;
  }
  for (unsigned s = 0; s < m.num_simdgroups; s++) {
    m.simdgroups[s].phase = new_phase();
  }
  m.num_waiting = 0;
  add_epochs(m.epochs, memory);
  m.dispatch->num_threadgroup_barriers++;
  if (m.dispatch->seed) {
    shuffle(m.order, m.num_simdgroups);
    SimdGroup& first = m.simdgroups[m.order[0]];
    go_on_with(first.threads[first.order[0]]);
  }
}

} // namespace machine

extern "C" {

using namespace machine;

Exchange* msl_exchange(const void* value, unsigned size, const char* operation, Site at) {
  Thread& self = *m.current;
  SimdGroup& group = m.simdgroups[self.simdgroup];
  Exchange& exchange = group.exchanges[self.next_exchange];
  self.next_exchange ^= 1;
  memcpy(exchange.slots[self.lane], value, size);
  if (last_to_come(State::in_simd_op, operation, at)) {
    exchange.has_result = false;
    exchange.num_lanes = group.num_threads;
    m.dispatch->num_simd_ops++;
  }
  return &exchange;
}

void msl_simdgroup_barrier(int memory, Site at) {
  SimdGroup& group = m.simdgroups[m.current->simdgroup];
  if (last_to_come(State::in_simdgroup_barrier, "simdgroup_barrier", at)) {
    add_epochs(group.epochs, memory);
    m.dispatch->num_simdgroup_barriers++;
  }
}

void msl_threadgroup_barrier(int memory, Site at) {
  Thread& self = *m.current;
  self.state = State::in_barrier;
  self.operation = "threadgroup_barrier";
  self.at = at;
  if (++m.num_waiting == m.num_threads) {
    pass_barrier(memory);
  } else {
    wait();
  }
}

void msl_bad_lane(const char* operation, int lane, Site at) {
  note("shuffle", at, "%s of lane %d, which does not run", operation, lane);
}

unsigned msl_lane() {
  return m.current->lane;
}
}
