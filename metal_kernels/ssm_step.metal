// A few tokens of the Mamba-2 recurrence: each number of a state is read and written once.
// A team of lanes has one row of a head's state, for one number of its inputs.

// mixed: (B, L, HEADS P + 2 GROUPS N), inputs, keys and queries behind their convolution.
// times: rows of a projection, from the first of its time steps on.
// limits: the smallest and the largest time step.
template <
    uint HEADS, uint P, uint GROUPS, uint N, uint TEAM, typename Mixed, typename Times,
    typename Rates>
void ssm_step(
    Mixed mixed, Times times, uint times_width, Rates rates, Rates biases, Rates skips,
    float2 limits, const device float* before, uint count, device float* outputs,
    device float* after, uint value, uint head, uint sequence, uint length, uint lane) {
  using Own = Share<N, TEAM>;
  constexpr uint COUNT = Own::COUNT, WIDTH = HEADS * P + 2 * GROUPS * N;
  float state[COUNT];
  const ulong row = (ulong(sequence) * HEADS + head) * P + value;
  for (uint i = 0; i < COUNT; i++) {
    state[i] = 0.0f;
  }
  if (before != nullptr) {
    Own::read(state, before + (ulong(head) * P + value) * N, lane);
  }
  const uint key = HEADS * P + head / (HEADS / GROUPS) * N;
  for (uint t = 0; t < length; t++) {
    const ulong token = ulong(sequence) * length + t;
    const ulong found = (token * HEADS + head) * P + value;
    if (t >= count) {
      if (lane == 0) {
        outputs[found] = 0.0f;
      }
      continue;
    }
    const float time = clamp(
        softplus(float(times[token * times_width + head]) + float(biases[head])), limits.x,
        limits.y);
    const float decay = precise::exp(-float(rates[head]) * time);
    const float input = float(mixed[token * WIDTH + head * P + value]);
    float output = 0.0f;
    for (uint i = 0; i < COUNT; i++) {
      const ulong number = token * WIDTH + key + Own::place(i, lane);
      state[i] = decay * state[i] + time * input * float(mixed[number]);
      output += state[i] * float(mixed[number + GROUPS * N]);
    }
    output = team_sum<TEAM>(output);
    if (lane == 0) {
      outputs[found] = output + float(skips[head]) * input;
    }
  }
  Own::write(state, after + row * N, lane);
}
