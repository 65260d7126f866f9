// From the fused QKV row to rotated queries and tails, as kv_write.metal, which comes before.

// What is stored goes to the tails, (slots, heads, ring): each token to a slot and a place there.
struct InTails {
  const device int* places;  // slot * ring + offset of each token
  uint ring;

  uint place(uint token, uint head, uint heads) const thread {
    const uint at = uint(places[token]);
    return (at / ring * heads + head) * ring + at % ring;
  }
};

// Vectors of the tails that no token of the step replaces, as they were: COPIED tokens of one head
// of a slot for each SIMD group. `old` and `made` in words of 4 bytes.
constant constexpr uint COPIED = 8;

METAL_FUNC void copy_tails(
    const device uint* old, device uint* made, const device int* taken, uint words, uint heads,
    uint ring, uint part, uint lane) {
  const uint parts = ring / COPIED;  // of a head
  const uint first = part % parts * COPIED;
  const uint head = part / parts;  // of all slots
  const ulong begin = (ulong(head) * ring + first) * words;
  const device int* marks = taken + head / heads * ring + first;
  for (uint i = lane; i < COPIED * words; i += 32) {
    if (marks[i / words] == 0) {
      made[begin + i] = old[begin + i];
    }
  }
}
