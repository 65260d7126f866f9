// How the lanes of a SIMD-group share the banks of threadgroup memory in one instruction.
//
// Memory of 32 banks, each a word of 4 bytes wide, as it is on GPUs of this kind; Apple documents
// none. Lanes that ask for one word ask once. An access takes as many turns as its busiest bank has
// words; the least for so many words would be all of them over 32. The quotient is what is counted.
//
// Atomic operations that read and write are not counted: where they go is in the data (a histogram).
// Atomic loads and stores are plain accesses.
#pragma once

#include "fault.h"
#include "traffic.h"

namespace machine {

constexpr unsigned kBanks = 32, kWord = 4;

struct BankAccess {
  const void* instruction;
  uint32_t turn;
  uint16_t first, last; // words of the variable
};

inline int compare_bank_accesses(const void* left, const void* right) {
  const BankAccess &a = *(const BankAccess*)left, &b = *(const BankAccess*)right;
  if (a.instruction != b.instruction) {
    return a.instruction < b.instruction ? -1 : 1;
  }
  return a.turn < b.turn ? -1 : a.turn > b.turn;
}

// The accesses of one SIMD-group since its lanes last met.
class Banks {
 public:
  void add(
      const void* instruction, size_t offset, unsigned size, unsigned lane, uint32_t phase) {
    if (phase != phase_) {
      count();
      phase_ = phase;
    }
    if (used_ == capacity_) {
      capacity_ = capacity_ ? 2 * capacity_ : 1024;
      accesses_ = (BankAccess*)realloc(accesses_, capacity_ * sizeof(BankAccess));
    }
    uint16_t first = offset / kWord, last = (offset + size - 1) / kWord;
    uint32_t turn = turns_.turn(instruction, lane, phase);
    accesses_[used_++] = {instruction, turn, first, last};
  }

  // Looks at what there is, instruction by instruction, and forgets it.
  void count() {
    qsort(accesses_, used_, sizeof(BankAccess), compare_bank_accesses);
    unsigned start = 0;
    for (unsigned i = 1; i <= used_; i++) {
      if (i == used_ || compare_bank_accesses(&accesses_[start], &accesses_[i])) {
        look_at(accesses_ + start, i - start);
        start = i;
      }
    }
    used_ = 0;
  }

 private:
  BankAccess* accesses_;
  unsigned capacity_, used_;
  uint32_t phase_;
  Together turns_;

  void look_at(const BankAccess* some, unsigned num) {
    static uint32_t stamps[kThreadgroupBytes / kWord], stamp = 0;
    unsigned words[kBanks] = {}, all = 0, busiest = 0;
    stamp++;
    for (unsigned i = 0; i < num; i++) {
      for (unsigned word = some[i].first; word <= some[i].last; word++) {
        if (stamps[word] != stamp) {
          stamps[word] = stamp;
          all++;
          unsigned in_bank = ++words[word % kBanks];
          busiest = in_bank > busiest ? in_bank : busiest;
        }
      }
    }
    unsigned least = (all + kBanks - 1) / kBanks;
    note_ways(m.dispatch->bank, (busiest + least - 1) / least, some[0]);
  }

  static void note_ways(BankUse& worst, unsigned ways, const BankAccess& access) {
    if (ways > worst.ways) {
      Site at = site_of(access.instruction);
      worst.ways = ways;
      worst.line = at.line;
      snprintf(worst.file, sizeof worst.file, "%s", base_name(at.file));
    }
  }
};

inline Banks banks[kMaxSimdGroups];

inline void count_banks() {
  for (Banks& some : banks) {
    some.count();
  }
}

} // namespace machine
