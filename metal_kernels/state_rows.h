// States of recurrent layers: rows of four arrays, and teams of lanes that share a row.
using namespace metal;

// What the plan says of a sequence.
struct Place {
  int source;
  int row;  // -1: the state is zeros
  uint count;  // tokens that count
};

METAL_FUNC Place place_of(const device int* plan, uint sequence) {
  const device int* own = plan + 3 * sequence;
  return Place{own[0], own[1], uint(own[2])};
}

// Where a sequence's state of `size` numbers lies in one of the four arrays; null: it is zeros.
METAL_FUNC const device float* state_at(
    Place place, ulong size, const device float* a, const device float* b, const device float* c,
    const device float* d) {
  if (place.row < 0) {
    return static_cast<const device float*>(nullptr);
  }
  const int source = place.source;
  return (source == 0 ? a : source == 1 ? b : source == 2 ? c : d) + ulong(place.row) * size;
}

// log(1 + exp(x)), which is linear where exp would overflow.
METAL_FUNC float softplus(float x) {
  return max(x, 0.0f) + precise::log(1.0f + precise::exp(-abs(x)));
}

METAL_FUNC float silu(float x) { return x / (1.0f + precise::exp(-x)); }

// The sum over the lanes of a team: TEAM neighbours, a power of two.
template <uint TEAM>
METAL_FUNC float team_sum(float x) {
  for (ushort step = 1; step < TEAM; step *= 2) {
    x += simd_shuffle_xor(x, step);
  }
  return x;
}

// The share of a lane in a row of WIDTH numbers: four neighbours, then four further on.
template <uint WIDTH, uint TEAM>
struct Share {
  static constant constexpr uint COUNT = WIDTH / TEAM;

  static uint place(uint i, uint lane) { return (i / 4) * 4 * TEAM + lane * 4 + i % 4; }

  // Rows of states begin at multiples of four numbers.
  static void read(thread float* own, const device float* row, uint lane) {
    for (uint i = 0; i < COUNT; i += 4) {
      const float4 four = *reinterpret_cast<const device float4*>(row + place(i, lane));
      for (uint j = 0; j < 4; j++) {
        own[i + j] = four[j];
      }
    }
  }

  static void write(thread const float* own, device float* row, uint lane) {
    for (uint i = 0; i < COUNT; i += 4) {
      const float4 four = {own[i], own[i + 1], own[i + 2], own[i + 3]};
      *reinterpret_cast<device float4*>(row + place(i, lane)) = four;
    }
  }
};
