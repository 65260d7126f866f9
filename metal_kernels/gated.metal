// Gated activations of gate and up projections that lie side by side, rounded once.

// One thread a number; the grid is as wide as a half and as high as there are rows.
template <typename T, typename Activation, typename GateUp>
void gated(Activation activation, GateUp gate_up, device T* outputs, uint2 place, uint width) {
  const ulong gate = ulong(place.y) * 2 * width + place.x;
  const float found = activation(float(gate_up[gate]), float(gate_up[gate + width]));
  outputs[ulong(place.y) * width + place.x] = T(found);
}
