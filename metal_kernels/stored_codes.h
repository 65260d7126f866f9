// Keys and values in codes of 8 or 4 bits, for kernels with a plane of them.

// Numbers that share a scale: the largest multiple of 8 up to 64 that divides the vector.
constexpr int group_size(int D) {
  for (int group = 64; group > 8; group -= 8) {
    if (D % group == 0) return group;
  }
  return 8;
}

// N consecutive codes in words of 32 bits or one shorter word; they share a scale and a bias.
template <int BITS, int N>
struct CodeRun {
  uint words[(N * BITS + 31) / 32];
  float scale;
  float bias;

  float code(int i) const thread {
    const uint word = words[i * BITS / 32] >> (i * BITS % 32);
    return float(word & ((1u << BITS) - 1));
  }

  float at(int i) const thread { return code(i) * scale + bias; }
};

// Vectors of D codes of BITS bits, as StoredNumbers; FIRST begins a group.
template <int BITS, int D, int FIRST, typename C, typename S>
struct StoredCodes {
  template <int N>
  using Run = CodeRun<BITS, N>;
  static constant constexpr int GROUP = group_size(D);
  static constant constexpr int WIDTH = D * BITS / 8;
  static constant constexpr int GROUPS = D / GROUP;
  static constant constexpr int FIRST_CODE = FIRST * BITS / 8;
  static constant constexpr int FIRST_GROUP = FIRST / GROUP;
  // Spans of keys and pairs of spans of values are groups: codes are multiplied as they are.
  static constant constexpr bool RAW = GROUP == 64;
  const device C* codes;
  const device S* groups;  // of each a scale and a bias

  template <int SPAN>
  static constexpr int spans() { return GROUP % SPAN == 0 ? GROUP / SPAN : 1; }

  // `span` is a multiple of SPAN, and `first` below SPAN. Where a group holds whole spans all lanes
  // read one scale; `same_group` says that the run has it from the span before.
  template <int N, int SPAN>
  void read(
      thread Run<N>& run, int token, int span, int first, bool seen, bool same_group) const thread {
    read_codes<N, SPAN>(run, token, span, first, seen);
    if (same_group) return;
    const int group = GROUP % SPAN == 0 ? span / GROUP : (span + first) / GROUP;
    const float2 both = scale_and_bias(token, group, seen);
    run.scale = both.x;
    run.bias = both.y;
  }

  float2 scale_and_bias(int token, int group, bool seen) const thread {
    if (!seen) return float2(0.0f, 0.0f);
    const vec<S, 2> both =
        reinterpret_cast<const device vec<S, 2>*>(groups)[token * GROUPS + group];
    return float2(float(both.x), float(both.y));
  }

  // The codes alone.
  template <int N, int SPAN>
  void read_codes(thread Run<N>& run, int token, int span, int first, bool seen) const thread {
    constexpr int BYTES = N * BITS / 8;
    UNROLL
    for (int i = 0; i < (BYTES + 3) / 4; i++) run.words[i] = 0;
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
  }
};

template <int BITS, int D, int FIRST, typename C, typename S>
struct Format {
  typedef StoredCodes<BITS, D, FIRST, C, S> Rows;
};
