// Attention of some rows over the positions of one head, ATTENDED of them at a time; see elements.h. A row of scores
// has ATTENDED places; those past the last position are -Inf, like hidden ones.
constexpr float HIDDEN = -__builtin_inff();

// What is added to the scores of row r at `count` positions from `from` on; HIDDEN hides one.
static void added_scores(const Attended& a, int64_t r, int64_t from, int64_t count, float* scores) {
  const int64_t visible = a.limits[r] < from ? 0 : a.limits[r] - from < count ? a.limits[r] - from : count;
  const char* mask = a.mask ? a.mask + a.mask_rows[r] + from * a.mask_step : nullptr;
  if (!mask) {
    for (int64_t j = 0; j < visible; j++) scores[j] = 0;
  } else if (a.mask_type == B8) {
    for (int64_t j = 0; j < visible; j++) scores[j] = mask[j * a.mask_step] ? 0.0f : HIDDEN;
  } else if (a.mask_step == type_size(a.mask_type)) {
    load_run(mask, a.mask_type, 1, visible, scores);
  } else {
    for (int64_t j = 0; j < visible; j++) scores[j] = number_at(mask + j * a.mask_step, 0, a.mask_type);
  }
  for (int64_t j = visible; j < ATTENDED; j++) scores[j] = HIDDEN;
}

// The same for all rows, of which heads of one query have the same. Returns how many positions any row sees: `seen`.
static int64_t seen_positions(const Attended& a, int64_t from, int64_t count, int32_t* seen) {
  int32_t any[ATTENDED] = {};
  for (int64_t r = 0; r < a.rows; r++) {
    float* scores = a.scores + r * ATTENDED;
    if (r && a.limits[r] == a.limits[r - 1] && a.mask_rows[r] == a.mask_rows[r - 1]) {
      __builtin_memcpy(scores, scores - ATTENDED, ATTENDED * sizeof(float));
      continue;
    }
    added_scores(a, r, from, count, scores);
    for (int64_t j = 0; j < ATTENDED; j++) any[j] |= scores[j] != HIDDEN;
  }
  int64_t found = 0;
  for (int64_t j = 0; j < count; j++) {
    seen[found] = (int32_t)j;
    found += any[j];
  }
  return found;
}

// Rows of `width` numbers at the positions seen, from `rows` on, `step` bytes apart, as floats one after the other.
static void widen_seen(const char* rows, int64_t step, Type type, int64_t width, const int32_t* seen, int64_t found,
                       float* to) {
  const int64_t first = seen[0];
  if (seen[found - 1] - first == found - 1 && step == width * type_size(type)) {
    return widen(rows + first * step, type, found * width, to);
  }
  for (int64_t j = 0; j < found; j++) widen(rows + seen[j] * step, type, width, to + j * width);
}

// Part `part` of `parts` of the rows at `count` positions from `rows` on comes into the cache while others are computed
// with.
static void fetch_ahead(const char* rows, int64_t step, int64_t bytes, int64_t count, int64_t part, int64_t parts) {
  for (int64_t j = count * part / parts; j < count * (part + 1) / parts; j++) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(rows + j * step + b, 0, 2);  // to L2: floats fill L1
  }
}

// Products of one row of queries with `found` keys one after the other. LANES keys at a time: their sums are taken
// together, as the sum of one vector costs more than its products.
static void products_with(const float* q, const float* keys, int64_t width, int64_t found, float* to) {
  int64_t j = 0;
  for (; j + LANES <= found; j += LANES) {
    const float* some = keys + j * width;
    F sums[LANES];
#pragma GCC unroll 16
    for (int u = 0; u < LANES; u++) sums[u] = set_f(0);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      const F part = load_f(q + i);
#pragma GCC unroll 16
      for (int u = 0; u < LANES; u++) sums[u] = fma_f(part, load_f(some + u * width + i), sums[u]);
    }
    store_f(to + j, sums_f(sums));
    for (; i < width; i++) {
      for (int u = 0; u < LANES; u++) to[j + u] += q[i] * some[u * width + i];
    }
  }
  for (; j < found; j++) to[j] = dot_of(q, keys + j * width, width);
}

// The largest of `largest` and a row of scores; NaN if one is.
static float largest_score(const float* scores, float largest) {
  F most = set_f(largest);
  I magnitude = and_i(bits(most), set_i(0x7fffffff));
  for (int64_t j = 0; j < ATTENDED; j += LANES) {
    const F some = load_f(scores + j);
    most = max_f(most, some);
    magnitude = max_i(magnitude, and_i(bits(some), set_i(0x7fffffff)));
  }
  return largest_i(magnitude) > INFINITE ? __builtin_nanf("") : largest_f(most);
}

// Scores as powers of e below the largest one so far; what was summed before is scaled down if there is a larger one.
static void share(const Attended& a, int64_t r) {
  float *scores = a.scores + r * ATTENDED, *out = a.out + r * a.v_width;
  const float largest = largest_score(scores, a.largest[r]);
  if (largest == HIDDEN) {  // nothing is seen yet
    for (int64_t j = 0; j < ATTENDED; j++) scores[j] = 0;
    return;
  }
  F total = set_f(0);
  for (int64_t j = 0; j < ATTENDED; j += LANES) {
    const F one = exp_f(sub_f(load_f(scores + j), set_f(largest)));
    store_f(scores + j, one);
    total = add_f(total, one);
  }
  const float before = exp_of(a.largest[r] - largest);
  a.largest[r] = largest, a.total[r] = a.total[r] * before + sum_f(total);
  if (before == 1) return;
  for (int64_t i = 0; i < a.v_width; i++) out[i] *= before;
}

// Adds VECTORS vectors of the values of the positions `seen`, [..][step], times the shares of one row.
template <int VECTORS>
static void add_values(const float* values, int64_t step, const float* shares, const int32_t* seen, int64_t found,
                       float* out) {
  F sum[VECTORS];
  for (int v = 0; v < VECTORS; v++) sum[v] = load_f(out + v * LANES);
  for (int64_t j = 0; j < found; j++) {
    const float share = shares[seen[j]];
    if (share == 0) continue;  // hidden from this row: 0 times what is not finite would be NaN
    const F factor = set_f(share);
    for (int v = 0; v < VECTORS; v++) sum[v] = fma_f(factor, load_f(values + j * step + v * LANES), sum[v]);
  }
  for (int v = 0; v < VECTORS; v++) store_f(out + v * LANES, sum[v]);
}

// Which positions any row sees; their keys as floats, and scores; shares; their values as floats in the same memory,
// and sums. What no row sees is not read. Values are fetched during the scores, the next keys during the sums.
static void attend(const Attended& a) {
  float* numbers = a.scores + a.rows * ATTENDED;
  int32_t seen[ATTENDED];
  float products[ATTENDED];
  for (int64_t r = 0; r < a.rows; r++) a.largest[r] = HIDDEN, a.total[r] = 0;
  for (int64_t i = 0; i < a.rows * a.v_width; i++) a.out[i] = 0;
  for (int64_t from = a.begin; from < a.end; from += ATTENDED) {
    const int64_t count = a.end - from < ATTENDED ? a.end - from : ATTENDED;
    const int64_t found = seen_positions(a, from, count, seen);
    if (!found) continue;
    widen_seen(a.k + from * a.k_step, a.k_step, a.type, a.width, seen, found, numbers);
    for (int64_t r = 0; r < a.rows; r++) {
      float* scores = a.scores + r * ATTENDED;
      fetch_ahead(a.v + from * a.v_step, a.v_step, a.v_width * type_size(a.type), count, r, a.rows);
      products_with(a.q + r * a.width, numbers, a.width, found, products);
      for (int64_t j = 0; j < found; j++) {
        float& score = scores[seen[j]];
        score = score == HIDDEN ? HIDDEN : score + products[j];
      }
      share(a, r);
    }
    widen_seen(a.v + from * a.v_step, a.v_step, a.type, a.v_width, seen, found, numbers);
    const int64_t next = from + ATTENDED, after = a.end - next < ATTENDED ? a.end - next : ATTENDED;
    for (int64_t r = 0; r < a.rows; r++) {
      if (after > 0) fetch_ahead(a.k + next * a.k_step, a.k_step, a.width * type_size(a.type), after, r, a.rows);
      const float* shares = a.scores + r * ATTENDED;
      float* out = a.out + r * a.v_width;
      const int64_t width = a.v_width;
      int64_t i = 0;
      for (; i + 8 * LANES <= width; i += 8 * LANES) add_values<8>(numbers + i, width, shares, seen, found, out + i);
      for (; i + 4 * LANES <= width; i += 4 * LANES) add_values<4>(numbers + i, width, shares, seen, found, out + i);
      for (; i + LANES <= width; i += LANES) add_values<1>(numbers + i, width, shares, seen, found, out + i);
      for (; i < width; i++) {
        for (int64_t j = 0; j < found; j++) out[i] += shares[seen[j]] == 0 ? 0.0f : shares[seen[j]] * numbers[j * width + i];
      }
    }
  }
}
