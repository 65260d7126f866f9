// From router logits to the experts of each token and their weights, one SIMD group a token.
//
// A lane holds the ranks of every 32nd expert in registers; in each of K rounds the best that is
// left is taken, of equal ones the first. Registers of a lane: E / 32 ranks and about 12 more.
using namespace metal;

constant constexpr int ROUTERS = 4;  // SIMD groups of a threadgroup

METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

template <bool SIGMOID>
METAL_FUNC float rank_of(float logit, float bias) {
  return SIGMOID ? sigmoid(logit) + bias : logit;
}

// logits: of E experts; bias: BIASED: (E,), joins the ranks alone; eps, factor: see routing.py.
template <int E, int K, bool SIGMOID, bool NORMALISED, bool BIASED, typename L, typename B,
          typename T>
METAL_FUNC void route(
    L logits, B bias, float eps, float factor, device T* weights, device uint* experts,
    uint token, uint lane) {
  constexpr int OWN = (E + 31) / 32;
  float ranks[OWN];
  float peak = -INFINITY;
#pragma clang loop unroll(full)
  for (int i = 0; i < OWN; i++) {
    const int expert = i * 32 + int(lane);
    const bool real = expert < E;
    const float logit = real ? float(logits[token * E + expert]) : -INFINITY;
    ranks[i] = real ? rank_of<SIGMOID>(logit, BIASED ? float(bias[expert]) : 0.0f) : -INFINITY;
    peak = max(peak, logit);
  }
  peak = simd_max(peak);
  float total = 0.0f;
  if (!SIGMOID && !NORMALISED) {
#pragma clang loop unroll(full)
    for (int i = 0; i < OWN; i++) total += precise::exp(ranks[i] - peak);
    total = simd_sum(total);
  }

  uint mine = 0;  // of lane j the j-th best
  for (uint round = 0; round < K; round++) {
    float best = -INFINITY;
    uint place = E - 1;  // where nothing is above -inf: what is written is always an expert
#pragma clang loop unroll(full)
    for (int i = 0; i < OWN; i++) {
      if (ranks[i] > best) {
        best = ranks[i];
        place = i * 32 + lane;
      }
    }
    const float top = simd_max(best);
    const uint first = simd_min(best == top ? place : uint(E - 1));
#pragma clang loop unroll(full)
    for (int i = 0; i < OWN; i++) {
      if (i * 32 + lane == first) ranks[i] = -INFINITY;
    }
    if (lane == round) mine = first;
  }

  const float logit = float(logits[token * E + mine]);
  float weight = SIGMOID ? sigmoid(logit) : precise::exp(logit - peak);
  if (NORMALISED) {
    weight /= simd_sum(lane < K ? weight : 0.0f) + eps;
  } else if (!SIGMOID) {
    weight /= total;
  }
  if (lane < K) {
    weights[token * K + lane] = T(weight * factor);
    experts[token * K + lane] = mine;
  }
}
