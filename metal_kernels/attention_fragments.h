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

// A lane's two numbers of a fragment, and no more: a matrix is made of them for a product. A compiler
// may spill matrices that stay for a whole loop.
struct Pair {
  float2 numbers;
};

// Sums that stay for a whole loop: matrices, or pairs.
template <bool PAIRS>
struct Sums {
  typedef Fragment Type;
};
template <>
struct Sums<true> {
  typedef Pair Type;
};

METAL_FUNC float number(const thread Fragment& sum, int e) { return sum.thread_elements()[e]; }
METAL_FUNC float number(const thread Pair& sum, int e) { return sum.numbers[e]; }

METAL_FUNC void set_number(thread Fragment& sum, int e, float x) { sum.thread_elements()[e] = x; }
METAL_FUNC void set_number(thread Pair& sum, int e, float x) { sum.numbers[e] = x; }

METAL_FUNC void multiply_add(thread Fragment& sum, Fragment a, Fragment b) {
  simdgroup_multiply_accumulate(sum, a, b, sum);
}

METAL_FUNC void multiply_add(thread Pair& sum, Fragment a, Fragment b) {
  Fragment whole;
  whole.thread_elements()[0] = sum.numbers[0];
  whole.thread_elements()[1] = sum.numbers[1];
  simdgroup_multiply_accumulate(whole, a, b, whole);
  sum.numbers[0] = whole.thread_elements()[0];
  sum.numbers[1] = whole.thread_elements()[1];
}

// Before loops over arrays that must stay in registers.
#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int BLOCK = 16;  // tokens that are handled together; a part of one page

struct Place {
  int row;
  int column;  // even
};

METAL_FUNC Place place_of(uint lane) {
  const int quad = lane / 4;
  return {int((quad & 4) + (lane / 2) % 4), int((quad & 2) * 2 + (lane % 2) * 2)};
}

// Numbers that a lane reads of a key, of D: it holds place `row` of each chunk of 8, and chunks
// go together so that these are consecutive.
constexpr int key_run(int D) { return D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2; }

// The number of a key at place k of chunk c.
template <int D>
METAL_FUNC int key_index(int c, int k) {
  constexpr int RUN = key_run(D);
  return c / RUN * 8 * RUN + k * RUN + c % RUN;
}

// Numbers that a lane reads of a value: it holds two places, so half a run of chunks.
constexpr int value_run(int D) { return D % 32 == 0 ? 8 : 4; }

// The number of a value that stands at an even place n of chunk c; place n + 1 follows it by half
// a run.
template <int D>
METAL_FUNC int value_index(int c, int n) {
  constexpr int HALF = value_run(D) / 2;
  return c / HALF * 8 * HALF + n * HALF + c % HALF;
}

// N consecutive numbers, as they are stored.
template <typename T, int N>
struct PlainRun {
  static constant constexpr int WIDE = N < 4 ? N : 4;
  vec<T, WIDE> parts[N / WIDE];

  float at(int i) const thread { return float(parts[i / WIDE][i % WIDE]); }
};

// Vectors of D numbers as they are, one after the other, `codes` at the first; those that are read
// begin at number FIRST of each.
template <int D, int FIRST, typename C, typename S>
struct StoredNumbers {
  template <int N>
  using Run = PlainRun<C, N>;
  static constant constexpr int WIDTH = D;
  static constant constexpr int GROUPS = 0;
  static constant constexpr int FIRST_CODE = FIRST;
  static constant constexpr int FIRST_GROUP = 0;
  static constant constexpr bool RAW = false;
  const device C* codes;
  const device S* groups;

  // How many spans of SPAN numbers share a scale: here none has any.
  template <int SPAN>
  static constexpr int spans() { return 1; }

  // N numbers of a token from `span + first` on. Zeros where nothing may be seen: what lies there
  // may be anything.
  template <int N, int SPAN>
  void read(thread Run<N>& run, int token, int span, int first, bool seen, bool) const thread {
    constexpr int WIDE = Run<N>::WIDE;
    const device C* at = codes + token * WIDTH + span + first;
    UNROLL
    for (int i = 0; i < N / WIDE; i++) {
      run.parts[i] = seen ? reinterpret_cast<const device vec<C, WIDE>*>(at)[i] : vec<C, WIDE>(C(0));
    }
  }
};

// `Format<...>::Rows` is how vectors are read; BITS 0 stands for numbers as they are.
template <int BITS, int D, int FIRST, typename C, typename S>
struct Format;
template <int D, int FIRST, typename C, typename S>
struct Format<0, D, FIRST, C, S> {
  typedef StoredNumbers<D, FIRST, C, S> Rows;
};
