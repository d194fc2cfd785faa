// Attention that reads the pages where they lie, and the small steps between two products.
//
// Kwon et al., PagedAttention (2023); the running softmax is Milakov and Gimelshein's (2018). Plain C++
// without torch's headers: it builds in seconds. kernels.py builds it and calls it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// bfloat16 is the upper half of a float. Sums are kept in float, those of doubles in double.
struct bfloat16 {
    uint16_t bits;
};

template <typename T> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };
template <typename T> using Sum = typename SumOf<T>::type;

template <typename T> static inline Sum<T> load(T x) { return x; }
static inline float load(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <typename T> static inline void store(T &to, Sum<T> value) { to = value; }
static inline void store(bfloat16 &to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    to.bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

// Numbers that the processor handles in one instruction. A wider vector would live in memory, not in a register.
#if defined(__AVX512F__)
static const int64_t BYTES = 64;
#elif defined(__AVX__)
static const int64_t BYTES = 32;
#else
static const int64_t BYTES = 16;
#endif
template <typename S> struct VecOf { typedef S type __attribute__((vector_size(BYTES), aligned(sizeof(S)), may_alias)); };
template <typename S> using Vec = typename VecOf<S>::type;
template <typename S> constexpr int64_t LANES = BYTES / sizeof(S);
template <typename S> static inline Vec<S> &vec(S *p, int64_t i) { return ((Vec<S> *)p)[i]; }
template <typename S> static inline Vec<S> vec(const S *p, int64_t i) { return ((const Vec<S> *)p)[i]; }

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ------------------------------------------------------------------------------------------ attention

// What is the same in every layer of a step; kernels.py has the same fields in the same order.
struct Step {
    // (num_tiles, 4): a request, its rows from here to there, 0; or, for decodes that share blocks, a request that
    // has these blocks, members from here to there, and the number of keys that they share.
    const int64_t *tiles;
    const int64_t *members;  // (members, 2): a request and its row
    const int64_t *positions, *slots;  // (rows)
    const int64_t *tables;  // (requests, table_stride) block ids
    int64_t rows, num_tiles, table_stride, heads, kv_heads, head_dim, block_size;
    double eps;
};

// What attention of one layer is given. A stride counts elements, from one row to the next.
template <typename T> struct Attention : Step {
    T *q, *k, *v;  // (rows, heads or kv_heads, head_dim)
    int64_t stride;
    const T *q_norm, *k_norm;  // (head_dim) weights, or null
    const Sum<T> *cos, *sin;  // (rows, head_dim / 2), or null where q and k are rotated already
    T *k_cache, *v_cache;  // (blocks, block_size, kv_heads, head_dim)
    T *out;  // (rows, heads, head_dim)
};

// So many vectors or rows of sums stay in registers: enough that none waits for the one before.
static const int64_t SUMS = 8;
static const float LOWEST = -1e30f;  // for minus infinity, which fast math does not know

// A request's keys and values of one key head, a page at a time, each row `dim` numbers that vectors can
// take: in place where that goes, else widened and padded with zeros.
template <typename T> struct Pages {
    using S = Sum<T>;
    const Attention<T> &a;
    const int64_t *table;
    int64_t kv_head, last, dim, keys;  // `last` is the last position that is seen
    std::vector<const S *> k, v;
    std::vector<S> k_room, v_room;

    Pages(const Attention<T> &a, int64_t request, int64_t last, int64_t kv_head)
        : a(a), table(a.tables + request * a.table_stride), kv_head(kv_head), last(last),
          dim(round_up(a.head_dim, 4 * LANES<S>)), keys(round_up(a.block_size, SUMS)), k(keys), v(keys),
          k_room(keys * dim), v_room(keys * dim) {
        for (int64_t j = 0; j < keys; j++) k[j] = &k_room[j * dim], v[j] = &v_room[j * dim];
    }

    // The page that starts at this position; how many of its keys are filled.
    int64_t load_page(int64_t start) {
        const int64_t size = a.block_size, filled = std::min(size, last + 1 - start);
        const int64_t page = offset(start), next = offset(std::min(start + size, last));
        for (int64_t j = 0; j < filled; j++) {
            const int64_t row = j * a.kv_heads * a.head_dim;
            take(a.k_cache + page + row, k[j], &k_room[j * dim]);
            take(a.v_cache + page + row, v[j], &v_room[j * dim]);
            // The next page lies anywhere: asked for now, it is there when its turn comes.
            for (int64_t d = 0; d < a.head_dim; d += 64 / sizeof(T)) {
                __builtin_prefetch(a.k_cache + next + row + d);
                __builtin_prefetch(a.v_cache + next + row + d);
            }
        }
        return filled;
    }

  private:
    int64_t offset(int64_t position) const {
        return (table[position / a.block_size] * a.block_size * a.kv_heads + kv_head) * a.head_dim;
    }

    void take(const T *row, const S *&taken, S *room) const {
        if constexpr (std::is_same_v<T, S>)
            if (dim == a.head_dim) {
                taken = row;
                return;
            }
        int64_t d = 0;
        if constexpr (std::is_same_v<T, bfloat16>) {
            typedef uint16_t Halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
            typedef uint32_t Words __attribute__((vector_size(BYTES)));
            for (; d + LANES<float> <= a.head_dim; d += LANES<float>)
                vec(room + d, 0) = (Vec<float>)(__builtin_convertvector(*(const Halves *)(row + d), Words) << 16);
        }
        for (; d < a.head_dim; d++) room[d] = load(row[d]);
    }
};

// One head of one row: load it as the sums need it, scaled, each number `step` apart; and store it.
template <typename T>
static void load_query(const Attention<T> &a, int64_t row, int64_t head, Sum<T> *to, int64_t step) {
    const T *from = a.q + row * a.stride + head * a.head_dim;
    const Sum<T> scale = 1 / std::sqrt(Sum<T>(a.head_dim));
    for (int64_t d = 0; d < a.head_dim; d++) to[d * step] = load(from[d]) * scale;
}

template <typename T>
static void store_out(const Attention<T> &a, int64_t row, int64_t head, const Sum<T> *from, int64_t step, Sum<T> total) {
    T *to = a.out + (row * a.heads + head) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d++) store(to[d], from[d * step] / total);
}

// What attention has summed over the keys so far, of each query head that shares a key head: the weighted values,
// the highest score, and the sum of the weights.
template <typename T> struct Running {
    using S = Sum<T>;
    std::vector<S> out, best, total;

    Running(int64_t group, int64_t dim) : out(group * dim), best(group, LOWEST), total(group) {}
};

// The scores of SUMS keys: the products of the query's numbers and each key's, summed.
template <typename S> static inline void score(const S *query, const S *const *keys, int64_t vecs, S *scores) {
    Vec<S> sums[SUMS] = {};
    for (int64_t n = 0; n < vecs; n++) {
        const Vec<S> numbers = vec(query, n);
#pragma GCC unroll 8
        for (int64_t b = 0; b < SUMS; b++) sums[b] += numbers * vec(keys[b], n);
    }
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (std::is_same_v<S, float>) {  // seven instructions, where one lane after another takes a hundred
        const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
        const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
        vec(scores, 0) = _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
        return;
    }
#endif
    for (int64_t b = 0; b < SUMS; b++) {
        scores[b] = 0;
        for (int64_t lane = 0; lane < LANES<S>; lane++) scores[b] += sums[b][lane];
    }
}

// One row, a decode, from the key `start` on, the first of a page. The head's numbers lie in the lanes: a page is
// read as it comes from memory, and that is what the time goes into.
template <typename T>
static void attend_row(const Attention<T> &a, int64_t request, int64_t row, int64_t kv_head, int64_t start,
                       Running<T> &sums) {
    using S = Sum<T>;
    Pages<T> pages(a, request, a.positions[row], kv_head);
    const int64_t dim = pages.dim, vecs = dim / LANES<S>, group = a.heads / a.kv_heads;
    std::vector<S> q(group * dim), weight(pages.keys);
    for (int64_t i = 0; i < group; i++) load_query<T>(a, row, kv_head * group + i, &q[i * dim], 1);
    for (; start <= pages.last; start += a.block_size) {
        const int64_t filled = pages.load_page(start);
        for (int64_t i = 0; i < group; i++) {
            const S *query = &q[i * dim];
            S *mixed = &sums.out[i * dim], highest = sums.best[i];
            for (int64_t j = 0; j < filled; j += SUMS) score(query, &pages.k[j], vecs, &weight[j]);
            for (int64_t j = 0; j < filled; j++) highest = std::max(highest, weight[j]);
            // The softmax runs along: what was summed so far shrinks when a higher score comes.
            const S shrink = highest > sums.best[i] ? std::exp(sums.best[i] - highest) : 1;
            S added = 0;
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < filled; j++) added += weight[j] = std::exp(weight[j] - highest);
            sums.best[i] = highest;
            sums.total[i] = sums.total[i] * shrink + added;
            for (int64_t n = 0; n < vecs; n += 4) {
                Vec<S> mix[2][4];  // of every second value each
                for (int64_t b = 0; b < 4; b++) mix[0][b] = vec(mixed, n + b) * shrink, mix[1][b] = Vec<S>{};
                int64_t j = 0;
                for (; j + 1 < filled; j += 2)
                    for (int64_t odd = 0; odd < 2; odd++)
                        for (int64_t b = 0; b < 4; b++) mix[odd][b] += weight[j + odd] * vec(pages.v[j + odd], n + b);
                if (j < filled)
                    for (int64_t b = 0; b < 4; b++) mix[0][b] += weight[j] * vec(pages.v[j], n + b);
                for (int64_t b = 0; b < 4; b++) vec(mixed, n + b) = mix[0][b] + mix[1][b];
            }
        }
    }
    for (int64_t i = 0; i < group; i++)
        store_out<T>(a, row, kv_head * group + i, &sums.out[i * dim], 1, sums.total[i]);
}

// Several rows of a chunk, and of each the query heads that share a key head: so many that each has a
// lane to itself, as on a GPU it has a thread. No sum crosses lanes, and a key serves a vector of queries. So it
// does for the decodes that share their first keys, and each goes on with its own keys (cascade attention: Ye et
// al., FlashInfer, 2025).
template <typename T> static void attend_chunk(const Attention<T> &a, const int64_t *tile, int64_t kv_head) {
    using S = Sum<T>;
    const int64_t shared = tile[3];
    const int64_t *members = shared ? a.members + tile[1] * 2 : nullptr;
    Pages<T> pages(a, tile[0], shared ? shared - 1 : a.positions[tile[2] - 1], kv_head);
    const int64_t lanes = LANES<S>, dim = pages.dim, group = a.heads / a.kv_heads;
    const int64_t num = (tile[2] - tile[1]) * group, room = round_up(num, lanes);
    std::vector<S> q(room * dim), out(room * dim), best(room, LOWEST), total(room), limit(room);
    std::vector<S> weight(pages.keys * lanes);
    auto row = [&](int64_t i) { return members ? members[i / group * 2 + 1] : tile[1] + i / group; };  // of query i
    auto lane = [&](int64_t i) { return i / lanes * dim * lanes + i % lanes; };  // of query i, in q and out
    for (int64_t i = 0; i < num; i++) {
        load_query<T>(a, row(i), kv_head * group + i % group, &q[lane(i)], lanes);
        limit[i] = std::min(a.positions[row(i)], pages.last);
    }
    for (int64_t start = 0; start <= pages.last; start += a.block_size) {
        const int64_t filled = pages.load_page(start);
        for (int64_t m = 0; m < room / lanes; m++) {
            const S *queries = &q[m * dim * lanes];
            Vec<S> highest = vec(best.data(), m);
            const Vec<S> sees = vec(limit.data(), m);
            for (int64_t j = 0; j < filled; j += SUMS) {
                Vec<S> scores[SUMS] = {};
                for (int64_t d = 0; d < a.head_dim; d++)
                    for (int64_t b = 0; b < SUMS; b++) scores[b] += vec(queries, d) * pages.k[j + b][d];
                for (int64_t b = 0; b < SUMS; b++) {
                    // A row sees the keys up to its own position, its own included.
                    scores[b] = sees >= S(start + j + b) ? scores[b] : Vec<S>{} + LOWEST;
                    highest = scores[b] > highest ? scores[b] : highest;
                    vec(weight.data(), j + b) = scores[b];
                }
            }
            for (int64_t j = 0; j < filled; j++) vec(weight.data(), j) -= highest;
#pragma omp simd
            for (int64_t i = 0; i < filled * lanes; i++) weight[i] = std::exp(weight[i]);
            Vec<S> shrink = vec(best.data(), m) - highest, added = {};
            for (int64_t i = 0; i < lanes; i++) shrink[i] = std::exp(shrink[i]);
            for (int64_t j = 0; j < filled; j++) added += vec(weight.data(), j);
            vec(best.data(), m) = highest;
            vec(total.data(), m) = vec(total.data(), m) * shrink + added;
            S *mixed = &out[m * dim * lanes];
            for (int64_t d = 0; d < a.head_dim; d += SUMS) {
                Vec<S> mix[SUMS];
                for (int64_t b = 0; b < SUMS; b++) mix[b] = vec(mixed, d + b) * shrink;
                for (int64_t j = 0; j < filled; j++)
                    for (int64_t b = 0; b < SUMS; b++) mix[b] += vec(weight.data(), j) * pages.v[j][d + b];
                for (int64_t b = 0; b < SUMS; b++) vec(mixed, d + b) = mix[b];
            }
        }
    }
    if (!members)
        for (int64_t i = 0; i < num; i++)
            store_out<T>(a, row(i), kv_head * group + i % group, &out[lane(i)], lanes, total[i]);
    else
        for (int64_t first = 0; first < num; first += group) {
            Running<T> sums(group, dim);
            for (int64_t i = 0; i < group; i++) {
                for (int64_t d = 0; d < dim; d++) sums.out[i * dim + d] = out[lane(first + i) + d * lanes];
                sums.best[i] = best[first + i], sums.total[i] = total[first + i];
            }
            attend_row<T>(a, members[first / group * 2], row(first), kv_head, shared, sums);
        }
}

// ------------------------------------------------------------------------------- the small steps
// One pass over memory each, where torch takes several. So few elements are left to one thread:
static const int64_t SMALL = 1 << 14;

// x += delta, where there is one; out = x / sqrt(mean(x * x) + eps) * weight. All (rows, size).
template <typename T>
static void add_rms_norm(T *x, const T *delta, const T *weight, T *out, int64_t rows, int64_t size, double eps) {
#pragma omp parallel for if (rows * size > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        T *xs = x + row * size;
        Sum<T> squares = 0;
        if (delta)
#pragma omp simd
            for (int64_t i = 0; i < size; i++) store(xs[i], load(xs[i]) + load(delta[row * size + i]));
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += load(xs[i]) * load(xs[i]);
        const Sum<T> scale = 1 / std::sqrt(squares / size + Sum<T>(eps));
#pragma omp simd
        for (int64_t i = 0; i < size; i++) store(out[row * size + i], load(xs[i]) * scale * load(weight[i]));
    }
}

// Turn one row's heads (heads, 2 * half), pair (x[i], x[i + half]) by pair, by the angles of the row; in place.
template <typename T> static void rope(T *x, const Sum<T> *cos, const Sum<T> *sin, int64_t heads, int64_t half) {
    for (int64_t head = 0; head < heads; head++) {
        T *low = x + head * 2 * half, *high = low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const Sum<T> a = load(low[i]), b = load(high[i]);
            store(low[i], a * cos[i] - b * sin[i]);
            store(high[i], b * cos[i] + a * sin[i]);
        }
    }
}

// out = silu(gate) * up; gate_up is (rows, 2 * size).
template <typename T> static void silu_mul(const T *gate_up, T *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const Sum<T> g = load(gate[i]);
            store(out[row * size + i], g / (1 + std::exp(-g)) * load(up[i]));
        }
    }
}

// One layer's attention, from the product of q, k and v: norms of the heads where the model has them, RoPE, keys
// and values to their slots, and then each tile.
template <typename T> static void attend(const Attention<T> &a) {
    const int64_t size = a.kv_heads * a.head_dim, half = a.head_dim / 2;
#pragma omp parallel for if (a.rows * (a.heads + a.kv_heads) * half > SMALL)
    for (int64_t row = 0; row < a.rows; row++) {
        const int64_t at = row * a.stride;
        if (a.q_norm) {
            add_rms_norm<T>(a.q + at, nullptr, a.q_norm, a.q + at, a.heads, a.head_dim, a.eps);
            add_rms_norm<T>(a.k + at, nullptr, a.k_norm, a.k + at, a.kv_heads, a.head_dim, a.eps);
        }
        if (a.cos) {
            rope(a.q + at, a.cos + row * half, a.sin + row * half, a.heads, half);
            rope(a.k + at, a.cos + row * half, a.sin + row * half, a.kv_heads, half);
        }
        std::copy_n(a.k + at, size, a.k_cache + a.slots[row] * size);
        std::copy_n(a.v + at, size, a.v_cache + a.slots[row] * size);
    }
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < a.num_tiles * a.kv_heads; i++) {
        const int64_t *tile = a.tiles + i / a.kv_heads * 4, kv_head = i % a.kv_heads;
        if (tile[3] == 0 && tile[2] - tile[1] == 1) {
            Running<T> sums(a.heads / a.kv_heads, round_up(a.head_dim, 4 * LANES<Sum<T>>));
            attend_row<T>(a, tile[0], tile[1], kv_head, 0, sums);
        } else {
            attend_chunk<T>(a, tile, kv_head);
        }
    }
}

// ------------------------------------------------------------------------------------------- products
// The weights lie in panels of 16 outputs, a column's sixteen side by side. bfloat16, for a processor without
// instructions for it, is read as it is, half as many bytes as float32, and widened in registers: two columns
// stand side by side, so that a word holds both, the upper half of a float each, one shift or one mask away
// from it. A row's sums have one order, whatever rows stand beside it.

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t EightWords __attribute__((vector_size(32), aligned(4), may_alias));
static const int64_t PANEL = 16, ROWS = 6;  // their sums fill twelve of AVX2's sixteen registers
static const int64_t AHEAD = 64;  // lines of 64 bytes, a small page's, that are asked for before their turn
static const int64_t NEAR = 96;  // rows that stay in the second cache while all panels pass

// Eight outputs' weights of the column that is the `at`-th in a word.
static inline Eight weights(const float *panel, int64_t) { return *(const Eight *)panel; }
static inline Eight weights(const bfloat16 *panel, int64_t at) {
    const EightWords words = *(const EightWords *)panel;
    return (Eight)(at ? words & 0xFFFF0000u : words << 16);
}

// NUM rows of x (float, a row every `columns`) times one panel: out is (NUM, PANEL). A loop over rows that is not
// unrolled makes g++ keep the sums in memory, at less than half the speed.
template <typename T, int64_t NUM>
static void times_panel(const float *x, int64_t columns, const T *panel, float *out) {
    const int64_t step = sizeof(float) / sizeof(T);
    Eight sums[NUM][2] = {};
    for (int64_t k = 0; k < columns; k += step, panel += step * PANEL) {
        __builtin_prefetch(panel + AHEAD * step * PANEL);
        for (int64_t at = 0; at < step; at++) {
            const Eight low = weights(panel, at), high = weights(panel + step * PANEL / 2, at);
#pragma GCC unroll 6
            for (int64_t row = 0; row < NUM; row++) {
                const float value = x[row * columns + k + at];
                sums[row][0] += value * low;
                sums[row][1] += value * high;
            }
        }
    }
#pragma GCC unroll 6
    for (int64_t row = 0; row < NUM; row++) {
        *(Eight *)(out + row * PANEL) = sums[row][0];
        *(Eight *)(out + row * PANEL + PANEL / 2) = sums[row][1];
    }
}

// As many rows as are left, up to ROWS.
template <typename T, int64_t NUM = ROWS>
static void times_panel(int64_t num, const float *x, int64_t columns, const T *panel, float *out) {
    if (num >= NUM) return times_panel<T, NUM>(x, columns, panel, out);
    if constexpr (NUM > 1) times_panel<T, NUM - 1>(num, x, columns, panel, out);
}

// out (rows, outputs) = x (rows, columns) @ weight.T + bias, where there is one. Of bfloat16 `columns` is even.
template <typename T>
static void linear(const float *x, const T *weight, const T *bias, T *out, int64_t rows, int64_t columns,
                   int64_t outputs) {
#pragma omp parallel for collapse(2)
    for (int64_t near = 0; near < rows; near += NEAR)
        for (int64_t first = 0; first < outputs; first += PANEL) {
            const int64_t end = std::min(rows, near + NEAR), width = std::min(PANEL, outputs - first);
            int64_t groups = (end - near + ROWS - 1) / ROWS;  // as equal as can be: a small one wastes registers
            for (int64_t row = near, num; row < end; row += num, groups--) {
                float sums[ROWS * PANEL];
                num = (end - row + groups - 1) / groups;
                times_panel(num, x + row * columns, columns, weight + first * columns, sums);
                for (int64_t i = 0; i < num; i++)
                    for (int64_t j = 0; j < width; j++)
                        store(out[(row + i) * outputs + first + j],
                              sums[i * PANEL + j] + (bias ? load(bias[first + j]) : 0));
            }
        }
}

// weight (panels, PANEL, words) to (panels, words, PANEL). torch takes five times as long.
extern "C" void to_panels(const uint32_t *weight, uint32_t *out, int64_t panels, int64_t words) {
#pragma omp parallel for
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < words; k++)
            for (int64_t i = 0; i < PANEL; i++)
                out[(panel * words + k) * PANEL + i] = weight[(panel * PANEL + i) * words + k];
}

extern "C" void linear_float32(const float *x, const float *weight, const float *bias, float *out, int64_t rows,
                               int64_t columns, int64_t outputs) {
    linear(x, weight, bias, out, rows, columns, outputs);
}
extern "C" void linear_bfloat16(const float *x, const bfloat16 *weight, const bfloat16 *bias, bfloat16 *out,
                                int64_t rows, int64_t columns, int64_t outputs) {
    linear(x, weight, bias, out, rows, columns, outputs);
}

// For weights of 4 or 8 bits in blocks of 32 columns: a block has a scale and a least value of its own, and its
// numbers are multiplied as integers by a row of x that is rounded to 16 bits, each block to a scale of its own.
// So one instruction multiplies sixteen pairs, where float32 takes eight, and a sum of integers is exact. The
// weights lie in panels of 16 outputs, in words of one output's columns: two columns in a word's halves, the
// next two BITS above them.
static const int64_t BLOCK = 32;
typedef int32_t EightSums __attribute__((vector_size(32)));

// Add the products of two columns for each of eight outputs. `pairs` has them in the halves of a word, not
// negative; `xs` has the row's two.
static inline void add_pair(EightSums &sums, EightWords pairs, int32_t xs) {
#if defined(__AVX2__)
    sums += (EightSums)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(xs));
    __asm__("" : "+x"(sums));  // or g++ adds up the products first, in more registers than there are
#else
    sums += (EightSums)(pairs & 0xFFFF) * int16_t(xs) + (EightSums)(pairs >> 16) * (xs >> 16);
#endif
}

static inline bool finite(float x) {  // std::isfinite is always true in fast math
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits >> 23 & 0xFF) < 0xFF;
}

// Rows of x as the products take them: integers, and for each block its step and the sum of what they stand for.
// A sum that is not finite stays as it is, and makes the products so.
struct Rounded {
    int64_t blocks;
    std::vector<int32_t> pairs;  // (rows, blocks, BLOCK / 2)
    std::vector<float> steps, sums;  // (rows, blocks)

    Rounded(const float *x, int64_t rows, int64_t columns)
        : blocks(columns / BLOCK), pairs(rows * columns / 2), steps(rows * blocks), sums(rows * blocks) {
        int16_t *numbers = (int16_t *)pairs.data();
        for (int64_t block = 0; block < rows * blocks; block++, x += BLOCK, numbers += BLOCK) {
            float most = 0, sum = 0;
#pragma omp simd reduction(max : most) reduction(+ : sum)
            for (int64_t i = 0; i < BLOCK; i++) most = std::max(most, std::abs(x[i])), sum += x[i];
            const float up = most > 0 ? 32767 / most : 0;
            int32_t total = 0;
            for (int64_t i = 0; i < BLOCK; i++) {
                const int32_t number = int32_t(std::nearbyint(x[i] * up));
                numbers[i] = int16_t(number), total += number;
            }
            steps[block] = most / 32767, sums[block] = finite(sum) ? total * steps[block] : sum;
        }
    }
};

// NUM rows, from `row` on, times one panel. `steps` has for each block 16 scales and 16 least values.
template <int BITS, int64_t NUM>
static void times_blocks(const Rounded &x, int64_t row, const EightWords *words, const Eight *steps, float *out) {
    const uint32_t mask = ((1u << BITS) - 1) * 0x10001u;
    Eight totals[NUM][2] = {};
    for (int64_t block = 0; block < x.blocks; block++, steps += 4) {
        const int32_t *pairs = &x.pairs[(row * x.blocks + block) * (BLOCK / 2)];
        EightSums sums[NUM][2] = {};
        for (int64_t word = 0; word < BITS; word++, words += 2)
            for (int up = 0; up < 16; up += BITS, pairs++)
                for (int64_t half = 0; half < 2; half++) {
                    const EightWords weight = words[half] >> up & mask;
#pragma GCC unroll 6
                    for (int64_t i = 0; i < NUM; i++)
                        add_pair(sums[i][half], weight, pairs[i * x.blocks * (BLOCK / 2)]);
                }
#pragma GCC unroll 6
        for (int64_t i = 0; i < NUM; i++)
            for (int64_t half = 0; half < 2; half++) {
                const int64_t of_x = (row + i) * x.blocks + block;
                totals[i][half] += __builtin_convertvector(sums[i][half], Eight) * (x.steps[of_x] * steps[half]) +
                                   x.sums[of_x] * steps[2 + half];
            }
    }
    std::memcpy(out, totals, sizeof totals);
}

template <int BITS, int64_t NUM = ROWS>
static void times_blocks(int64_t num, const Rounded &x, int64_t row, const EightWords *words, const Eight *steps,
                         float *out) {
    if (num >= NUM) return times_blocks<BITS, NUM>(x, row, words, steps, out);
    if constexpr (NUM > 1) times_blocks<BITS, NUM - 1>(num, x, row, words, steps, out);
}

// out (rows, outputs) = x (rows, columns) @ weight.T + bias, where there is one. `columns` is a multiple of 32.
template <int BITS>
static void linear_blocks(const float *x, const EightWords *weight, const Eight *steps, const float *bias, float *out,
                          int64_t rows, int64_t columns, int64_t outputs) {
    const Rounded rounded(x, rows, columns);
#pragma omp parallel for
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t blocks = first / PANEL * rounded.blocks;
        for (int64_t row = 0; row < rows; row += ROWS) {
            alignas(32) float sums[ROWS * PANEL];
            const int64_t num = std::min(ROWS, rows - row);
            times_blocks<BITS>(num, rounded, row, weight + blocks * BITS * 2, steps + blocks * 4, sums);
            for (int64_t i = 0; i < num; i++)
                for (int64_t j = 0; j < std::min(PANEL, outputs - first); j++)
                    out[(row + i) * outputs + first + j] = sums[i * PANEL + j] + (bias ? bias[first + j] : 0);
        }
    }
}

#define FOR_BITS(BITS) \
    extern "C" void linear_##BITS##bit(const float *x, const EightWords *weight, const Eight *steps, \
                                       const float *bias, float *out, int64_t rows, int64_t columns, \
                                       int64_t outputs) { \
        linear_blocks<BITS>(x, weight, steps, bias, out, rows, columns, outputs); \
    }

FOR_BITS(4)
FOR_BITS(8)

// ---------------------------------------------------------------------- what Python calls, by type

#define FOR_TYPE(T, NAME) \
    extern "C" void attend_##NAME(const Step *step, T *q, T *k, T *v, int64_t stride, const T *q_norm, \
                                  const T *k_norm, const Sum<T> *cos, const Sum<T> *sin, T *k_cache, \
                                  T *v_cache, T *out) { \
        attend<T>({*step, q, k, v, stride, q_norm, k_norm, cos, sin, k_cache, v_cache, out}); \
    } \
    extern "C" void add_rms_norm_##NAME(T *x, const T *delta, const T *weight, T *out, int64_t rows, \
                                        int64_t size, double eps) { \
        add_rms_norm(x, delta, weight, out, rows, size, eps); \
    } \
    extern "C" void silu_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t size) { \
        silu_mul(gate_up, out, rows, size); \
    }

FOR_TYPE(float, float32)
FOR_TYPE(bfloat16, bfloat16)
FOR_TYPE(double, float64)
