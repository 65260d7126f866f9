// Forbids tokens by a bit mask, one bit a token: what is not allowed becomes -inf.
using namespace metal;

// One thread a token; the grid is as wide as the vocabulary and as high as there are rows.
template <typename T, typename Logits, typename Mask, typename Output>
void bitmask(Logits logits, Mask mask, Output output, uint2 place, uint vocab_size, uint num_words) {
  const uint id = place.x;
  const uint word = mask[place.y * num_words + id / 32];
  const ulong at = ulong(place.y) * vocab_size + id;
  output[at] = ((word >> (id % 32)) & 1u) != 0 ? logits[at] : T(-INFINITY);
}
