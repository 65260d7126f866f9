// Writes faults down, and ends a dispatch that cannot go on.
#pragma once

#include "state.h"
#include "switch.h"

// Where each call of a check is in the source; made from the assembly. A last one has no address.
struct CallSite {
  uintptr_t address;
  const char* file;
  uint64_t line;
};
extern "C" const CallSite msl_call_sites[];

namespace machine {

inline Site site_of(const void* return_address) {
  const CallSite* site = msl_call_sites;
  while (site->address && site->address != (uintptr_t)return_address) {
    site++;
  }
  return site->address ? Site{site->file, (unsigned)site->line, 0} : Site{"", 0, 0};
}

// The name of a file without its folders.
inline const char* base_name(const char* file) {
  const char* slash = file ? strrchr(file, '/') : nullptr;
  return slash ? slash + 1 : file ? file : "";
}

// Note a fault; one of a kind for each line.
__attribute__((format(printf, 3, 4))) inline void note(
    const char* kind, Site at, const char* format, ...) {
  Dispatch& d = *m.dispatch;
  const char* file = base_name(at.file);
  for (unsigned i = 0; i < d.num_faults; i++) {
    Fault& known = d.faults[i];
    if (!strcmp(known.kind, kind) && known.line == at.line && !strcmp(known.file, file)) {
      known.times++;
      return;
    }
  }
  if (d.num_faults == kMaxFaults) {
    return;
  }
  Fault& fault = d.faults[d.num_faults++];
  snprintf(fault.kind, sizeof fault.kind, "%s", kind);
  snprintf(fault.file, sizeof fault.file, "%s", file);
  fault.line = at.line;
  fault.times = 1;
  __builtin_va_list arguments;
  __builtin_va_start(arguments, format);
  int length = vsnprintf(fault.message, sizeof fault.message, format, arguments);
  __builtin_va_end(arguments);
  if (m.current && length >= 0 && (size_t)length < sizeof fault.message) {
    snprintf(
        fault.message + length, sizeof fault.message - length,
        " (thread %u of threadgroup %u, %u, %u)", m.current->index, m.group[0], m.group[1],
        m.group[2]);
  }
}

// Back to the caller; no thread of this dispatch runs again.
[[noreturn]] inline void stop() {
  m.stopped = true;
  void* gone;
  msl_switch(&gone, m.caller);
  __builtin_unreachable();
}

} // namespace machine
