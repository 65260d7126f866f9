// Gated activations of a number of the gate and one of up, in float32.
using namespace metal;

// y * sigmoid(z); where exp is infinite it is 0.
METAL_FUNC float times_sigmoid(float y, float z) { return y / (1.0f + precise::exp(-z)); }

struct Silu {
  float operator()(float gate, float up) const thread { return times_sigmoid(gate, gate) * up; }
};

// 0.5 (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3).
struct GeluTanh {
  float operator()(float gate, float up) const thread {
    const float slope = 1.5957691216057308f;
    return times_sigmoid(gate, slope * gate * (1.0f + 0.044715f * gate * gate)) * up;
  }
};

// GLM 5.3 Flash, DeepSeek V4: SiLU of the gate clamped from above, up clamped from both sides.
struct ClippedSwiglu {
  float limit;

  float operator()(float gate, float up) const thread {
    const float low = min(gate, limit);
    return times_sigmoid(low, low) * clamp(up, -limit, limit);
  }
};

// gpt-oss: the gate clamped from above, up from both sides, and (up + 1) in place of up.
struct ClampedSwiglu {
  float alpha;
  float limit;

  float operator()(float gate, float up) const thread {
    const float low = min(gate, limit);
    return times_sigmoid(low, alpha * low) * (clamp(up, -limit, limit) + 1.0f);
  }
};
