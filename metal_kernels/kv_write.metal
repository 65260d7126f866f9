// From the fused QKV row to rotated queries and stored keys and values, one SIMD-group a head.
//
// A head's numbers lie in threadgroup memory as float32 from the first step to the last and are
// rounded once, when they are written.
using namespace metal;

constant constexpr uint HEADS_AT_ONCE = 8;  // SIMD-groups of a threadgroup

// RMS norm: y = x / rms(x) * weight; WEIGHTED false: without the weight.
template <uint D, bool WEIGHTED>
void normalise(threadgroup float* x, const device float* weight, float eps, uint lane) {
  float squares = 0.0f;
  for (uint i = lane; i < D; i += 32) {
    squares += x[i] * x[i];
  }
  const float factor = precise::rsqrt(simd_sum(squares) / float(D) + eps);
  for (uint i = lane; i < D; i += 32) {
    x[i] = WEIGHTED ? x[i] * factor * weight[i] : x[i] * factor;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Pairs (i, i + dims / 2), or (2 i, 2 i + 1) where traditional, rotate by position * frequency[i].
template <uint DIMS, bool TRADITIONAL>
void rotate_pairs(
    threadgroup float* x, const device float* frequencies, float position, float magnitude,
    uint lane) {
  for (uint i = lane; i < DIMS / 2; i += 32) {
    const float angle = position * frequencies[i];
    const float cosine = precise::cos(angle) * magnitude, sine = precise::sin(angle) * magnitude;
    const uint a = TRADITIONAL ? 2 * i : i;
    const uint b = TRADITIONAL ? 2 * i + 1 : i + DIMS / 2;
    const float first = x[a], second = x[b];
    x[a] = first * cosine - second * sine;
    x[b] = second * cosine + first * sine;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// x H times a scale, H a Hadamard matrix: of order M (its signs are given) times one of order D / M,
// a power of two.
template <uint D, uint M>
void spread(threadgroup float* x, const device float* signs, float scale, uint lane) {
  constexpr uint N = D / M;
  for (uint width = 1; width < N; width *= 2) {
    for (uint i = lane; i < D / 2; i += 32) {
      const uint a = i / width * 2 * width + i % width;
      const float first = x[a], second = x[a + width];
      x[a] = first + second;
      x[a + width] = first - second;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  float sums[(D + 31) / 32];
  for (uint part = 0; part < (D + 31) / 32; part++) {
    const uint to = min(part * 32 + lane, D - 1);
    float sum = x[to % N] * signs[to / N];
    for (uint k = 1; k < M; k++) {
      sum += x[k * N + to % N] * signs[k * M + to / N];
    }
    sums[part] = sum * scale;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint part = 0; part < (D + 31) / 32; part++) {
    if (part * 32 + lane < D) {
      x[part * 32 + lane] = sums[part];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The numbers of a head in the order in which a vector of key and value has them: those that rotate,
// ROTATED of them in pairs (i, i + D / 2) from i = 0 on, and then the others. With AFTER numbers
// that come first moved behind them all.
template <uint D, uint ROTATED, uint AFTER>
void lay_out(threadgroup float* x, uint lane) {
  constexpr uint HALF = D / 2, PAIRS = ROTATED / 2, REST = HALF - PAIRS;
  float moved[D / 32];
  for (uint part = 0; part < D / 32; part++) {
    const uint to = (part * 32 + lane + AFTER) % D;
    const uint other = to - min(to, ROTATED);
    const uint unrotated = PAIRS + other + (other < REST ? 0 : PAIRS);
    moved[part] = x[to >= ROTATED ? unrotated : to + (to < PAIRS ? 0 : REST)];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint part = 0; part < D / 32; part++) {
    x[part * 32 + lane] = moved[part];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// COUNT numbers of vectors of WIDTH, from FIRST on, stored as they are, in the activation dtype.
template <uint WIDTH, uint FIRST, uint COUNT, typename T>
struct Plain {
  device T* numbers;

  void write(threadgroup const float* x, uint vector, uint lane) thread {
    for (uint i = lane; i < COUNT; i += 32) {
      numbers[ulong(vector) * WIDTH + FIRST + i] = T(x[i]);
    }
  }
};

// A float16 scale or bias of more would be infinite, and the whole group lost.
METAL_FUNC float in_float16(float x) { return clamp(x, -65504.0f, 65504.0f); }

// As `Plain`, in codes of 8 or 4 bits; GROUP numbers share a float16 scale and a float16 bias.
template <uint WIDTH, uint FIRST, uint COUNT, uint GROUP, uint BITS>
struct Affine {
  device uint8_t* codes;
  device half* groups;  // of each a scale and a bias

  void write(threadgroup const float* x, uint vector, uint lane) thread {
    constexpr uint PER_BYTE = 8 / BITS, BYTES = GROUP / PER_BYTE;
    const float levels = float((1 << BITS) - 1);
    for (uint group = 0; group < COUNT / GROUP; group++) {
      threadgroup const float* numbers = x + group * GROUP;
      float low = INFINITY, high = -INFINITY;
      for (uint i = lane; i < GROUP; i += 32) {
        low = min(low, in_float16(numbers[i]));
        high = max(high, in_float16(numbers[i]));
      }
      low = simd_min(low);
      high = simd_max(high);
      const half scale = half((high - low) / levels), bias = half(low);
      const float step = max(float(scale), 1e-8f);  // of a constant group all codes are 0
      const uint place = vector * (WIDTH / GROUP) + FIRST / GROUP + group;
      if (lane == 0) {
        reinterpret_cast<device half2*>(groups)[place] = half2(scale, bias);
      }
      for (uint i = lane; i < BYTES; i += 32) {
        uint byte = 0;
        for (uint part = 0; part < PER_BYTE; part++) {
          const float level = rint((numbers[i * PER_BYTE + part] - float(bias)) / step);
          byte |= uint(clamp(level, 0.0f, levels)) << (part * BITS);
        }
        codes[ulong(place) * BYTES + i] = uint8_t(byte);
      }
    }
  }
};

// Where what is stored of a token goes: among that of the step's tokens.
struct ByToken {
  uint place(uint token, uint head, uint heads) const thread { return token * heads + head; }
};

// One head of one token: vector `vector` of qkv: its heads are queries, then keys, then values.
// JOINED: keys and values go to the same place, a token's keys before its values.
// JOINT: numbers of a key that rotate, where they are stored behind its value in one vector; else 0.
// constants: epsilon of the norm, magnitude of what rotates, scale of the Hadamard transform; then,
// each only where it is used, weights (QUERY_HEADS + KV_HEADS, D), DIMS / 2 frequencies and M * M
// signs.
template <
    typename T, uint D, uint QUERY_HEADS, uint KV_HEADS, bool NORM, uint DIMS, bool TRADITIONAL,
    bool ROTATE, bool ROTATE_VALUES, uint M, bool JOINED, bool NORM_VALUES, uint JOINT, typename QKV,
    typename Positions, typename Keys, typename Values, typename Places>
void kv_write(
    threadgroup float* x, QKV qkv, Positions positions, const device float* constants,
    device T* queries, Keys keys, Values values, Places places, uint vector, uint lane) {
  const device float* weight = constants + 3;
  const device float* frequencies = weight + (NORM ? (QUERY_HEADS + KV_HEADS) * D : 0);
  const uint token = vector / (QUERY_HEADS + 2 * KV_HEADS);
  const uint head = vector % (QUERY_HEADS + 2 * KV_HEADS);
  for (uint i = lane; i < D; i += 32) {
    x[i] = float(qkv[ulong(vector) * D + i]);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const bool value = head >= QUERY_HEADS + KV_HEADS;  // the same for all threads of a SIMD group
  if (NORM && !value) {
    normalise<D, true>(x, weight + head * D, constants[0], lane);
  }
  if (NORM_VALUES && value) {
    normalise<D, false>(x, weight, constants[0], lane);
  }
  if (DIMS > 0 && !value) {
    rotate_pairs<DIMS, TRADITIONAL>(x, frequencies, float(positions[token]), constants[1], lane);
  }
  if constexpr (JOINT > 0) {
    if (head < QUERY_HEADS) {
      lay_out<D, JOINT, JOINT>(x, lane);
    } else {
      lay_out<D, JOINT, 0>(x, lane);
    }
  }
  constexpr uint BLOCK = JOINT > 0 ? JOINT : D;
  if (value ? ROTATE_VALUES : ROTATE) {
    for (uint first = 0; first < D; first += BLOCK) {
      spread<BLOCK, M>(x + first, frequencies + DIMS / 2, constants[2], lane);
    }
  }
  if (head < QUERY_HEADS) {
    Plain<D, 0, D, T>{queries}.write(x, token * QUERY_HEADS + head, lane);
  } else if (value) {
    const uint own = head - QUERY_HEADS - (JOINED ? 0 : KV_HEADS);
    values.write(x, places.place(token, own, JOINED ? 2 * KV_HEADS : KV_HEADS), lane);
  } else {
    const uint own = head - QUERY_HEADS;
    keys.write(x, places.place(token, own, JOINED ? 2 * KV_HEADS : KV_HEADS), lane);
  }
}
