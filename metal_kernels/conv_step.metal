// A causal depthwise convolution over a few tokens, with the inputs that it carries over.
// A thread has one channel of one sequence: it reads every input once, and rounds as MLX does.

// inputs: (B, L, width). GATED: of three thirds, what multiplies before, what multiplies behind, and
// the values; else the first C are the values, and silu follows. weight: (C, K), the oldest first.
template <
    typename T, typename OUT, uint C, uint K, bool GATED, bool BIASED, typename Inputs,
    typename Weight, typename Bias>
void conv_step(
    Inputs inputs, uint width, Weight weight, Bias bias, const device float* before, uint count,
    device OUT* outputs, device float* after, uint channel, uint sequence, uint length) {
  float seen[K], taps[K];
  for (uint i = 0; i < K; i++) {
    taps[i] = float(weight[channel * K + i]);
    seen[i] = 0.0f;
  }
  if (before != nullptr) {
    for (uint i = 0; i + 1 < K; i++) {
      seen[i] = float(T(before[i * C + channel]));
    }
  }
  for (uint t = 0; t < length; t++) {
    const ulong token = ulong(sequence) * length + t;
    if (t >= count) {
      outputs[token * C + channel] = OUT(0.0f);
      continue;
    }
    const ulong number = token * width + channel;
    const float input = float(inputs[number]);
    seen[K - 1] = GATED ? float(T(input * float(inputs[number + 2 * C]))) : input;
    float sum = 0.0f;
    for (uint i = 0; i < K; i++) {
      sum += seen[i] * taps[i];
    }
    if (BIASED) {
      sum = float(T(sum)) + float(bias[channel]);
    }
    const float mixed = float(T(sum));
    outputs[token * C + channel] = OUT(GATED ? float(inputs[number + C]) * mixed : silu(mixed));
    for (uint i = 0; i + 1 < K; i++) {
      seen[i] = seen[i + 1];
    }
  }
  for (uint i = 0; i + 1 < K; i++) {
    after[(ulong(sequence) * (K - 1) + i) * C + channel] = seen[i];
  }
}
