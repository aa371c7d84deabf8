// The next token of each row, as `minisgl.kernel.ops.Ops.sample` defines it, without sorting.
//
// A row's filters are thresholds on its logits. Top-k's and top-p's are found among the few
// candidates that can matter. Then one pass adds the noise, which is computed only for entries that
// can still win: Gumbel noise of 32 bits is below 22.9, so an entry that is further below the best sum
// so far has lost.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor.h"
#include "threads.h"

namespace {

typedef uint64_t VL __attribute__((vector_size(W * 4)));

constexpr float LARGEST_NOISE = 22.9f;  // -log(-log1p(-2**-33)) is 22.87
constexpr int ENTRIES = 4 * W;          // for which W Philox counters give noise

// --- noise: see minisgl/kernel/sampling.py --------------------------------------------------------

INLINE void multiply(VU a, uint32_t b, VU& high, VU& low) {
  VL even = (bit_cast<VL>(a) & 0xffffffff) * b, odd = (bit_cast<VL>(a) >> 32) * b;
  low = bit_cast<VU>((even & 0xffffffff) | odd << 32);
  high = bit_cast<VU>(even >> 32 | (odd & 0xffffffff00000000));
}

// Philox4x32-10 at W counters (c0, c1, c2, 0).
INLINE void philox(VU c0, uint32_t c1, uint32_t c2, uint64_t key, VU words[4]) {
  VU x0 = c0, x1 = c1 + VU{}, x2 = c2 + VU{}, x3 = VU{};
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    VU high0, low0, high1, low1;
    multiply(x0, 0xD2511F53, high0, low0);
    multiply(x2, 0xCD9E8D57, high1, low1);
    x0 = high1 ^ x1 ^ k0, x1 = low1, x2 = high0 ^ x3 ^ k1, x3 = low0;
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  words[0] = x0, words[1] = x1, words[2] = x2, words[3] = x3;
}

// Noise of entries [first, first + ENTRIES); first is a multiple of 4.
INLINE void gumbel(int first, uint64_t seed, uint64_t index, float* noise) {
  VU words[4];
  philox(bit_cast<VU>(lanes() + first / 4), uint32_t(index), uint32_t(index >> 32), seed, words);
  for (int w = 0; w < 4; w++) {
    VF u = (__builtin_convertvector(words[w], VF) + 0.5f) * 0x1p-32f;
    u = min(u, splat(0x1.fffffep-1f));
    // log1p(-u) without loss for small u (Goldberg 1991, theorem 4): the error of 1 - u cancels.
    VF rest = 1.0f - u, lost = rest - 1.0f;
    VF exponential = -select(lost == 0.0f, -u, log(rest) * (-u / lost));
    VF g = -log(exponential);
    for (int lane = 0; lane < W; lane++) noise[4 * lane + w] = g[lane];
  }
}

// --- one row ------------------------------------------------------------------------------------

struct Candidate {
  float x, mass;
};

template <class T>
struct Row {
  const T* logits;
  int size;
  float top, temperature;

  VF raw(int i) const {  // -inf past the end
    if (i + W <= size) return load(logits + i);
    return select(lanes() < size - i, load_first(logits + i, std::max(size - i, 0)),
                  splat(-INFINITY));
  }
  VF scaled(int i) const { return (raw(i) - top) / temperature; }  // at most 0
};

// The index of the first largest entry, which `top` becomes. NaN counts as less than all others.
template <class T>
int argmax(const Row<T>& row, float& top) {
  VF best = splat(-INFINITY);
  VI at = lanes();
  for (int i = 0; i < row.size; i += W) {
    VF x = row.raw(i);
    VI better = x > best;
    best = better ? x : best;
    at = better ? lanes() + i : at;
  }
  top = max(best);
  int first = row.size - 1;
  for (int lane = 0; lane < W; lane++)
    if (best[lane] == top) first = std::min(first, int(at[lane]));
  return first;
}

// Finds the entries that are at least `at_least`.
template <class T>
void collect(const Row<T>& row, float at_least, std::vector<Candidate>& found) {
  found.clear();
  for (int i = 0; i < row.size; i += W) {
    VF x = row.scaled(i);
    if (!any(x >= at_least)) continue;
    VF mass = exp(x);
    for (int lane = 0; lane < std::min(W, row.size - i); lane++)
      if (x[lane] >= at_least) found.push_back({x[lane], mass[lane]});
  }
}

// A lower bound of the k-th largest entry: the k-th largest of the maxima of W * 4 entries each.
template <class T>
float below_kth(const Row<T>& row, int k, std::vector<float>& maxima) {
  maxima.clear();
  for (int i = 0; i < row.size; i += 4 * W) {
    VF largest = row.scaled(i);
    for (int j = W; j < 4 * W && i + j < row.size; j += W)
      largest = max(largest, row.scaled(i + j));
    maxima.push_back(max(largest));
  }
  if (size_t(k) > maxima.size()) return -INFINITY;
  std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<>());
  return maxima[k - 1];
}

// A level such that entries of at least it have at least p of the mass; `total` becomes the mass of
// all.
template <class T>
float below_mass(const Row<T>& row, double p, double& total) {
  constexpr int N = 6;
  constexpr float levels[N] = {-1, -2, -4, -8, -16, -32};
  double masses[N] = {};
  total = 0;
  for (int begin = 0; begin < row.size; begin += 64 * W) {
    VF sums[N] = {}, all = {};
    for (int i = begin; i < std::min(begin + 64 * W, row.size); i += W) {
      VF x = row.scaled(i), mass = exp(x);
      all += mass;
      for (int n = 0; n < N; n++) sums[n] += select(x >= levels[n], mass, VF{});
    }
    total += sum(all);
    for (int n = 0; n < N; n++) masses[n] += sum(sums[n]);
  }
  for (int n = 0; n < N; n++)
    if (masses[n] >= p * total * (1 + 1e-5)) return levels[n];  // 1e-5: float32 sums
  return -INFINITY;
}

// The largest x such that candidates of at least x have at least `target` mass: a weighted quickselect.
float cross(std::vector<Candidate>& found, double target) {
  auto begin = found.begin(), end = found.end();
  float smallest = 0;
  while (begin != end) {
    float pivot = begin[(end - begin) / 2].x;
    auto equal = std::partition(begin, end, [&](const Candidate& c) { return c.x > pivot; });
    auto less = std::partition(equal, end, [&](const Candidate& c) { return c.x == pivot; });
    double above = 0, here = 0;
    for (auto c = begin; c != equal; ++c) above += c->mass;
    for (auto c = equal; c != less; ++c) here += c->mass;
    if (above >= target) {
      end = equal;
    } else if (above + here >= target) {
      return pivot;
    } else {
      target -= above + here;
      smallest = pivot;
      begin = less;
    }
  }
  return smallest;
}

// The least x that passes top-k and top-p.
template <class T>
float threshold(const Row<T>& row, int k, float p) {
  static thread_local std::vector<Candidate> found;
  static thread_local std::vector<float> maxima;
  if (k <= 0 || k > row.size) k = row.size;
  float least = -INFINITY;
  double total = 0;
  if (k < row.size) {
    collect(row, below_kth(row, k, maxima), found);
    if (size_t(k) > found.size()) k = int(found.size());  // NaN is not among the candidates
    if (!k) return least;
    std::nth_element(found.begin(), found.begin() + k - 1, found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.x > b.x; });
    least = found[k - 1].x;
    found.erase(std::remove_if(found.begin(), found.end(),
                               [&](const Candidate& c) { return c.x < least; }),
                found.end());
    for (const Candidate& c : found) total += c.mass;
  } else if (p < 1) {
    collect(row, below_mass(row, p, total), found);
  }
  return p < 1 ? cross(found, p * total) : least;
}

// The entry of at least `least` with the largest sum of its x and its noise.
template <class T>
int draw(const Row<T>& row, int top_id, float least, uint64_t seed, uint64_t index) {
  float best = -INFINITY;
  int best_id = top_id;
  auto visit = [&](int first) {
    VF x[4], most = splat(-INFINITY);
    VI alive = {};
    for (int i = 0; i < 4; i++) {
      x[i] = row.scaled(first + i * W);
      x[i] = select(x[i] >= least, x[i], splat(-INFINITY));
      alive |= x[i] > best - LARGEST_NOISE;
    }
    if (!any(alive)) return;
    float noise[ENTRIES], noisy[ENTRIES];
    gumbel(first, seed, index, noise);
    for (int i = 0; i < 4; i++) {
      VF sums = x[i] + load(noise + i * W);
      store(noisy + i * W, sums);
      most = max(most, sums);
    }
    if (max(most) < best) return;
    for (int i = 0; i < ENTRIES; i++)
      if (noisy[i] > best || (noisy[i] == best && first + i < best_id))
        best = noisy[i], best_id = first + i;
  };
  visit(top_id / ENTRIES * ENTRIES);  // the likeliest first: after it most others need no noise
  for (int first = 0; first < row.size; first += ENTRIES) visit(first);
  return best_id;
}

}  // namespace

// logits [S, V]; out int32 [S], -1 for a row whose largest logit is not finite. The others are
// fields of minisgl.core.BatchSamplingArgs, or None. Without temperatures every row is greedy.
void sample(TensorView logits, optional<TensorView> temperatures,
            optional<TensorView> top_ks, optional<TensorView> top_ps,
            optional<TensorView> min_ps, optional<TensorView> seeds,
            optional<TensorView> output_idxs, TensorView out, int64_t num_threads) {
  CHECK(logits.ndim() == 2 && logits.stride(1) == 1, "sample: logits must be [rows, vocabulary]");
  const int num_rows = logits.size(0), V = logits.size(1);
  int32_t* ids = data<int32_t>(out);
  const float* temperature = temperatures ? data<float>(*temperatures) : nullptr;
  const int32_t* top_k = top_ks ? data<int32_t>(*top_ks) : nullptr;
  const float* top_p = top_ps ? data<float>(*top_ps) : nullptr;
  const float* min_p = min_ps ? data<float>(*min_ps) : nullptr;
  const int64_t* seed = seeds ? data<int64_t>(*seeds) : nullptr;
  const int64_t* index = output_idxs ? data<int64_t>(*output_idxs) : nullptr;
  CHECK(!temperature || (seed && index), "sample: rows with a temperature need seeds and indices");
  if (int64_t(num_rows) * V < 65536) num_threads = 1;  // a few microseconds of work
  with_dtype(logits.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* base = data<T>(logits);
    const int64_t stride = logits.stride(0);
    each_item(num_rows, num_threads, [&](int64_t r) {
      Row<T> row{base + r * stride, V, 0, 1};
      ids[r] = argmax(row, row.top);
      if (!std::isfinite(row.top)) {  // argmax ignores NaN: of a row of NaN it is -infinity
        ids[r] = -1;
        return;
      }
      if (!temperature || temperature[r] == 0) return;
      row.temperature = temperature[r];
      float least = -INFINITY;
      if (top_k || top_p) least = threshold(row, top_k ? top_k[r] : 0, top_p ? top_p[r] : 1.0f);
      if (min_p) least = std::max(least, std::log(min_p[r]));
      ids[r] = draw(row, ids[r], least, seed[r], index[r]);
    });
  });
}

EXPORT(sample)
