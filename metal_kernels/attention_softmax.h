// Softmax over tokens that come in blocks, for rows of queries that live in fragments.
//
// ROWS is the number of fragments of 8 query rows, CHUNKS that of 8 value numbers. A lane holds
// the state of one row of each fragment; four lanes share a row. Scores are in base 2.
//
// Keys and values in codes, where groups of 64 share a scale and a bias, are multiplied as codes:
//   q . (code * scale + bias) = (q . code) * scale + sum(q) * bias,
// once a token and group; and of values scales join the weights, while biases, weighted, are summed
// up for all numbers of a group together. Not one number is dequantised.

constant constexpr float HIDDEN = -3.0e38f;  // the score of what must not be seen
constant constexpr float LOWEST = -1.0e30f;  // a peak before anything was seen

struct ScoreScale {
  float scale;     // times log2(e), unless there is a cap
  float soft_cap;  // 0: none

  float operator()(float score) const thread {
    if (soft_cap == 0.0f) return score * scale;
    return M_LOG2E_F * soft_cap * precise::tanh(score * scale / soft_cap);
  }
};

template <typename P>
METAL_FUNC ScoreScale score_scale(P numbers) {
  return {numbers[1] == 0.0f ? numbers[0] * M_LOG2E_F : numbers[0], numbers[1]};
}

METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

template <int ROWS, int CHUNKS, bool RAW = false, typename Sum = Fragment>
struct RunningSoftmax {
  static constant constexpr int BIASES = RAW ? CHUNKS / 8 : 1;
  Sum outputs[ROWS][CHUNKS];
  float biases[ROWS][BIASES];  // RAW: weighted sums, of this lane's columns
  float peak[ROWS];
  float total[ROWS];  // of this lane's columns; row_sum has all

  void clear() thread {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      peak[r] = LOWEST;
      total[r] = 0;
      UNROLL
      for (int c = 0; c < CHUNKS; c++) {
        set_number(outputs[r][c], 0, 0.0f);
        set_number(outputs[r][c], 1, 0.0f);
      }
      UNROLL
      for (int i = 0; i < BIASES; i++) biases[r][i] = 0;
    }
  }

  // What all numbers of a group have in common joins them; after the last token.
  void add_biases() thread {
    if (!RAW) return;
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      UNROLL
      for (int i = 0; i < BIASES; i++) {
        const float sum = row_sum(biases[r][i]);
        UNROLL
        for (int c = 8 * i; c < 8 * i + 8 && c < CHUNKS; c++) {
          set_number(outputs[r][c], 0, number(outputs[r][c], 0) + sum);
          set_number(outputs[r][c], 1, number(outputs[r][c], 1) + sum);
        }
      }
    }
  }

  // Scores become weights; what was summed so far fades where a higher peak came.
  template <int GROUPS>
  void weigh(thread Fragment (&scores)[ROWS][GROUPS]) thread {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      float top = peak[r];
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        top = max(top, scores[r][g].thread_elements()[0]);
        top = max(top, scores[r][g].thread_elements()[1]);
      }
      top = row_max(top);
      const float fade = fast::exp2(peak[r] - top);
      float sum = 0;
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          const float weight = fast::exp2(scores[r][g].thread_elements()[e] - top);
          scores[r][g].thread_elements()[e] = weight;
          sum += weight;
        }
      }
      peak[r] = top;
      total[r] = total[r] * fade + sum;
      UNROLL
      for (int c = 0; c < CHUNKS; c++) {
        set_number(outputs[r][c], 0, number(outputs[r][c], 0) * fade);
        set_number(outputs[r][c], 1, number(outputs[r][c], 1) * fade);
      }
      UNROLL
      for (int i = 0; i < BIASES; i++) biases[r][i] *= fade;
    }
  }
};

// scores += queries . keys of GROUPS groups of 8 tokens. `seen` of a lane's two tokens of each.
template <int D, int ROWS, int GROUPS, typename Queries, typename Keys>
METAL_FUNC void add_scores(
    thread Fragment (&scores)[ROWS][GROUPS],
    const thread Queries& queries,
    const thread Keys& keys,
    const thread bool (&seen)[GROUPS][2],
    Place at) {
  constexpr int RUN = key_run(D);
  constexpr int SPAN = 8 * RUN;
  UNROLL
  for (int v = 0; v < D / SPAN; v++) {
    typename Keys::template Run<RUN> runs[GROUPS][2];
    Fragment raw[ROWS][GROUPS];
    UNROLL
    for (int g = 0; g < GROUPS; g++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        const int token = 8 * g + at.column + e;
        keys.template read<RUN, SPAN>(
            runs[g][e], token, v * SPAN, at.row * RUN, seen[g][e], false);
      }
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        if constexpr (Keys::RAW) {
          raw[r][g] = Fragment(0);
        } else {
          raw[r][g] = scores[r][g];
        }
      }
    }
    UNROLL
    for (int j = 0; j < RUN; j++) {
      Fragment rows[ROWS];
      UNROLL
      for (int r = 0; r < ROWS; r++) rows[r] = queries.at(r, v * RUN + j);
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        Fragment part;
        UNROLL
        for (int e = 0; e < 2; e++) {
          if constexpr (Keys::RAW) {
            part.thread_elements()[e] = runs[g][e].code(j);
          } else {
            part.thread_elements()[e] = runs[g][e].at(j);
          }
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          simdgroup_multiply_accumulate(raw[r][g], rows[r], part, raw[r][g]);
        }
      }
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        if constexpr (Keys::RAW) {
          UNROLL
          for (int e = 0; e < 2; e++) {
            scores[r][g].thread_elements()[e] +=
                raw[r][g].thread_elements()[e] * runs[g][e].scale +
                queries.sums[r][v] * runs[g][e].bias;
          }
        } else {
          scores[r][g] = raw[r][g];
        }
      }
    }
  }
}

// outputs += weights . values of GROUPS groups of 8 tokens. `seen` of a lane's token of each.
template <int D, int ROWS, int GROUPS, int CHUNKS, typename Sum, typename Values>
METAL_FUNC void add_values(
    thread RunningSoftmax<ROWS, CHUNKS, false, Sum>& state,
    thread Fragment (&weights)[ROWS][GROUPS],
    const thread Values& values,
    const thread bool (&seen)[GROUPS],
    const thread bool (&)[GROUPS][2],
    Place at) {
  constexpr int RUN = value_run(D);
  constexpr int HALF = RUN / 2;
  constexpr int SPAN = 8 * HALF;
  constexpr int SHARED = Values::template spans<SPAN>();
  UNROLL
  for (int g = 0; g < GROUPS; g++) {
    typename Values::template Run<RUN> run;
    UNROLL
    for (int v = 0; v < CHUNKS / HALF; v++) {
      values.template read<RUN, SPAN>(
          run, 8 * g + at.row, v * SPAN, at.column * HALF, seen[g], v % SHARED != 0);
      UNROLL
      for (int j = 0; j < HALF; j++) {
        Fragment part;
        part.thread_elements()[0] = run.at(j);
        part.thread_elements()[1] = run.at(j + HALF);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          multiply_add(state.outputs[r][v * HALF + j], weights[r][g], part);
        }
      }
    }
  }
}

// The same of codes in groups of 64: two spans of 32. `column_seen` of a lane's two columns: their
// scales go to its weights.
template <int D, int ROWS, int GROUPS, int CHUNKS, typename Sum, typename Values>
METAL_FUNC void add_values(
    thread RunningSoftmax<ROWS, CHUNKS, true, Sum>& state,
    thread Fragment (&weights)[ROWS][GROUPS],
    const thread Values& values,
    const thread bool (&seen)[GROUPS],
    const thread bool (&column_seen)[GROUPS][2],
    Place at) {
  constexpr int HALF = 4;
  constexpr int SPAN = 32;
  UNROLL
  for (int g = 0; g < GROUPS; g++) {
    UNROLL
    for (int group = 0; group < CHUNKS / 8; group++) {
      Fragment scaled[ROWS];
      UNROLL
      for (int e = 0; e < 2; e++) {
        const float2 of_token =
            values.scale_and_bias(8 * g + at.column + e, group, column_seen[g][e]);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          const float weight = weights[r][g].thread_elements()[e];
          scaled[r].thread_elements()[e] = weight * of_token.x;
          state.biases[r][group] += weight * of_token.y;
        }
      }
      UNROLL
      for (int v = 2 * group; v < 2 * group + 2; v++) {
        typename Values::template Run<2 * HALF> run;
        values.template read_codes<2 * HALF, SPAN>(
            run, 8 * g + at.row, v * SPAN, at.column * HALF, seen[g]);
        UNROLL
        for (int j = 0; j < HALF; j++) {
          Fragment part;
          part.thread_elements()[0] = run.code(j);
          part.thread_elements()[1] = run.code(j + HALF);
          UNROLL
          for (int r = 0; r < ROWS; r++) {
            multiply_add(state.outputs[r][v * HALF + j], scaled[r], part);
          }
        }
      }
    }
  }
}
