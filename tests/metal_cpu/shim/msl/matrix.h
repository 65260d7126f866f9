// 8 x 8 matrices of a SIMD-group. A lane holds two elements, where MLX's kernels expect them. Apple's
// type is as wide as the matrix, and so is this one where nothing runs: what takes the elements of a
// lane for a vector of two is refused.
#pragma once

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "the only size");
#ifdef MSL_LINT
  typedef vec<T, 64> Elements;
#else
  typedef vec<T, 2> Elements;
#endif
  Elements elements;

  simdgroup_matrix() = default;
  MSL_INLINE explicit simdgroup_matrix(T diagonal) {
    int row, column;
    place(row, column);
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }

  MSL_INLINE Elements& thread_elements() { return elements; }
  MSL_INLINE Elements thread_elements() const { return elements; }

  // Row and first of the two columns of the running lane.
  static MSL_INLINE void place(int& row, int& column) {
    int lane = msl_lane(), quad = lane / 4;
    row = (quad & 4) + (lane / 2) % 4;
    column = (quad & 2) * 2 + (lane % 2) * 2;
  }
  static MSL_INLINE int lane_of(int row, int column) {
    return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows, int Columns>
MSL_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.elements[0] = matrix.elements[1] = value;
  return matrix;
}

template <class T, class P>
MSL_INLINE void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& matrix, P from, ulong per_row = 8, ulong2 origin = ulong2{0, 0},
    bool transposed = false, MSL_AT) {
  ::msl::show(0, "simdgroup_load", at);
  int row, column;
  matrix.place(row, column);
  for (int i = 0; i < 2; i++) {
    ulong y = transposed ? column + i : row, x = transposed ? row : column + i;
    matrix.elements[i] = (T)from[(origin.y + y) * per_row + origin.x + x];
  }
}

template <class T, class P>
MSL_INLINE void simdgroup_store(
    const simdgroup_matrix<T, 8, 8>& matrix, P to, ulong per_row = 8, ulong2 origin = ulong2{0, 0},
    bool transposed = false, MSL_AT) {
  ::msl::show(0, "simdgroup_store", at);
  int row, column;
  matrix.place(row, column);
  for (int i = 0; i < 2; i++) {
    ulong y = transposed ? column + i : row, x = transposed ? row : column + i;
    to[(origin.y + y) * per_row + origin.x + x] = matrix.elements[i];
  }
}

template <class D, class A, class B, class C>
MSL_HIDDEN void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& result, const simdgroup_matrix<A, 8, 8>& a,
    const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c, MSL_AT) {
  typedef ::msl::Vector<float, 4> Shown; // two elements of a, two of b
  Shown mine = {(float)a.elements[0], (float)a.elements[1], (float)b.elements[0],
                (float)b.elements[1]};
  auto* all = ::msl::show(mine, "simdgroup_multiply_accumulate", at);
  int row, column;
  result.place(row, column);
  float left = (float)c.elements[0], right = (float)c.elements[1];
  for (int k = 0; k < 8; k++) {
    float factor = ::msl::slot<Shown>(all, result.lane_of(row, k))[k & 1];
    Shown other = ::msl::slot<Shown>(all, result.lane_of(k, column));
    left += factor * other[2];
    right += factor * other[3];
  }
  result.elements[0] = (D)left;
  result.elements[1] = (D)right;
}

template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& result, const simdgroup_matrix<A, 8, 8>& a,
    const simdgroup_matrix<B, 8, 8>& b, MSL_AT) {
  auto zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(result, a, b, zero, at);
}

} // namespace metal
