// A few tokens of the gated delta recurrence: each number of a state is read and written once.
// A team of lanes has one row of a head's matrix, for one number of its values.

// of the sum of squares of queries and keys
constant constexpr float DELTA_EPS = 1e-6f;

// mixed: (B, L, 2 KEYS DK + HEADS DV), queries, keys and values behind their convolution.
// strengths and times: rows of two projections, each from the first of its numbers on.
// EACH: every number of a key decays by itself.
// bound: of the logarithm of a decay, below 0; 0: there is none.
// strongest: the limit of strengths.
template <
    typename T, uint KEYS, uint DK, uint HEADS, uint DV, uint TEAM, bool EACH, typename Mixed,
    typename Projected, typename Times, typename Rates>
void delta_step(
    Mixed mixed, Projected strengths, uint strengths_width, Times times, uint times_width,
    Rates rates, Rates biases, const device float* before, uint count, device T* outputs,
    device float* after, uint value, uint head, uint sequence, uint length, uint lane,
    float bound, float strongest) {
  using Own = Share<DK, TEAM>;
  constexpr uint COUNT = Own::COUNT, WIDTH = 2 * KEYS * DK + HEADS * DV;
  float state[COUNT], keys[COUNT], queries[COUNT], decay[COUNT];
  const ulong row = (ulong(sequence) * HEADS + head) * DV + value;
  for (uint i = 0; i < COUNT; i++) {
    state[i] = 0.0f;
  }
  if (before != nullptr) {
    Own::read(state, before + (ulong(head) * DV + value) * DK, lane);
  }
  const uint query = head / (HEADS / KEYS) * DK;
  for (uint t = 0; t < length; t++) {
    const ulong token = ulong(sequence) * length + t;
    const ulong found = (token * HEADS + head) * DV + value;
    if (t >= count) {
      if (lane == 0) {
        outputs[found] = T(0.0f);
      }
      continue;
    }
    float query_squares = 0.0f, key_squares = 0.0f;
    for (uint i = 0; i < COUNT; i++) {
      const ulong number = token * WIDTH + query + Own::place(i, lane);
      queries[i] = float(mixed[number]);
      keys[i] = float(mixed[number + KEYS * DK]);
      query_squares += queries[i] * queries[i];
      key_squares += keys[i] * keys[i];
    }
    const float query_scale =
        precise::rsqrt(team_sum<TEAM>(query_squares) + DELTA_EPS) * precise::rsqrt(float(DK));
    const float key_scale = precise::rsqrt(team_sum<TEAM>(key_squares) + DELTA_EPS);
    const float strength =
        strongest / (1.0f + precise::exp(-float(strengths[token * strengths_width + head])));
    for (uint i = 0; i < COUNT; i++) {
      const uint number = EACH ? head * DK + Own::place(i, lane) : head;
      if (EACH || i == 0) {
        const float time = float(times[token * times_width + number]) + float(biases[number]);
        const float rate = float(rates[number]);
        decay[i] = precise::exp(
            bound == 0.0f ? -rate * softplus(time) : bound / (1.0f + precise::exp(-rate * time)));
      } else {
        decay[i] = decay[0];
      }
    }
    float known = 0.0f;  // what the state says of this key
    for (uint i = 0; i < COUNT; i++) {
      keys[i] *= key_scale;
      state[i] *= decay[i];
      known += state[i] * keys[i];
    }
    const float given = float(mixed[token * WIDTH + 2 * KEYS * DK + head * DV + value]);
    const float change = strength * (given - team_sum<TEAM>(known));
    float output = 0.0f;
    for (uint i = 0; i < COUNT; i++) {
      state[i] += change * keys[i];
      output += state[i] * queries[i];
    }
    output = team_sum<TEAM>(output) * query_scale;
    if (lane == 0) {
      outputs[found] = T(output);
    }
  }
  Own::write(state, after + row * DK, lane);
}
