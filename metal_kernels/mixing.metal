// The weights of a connection between residual streams, from their logits. A token has N * N lanes
// of a SIMD group side by side: lane i * N + j has the number of row i and column j of its matrix.
//
// Partners of a lane are always of its own token. Registers of a lane: about 6.
using namespace metal;

// The sum over lanes that differ in the bits of a place: STEP 1: a row; STEP N: a column.
template <int N, int STEP>
METAL_FUNC float sum_along(float value) {
#pragma clang loop unroll(full)
  for (ushort mask = STEP; mask < N * STEP; mask *= 2) value += simd_shuffle_xor(value, mask);
  return value;
}

METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// logits: (T, N + N + N * N); read, write: (T, N); matrix: (T, N, N), columns first unless LIMITED.
// eps, limit: see mixing.py.
template <int N, int ROUNDS, bool LIMITED, typename L>
METAL_FUNC void mixing(
    L logits, float eps, float limit, device float* read, device float* write,
    device float* matrix, uint lane) {
  const uint token = lane / (N * N);
  const uint place = lane % (N * N);
  L own = logits + token * (N * (N + 2));
  if (place < N) read[token * N + place] = sigmoid(own[place]) + (LIMITED ? 0.0f : eps);
  if (place >= N && place < 2 * N) write[token * N + place - N] = 2.0f * sigmoid(own[place]);

  const float given = own[2 * N + place];
  const float logit = LIMITED ? clamp(given, -limit, limit) : given;
  float peak = logit;
#pragma clang loop unroll(full)
  for (ushort mask = 1; mask < N; mask *= 2) peak = max(peak, simd_shuffle_xor(peak, mask));
  float value = precise::exp(logit - peak);
  value = LIMITED ? value / (sum_along<N, 1>(value) + eps) : value / sum_along<N, 1>(value) + eps;
  value /= sum_along<N, N>(value) + eps;
  for (int round = 1; round < ROUNDS; round++) {
    value /= sum_along<N, 1>(value) + eps;
    value /= sum_along<N, N>(value) + eps;
  }
  const uint written = LIMITED ? place : place % N * N + place / N;
  matrix[token * (N * N) + written] = value;
}
