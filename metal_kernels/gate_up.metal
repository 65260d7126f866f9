// Products of a few rows with gate and up in one matrix, and the activation of the sums.
//
// A SIMD group has two rows of gate and the same two of up, and walks along them in runs of numbers,
// a run for each lane. Codes are multiplied as they are: a code that stands n bits up in its word is
// 2^n times itself, and what it is multiplied with is 2^-n of itself, both exactly. The scale joins
// once for 8 codes, the bias once for a run. Registers of a lane: 32 for decoded numbers where
// several rows share them, up to 6 for each run, 5 for each row, and about 20 more.

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int LANES = 32, SIMD_GROUPS = 2;
constant constexpr int PART = 8;  // numbers of a run that are decoded at a time
constant constexpr int PAIRS = 2;  // rows of gate that a SIMD group has, and as many of up

// Codes of one run, which lies within one group.
template <int BITS>
struct CodeRun {
  static constant constexpr int PER_WORD = 32 / BITS;
  static constant constexpr int LENGTH = 16;
  uint words[LENGTH / PER_WORD];
  float scale;
  float bias;

  // Code i, times 2^place(i).
  float raised(int i) const thread {
    return float(words[i / PER_WORD] & (((1u << BITS) - 1) << place(i)));
  }

  float scaled(float product) const thread { return product * scale; }

  float biased(float sum, float total) const thread { return sum + bias * total; }

  static constexpr int place(int i) { return i % PER_WORD * BITS; }
};

// Rows of IN_DIMS codes of BITS bits; each group of GROUP codes has a scale and a bias.
template <int BITS, int GROUP, int IN_DIMS, typename S>
struct Codes {
  typedef CodeRun<BITS> Run;
  static constant constexpr int DIMS = IN_DIMS;
  const device uint* words;
  const device S* scales;
  const device S* biases;

  // The same from a row on.
  Codes from(int row) const thread {
    const ulong group = ulong(row) * (IN_DIMS / GROUP);
    return {words + ulong(row) * (IN_DIMS / Run::PER_WORD), scales + group, biases + group};
  }

  void read(thread Run& run, int row, int first) const thread {
    const int word = row * (IN_DIMS / Run::PER_WORD) + first / Run::PER_WORD;
    UNROLL
    for (int i = 0; i < Run::LENGTH / Run::PER_WORD; i++) run.words[i] = words[word + i];
    const int group = row * (IN_DIMS / GROUP) + first / GROUP;
    run.scale = float(scales[group]);
    run.bias = float(biases[group]);
  }
};

// Numbers of one run, as they are.
template <typename W>
struct NumberRun {
  static constant constexpr int LENGTH = 8;
  W numbers[LENGTH];

  float raised(int i) const thread { return float(numbers[i]); }

  float scaled(float product) const thread { return product; }

  float biased(float sum, float) const thread { return sum; }

  static constexpr int place(int) { return 0; }
};

// Rows of IN_DIMS numbers.
template <int IN_DIMS, typename W>
struct Numbers {
  typedef NumberRun<W> Run;
  static constant constexpr int DIMS = IN_DIMS;
  const device W* numbers;

  // The same from a row on.
  Numbers from(int row) const thread { return {numbers + ulong(row) * IN_DIMS}; }

  void read(thread Run& run, int row, int first) const thread {
    const int at = row * IN_DIMS + first;
    UNROLL
    for (int i = 0; i < Run::LENGTH; i++) run.numbers[i] = numbers[at + i];
  }
};

// PART numbers of a row of x, from `part` of the runs on, with those of each run: into the sums of
// that row. Returns the sum of x.
template <typename Run, typename T>
METAL_FUNC float add_part(
    thread float (&sums)[2 * PAIRS], const thread float (&decoded)[2 * PAIRS][PART],
    const thread Run (&runs)[2 * PAIRS], const device T* x, int part) {
  float lowered[PART];
  float total = 0.0f;
  UNROLL
  for (int k = 0; k < PART; k++) {
    const float number = float(x[k]);
    total += number;
    lowered[k] = number * (1.0f / float(1u << Run::place(part + k)));
  }
  UNROLL
  for (int i = 0; i < 2 * PAIRS; i++) {
    float product = 0.0f;
    UNROLL
    for (int k = 0; k < PART; k++) product += lowered[k] * decoded[i][k];
    sums[i] += runs[i].scaled(product);
  }
  return total;
}

// x: (num_rows, DIMS of the matrix); the matrix: `inner` rows of gate and then `inner` of up;
// outputs: (num_rows, inner). A threadgroup has SIMD_GROUPS * PAIRS numbers of ROWS rows of outputs:
// `place` says which rows, and which numbers.
template <int ROWS, typename Matrix, typename T, typename Activation>
METAL_FUNC void gate_up(
    Activation activation, const device T* x, Matrix matrix, device T* outputs, int num_rows,
    int inner, uint2 place, uint simd_group, uint lane) {
  typedef typename Matrix::Run Run;
  const int first_row = int(place.x) * ROWS;
  const int first_pair = (int(place.y) * SIMD_GROUPS + int(simd_group)) * PAIRS;
  const Matrix gate = matrix.from(first_pair);
  const Matrix up = matrix.from(inner + first_pair);
  float sums[ROWS][2 * PAIRS];
  UNROLL
  for (int row = 0; row < ROWS; row++) {
    UNROLL
    for (int i = 0; i < 2 * PAIRS; i++) sums[row][i] = 0.0f;
  }
  for (int first = int(lane) * Run::LENGTH; first < Matrix::DIMS; first += LANES * Run::LENGTH) {
    Run runs[2 * PAIRS];
    float totals[ROWS];
    UNROLL
    for (int pair = 0; pair < PAIRS; pair++) {
      gate.read(runs[pair], pair, first);
      up.read(runs[PAIRS + pair], pair, first);
    }
    UNROLL
    for (int row = 0; row < ROWS; row++) totals[row] = 0.0f;
    UNROLL
    for (int part = 0; part < Run::LENGTH; part += PART) {
      float decoded[2 * PAIRS][PART];
      UNROLL
      for (int i = 0; i < 2 * PAIRS; i++) {
        UNROLL
        for (int k = 0; k < PART; k++) decoded[i][k] = runs[i].raised(part + k);
      }
      UNROLL
      for (int row = 0; row < ROWS; row++) {
        const int at = min(first_row + row, num_rows - 1);  // what is behind the last is not kept
        const device T* numbers = x + ulong(at) * Matrix::DIMS + first + part;
        totals[row] += add_part(sums[row], decoded, runs, numbers, part);
      }
    }
    UNROLL
    for (int row = 0; row < ROWS; row++) {
      UNROLL
      for (int i = 0; i < 2 * PAIRS; i++) {
        sums[row][i] = runs[i].biased(sums[row][i], totals[row]);
      }
    }
  }
  UNROLL
  for (int row = 0; row < ROWS; row++) {
    UNROLL
    for (int pair = 0; pair < PAIRS; pair++) {
      const float found = activation(simd_sum(sums[row][pair]), simd_sum(sums[row][PAIRS + pair]));
      if (lane == 0 && first_row + row < num_rows) {
        outputs[ulong(first_row + row) * inner + first_pair + pair] = T(found);
      }
    }
  }
}
