// Says where threads are that wait for each other in vain.
#pragma once
#include "fault.h"
#include "state.h"

namespace machine {

inline bool same_place(const Thread& a, const Thread& b) {
  return a.state == b.state && a.at.line == b.at.line && a.at.column == b.at.column &&
      (a.at.file == b.at.file || (a.at.file && b.at.file && !strcmp(a.at.file, b.at.file)));
}

// "lanes 0-3 8: simd_sum at x.metal:12" for each place where lanes of a SIMD-group are.
[[noreturn]] inline void diverged(const SimdGroup& group) {
  char text[320];
  size_t length = 0;
  const Thread* first_waiting = nullptr;
  for (unsigned i = 0; i < group.num_threads && length < sizeof text - 64; i++) {
    const Thread& t = group.threads[i];
    bool told = false;
    for (unsigned j = 0; j < i; j++) {
      told = told || same_place(group.threads[j], t);
    }
    if (told) {
      continue;
    }
    unsigned count = 0;
    for (unsigned j = i; j < group.num_threads; j++) {
      count += same_place(group.threads[j], t);
    }
    bool returned = t.state == State::returned;
    first_waiting = first_waiting || returned ? first_waiting : &t;
    length += snprintf(
        text + length, sizeof text - length, "%s%u lane%s from %u on %s%s", length ? "; " : "",
        count, count > 1 ? "s" : "", t.lane, returned ? "have returned" : "at ",
        returned ? "" : t.operation);
    if (!returned && length < sizeof text) {
      length += snprintf(
          text + length, sizeof text - length, " (%s:%u)", base_name(t.at.file), t.at.line);
    }
  }
  note("divergence", first_waiting ? first_waiting->at : Site{}, "%s", text);
  stop();
}

// No thread can run: somewhere lanes or threads wait for others that will not come.
[[noreturn]] inline void deadlock() {
  for (unsigned s = 0; s < m.num_simdgroups; s++) {
    const SimdGroup& group = m.simdgroups[s];
    for (unsigned i = 0; i < group.num_threads; i++) {
      const Thread& t = group.threads[i];
      if (t.state != State::in_barrier && t.state != State::returned) {
        diverged(group);
      }
      if (!same_place(t, group.threads[0])) {
        diverged(group);
      }
    }
  }
  const Thread* waiting = nullptr;
  for (unsigned i = 0; i < m.num_threads; i++) {
    waiting = m.threads[i].state == State::in_barrier ? &m.threads[i] : waiting;
  }
  note(
      "divergence", waiting ? waiting->at : Site{},
      "%u of %u threads wait at a threadgroup_barrier, the others have returned", m.num_waiting,
      m.num_threads);
  stop();
}

} // namespace machine
