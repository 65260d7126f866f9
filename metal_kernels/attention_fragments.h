// 8 x 8 fragments of simdgroup_matrix, and runs of stored keys and values that fill them.
//
// A lane of a SIMD group holds two neighbours of a row of each fragment: (row, column) and
// (row, column + 1). Which number of a vector stands at which place of a contraction is free as
// long as both sides agree; the orders below are chosen so that each lane reads wide runs of
// consecutive numbers, and the lanes together every number once.

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

typedef simdgroup_matrix<float, 8, 8> Fragment;

// Before loops over arrays that must stay in registers.
#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int BLOCK = 16;  // tokens that are handled together; a part of one page

struct Place {
  int row;
  int column;  // even
};

inline Place place_of(uint lane) {
  const int quad = lane / 4;
  return {int((quad & 4) + (lane / 2) % 4), int((quad & 2) * 2 + (lane % 2) * 2)};
}

// Numbers that a lane reads of a key, of D: it holds place `row` of each chunk of 8, and chunks
// go together so that these are consecutive.
constexpr int key_run(int D) { return D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2; }

// The number of a key at place k of chunk c.
template <int D>
inline int key_index(int c, int k) {
  constexpr int RUN = key_run(D);
  return c / RUN * 8 * RUN + k * RUN + c % RUN;
}

// Numbers that a lane reads of a value: it holds two places, so half a run of chunks.
constexpr int value_run(int D) { return D % 32 == 0 ? 8 : 4; }

// The number of a value that stands at an even place n of chunk c; place n + 1 follows it by half
// a run.
template <int D>
inline int value_index(int c, int n) {
  constexpr int HALF = value_run(D) / 2;
  return c / HALF * 8 * HALF + n * HALF + c % HALF;
}

// Numbers that share a scale: the largest multiple of 8 up to 64 that divides the vector.
constexpr int group_size(int D) {
  for (int group = 64; group > 8; group -= 8) {
    if (D % group == 0) return group;
  }
  return 8;
}

// N consecutive numbers, as they are stored.
template <typename T, int N>
struct PlainRun {
  static constant constexpr int WIDE = N < 4 ? N : 4;
  vec<T, WIDE> parts[N / WIDE];

  float at(int i) const { return float(parts[i / WIDE][i % WIDE]); }
};

// N consecutive codes in words of 32 bits or one shorter word; they share a scale and a bias.
template <int BITS, int N>
struct CodeRun {
  uint words[(N * BITS + 31) / 32];
  float scale;
  float bias;

  float at(int i) const {
    const uint word = words[i * BITS / 32] >> (i * BITS % 32);
    return float(word & ((1u << BITS) - 1)) * scale + bias;
  }
};

// Vectors of D numbers as they are, one after the other, `codes` at the first.
template <int D, typename C, typename S>
struct StoredNumbers {
  template <int N>
  using Run = PlainRun<C, N>;
  static constant constexpr int WIDTH = D;
  static constant constexpr int GROUPS = 0;
  const device C* codes;
  const device S* scales;
  const device S* biases;

  // How many spans of SPAN numbers share a scale: here none has any.
  template <int SPAN>
  static constexpr int spans() { return 1; }

  // N numbers of a token from `span + first` on. Zeros where nothing may be seen: what lies there
  // may be anything.
  template <int N, int SPAN>
  void read(thread Run<N>& run, int token, int span, int first, bool seen, bool) const {
    constexpr int WIDE = Run<N>::WIDE;
    const device C* at = codes + token * WIDTH + span + first;
    UNROLL
    for (int i = 0; i < N / WIDE; i++) {
      run.parts[i] = seen ? reinterpret_cast<const device vec<C, WIDE>*>(at)[i] : vec<C, WIDE>(C(0));
    }
  }
};

// The same in codes of BITS bits.
template <int BITS, int D, typename C, typename S>
struct StoredCodes {
  template <int N>
  using Run = CodeRun<BITS, N>;
  static constant constexpr int GROUP = group_size(D);
  static constant constexpr int WIDTH = D * BITS / 8;
  static constant constexpr int GROUPS = D / GROUP;
  const device C* codes;
  const device S* scales;
  const device S* biases;

  template <int SPAN>
  static constexpr int spans() { return GROUP % SPAN == 0 ? GROUP / SPAN : 1; }

  // `span` is a multiple of SPAN, and `first` below SPAN. Where a group holds whole spans all lanes
  // read one scale; `same_group` says that the run has it from the span before.
  template <int N, int SPAN>
  void read(
      thread Run<N>& run, int token, int span, int first, bool seen, bool same_group) const {
    constexpr int BYTES = N * BITS / 8;
    UNROLL
    for (int i = 0; i < (BYTES + 3) / 4; i++) run.words[i] = 0;
    if (!same_group) run.scale = run.bias = 0;
    if (!seen) return;
    const device C* at = codes + token * WIDTH + (span + first) * BITS / 8;
    if constexpr (BYTES == 8) {
      const uint2 both = *reinterpret_cast<const device uint2*>(at);
      run.words[0] = both.x;
      run.words[1] = both.y;
    } else if constexpr (BYTES == 4) {
      run.words[0] = *reinterpret_cast<const device uint*>(at);
    } else if constexpr (BYTES == 2) {
      run.words[0] = *reinterpret_cast<const device ushort*>(at);
    } else {
      run.words[0] = *at;
    }
    if (same_group) return;
    const int group = token * GROUPS + (GROUP % SPAN == 0 ? span / GROUP : (span + first) / GROUP);
    run.scale = float(scales[group]);
    run.bias = float(biases[group]);
  }
};

// `Format<...>::Rows` is one of the two; BITS 0 stands for numbers as they are.
template <int BITS, int D, typename C, typename S>
struct Format {
  typedef StoredCodes<BITS, D, C, S> Rows;
};
template <int D, typename C, typename S>
struct Format<0, D, C, S> {
  typedef StoredNumbers<D, C, S> Rows;
};

// Vectors of D numbers in threadgroup memory.
template <int D, typename T>
struct Tile {
  template <int N>
  using Run = PlainRun<T, N>;
  const threadgroup T* numbers;

  template <int SPAN>
  static constexpr int spans() { return 1; }

  template <int N, int SPAN>
  void read(thread Run<N>& run, int token, int span, int first, bool, bool) const {
    constexpr int WIDE = Run<N>::WIDE;
    const threadgroup T* at = numbers + token * D + span + first;
    UNROLL
    for (int i = 0; i < N / WIDE; i++) {
      run.parts[i] = reinterpret_cast<const threadgroup vec<T, WIDE>*>(at)[i];
    }
  }
};
