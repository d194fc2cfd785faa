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

// What attention is given; kernels.py has the same fields in the same order. A stride counts elements,
// from one row to the next.
struct Attention {
    const void *q;  // (rows, heads, head_dim)
    int64_t q_stride;
    const void *k_cache, *v_cache;  // (blocks, block_size, kv_heads, head_dim), this step's keys written
    void *out;  // (rows, heads, head_dim)
    const int64_t *tiles;  // (num_tiles, 3): a request, and its rows from here to there
    const int64_t *positions;  // (rows)
    const int64_t *tables;  // (requests, table_stride) block ids
    int64_t num_tiles, table_stride, heads, kv_heads, head_dim, block_size;
};

// So many vectors or rows of sums stay in registers: enough that none waits for the one before.
static const int64_t SUMS = 8;
static const float LOWEST = -1e30f;  // for minus infinity, which fast math does not know

// A tile's keys and values of one key head, a page at a time, each row `dim` numbers that vectors can
// take: in place where that goes, else widened and padded with zeros.
template <typename T> struct Pages {
    using S = Sum<T>;
    const Attention &a;
    const int64_t *table;
    int64_t kv_head, last, dim, keys;  // `last` is the last position that is seen
    std::vector<const S *> k, v;
    std::vector<S> k_room, v_room;

    Pages(const Attention &a, const int64_t *tile, int64_t kv_head)
        : a(a), table(a.tables + tile[0] * a.table_stride), kv_head(kv_head), last(a.positions[tile[2] - 1]),
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
            take((const T *)a.k_cache + page + row, k[j], &k_room[j * dim]);
            take((const T *)a.v_cache + page + row, v[j], &v_room[j * dim]);
            // The next page lies anywhere: asked for now, it is there when its turn comes.
            for (int64_t d = 0; d < a.head_dim; d += 64 / sizeof(T)) {
                __builtin_prefetch((const T *)a.k_cache + next + row + d);
                __builtin_prefetch((const T *)a.v_cache + next + row + d);
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
static void load_query(const Attention &a, int64_t row, int64_t head, Sum<T> *to, int64_t step) {
    const T *from = (const T *)a.q + row * a.q_stride + head * a.head_dim;
    const Sum<T> scale = 1 / std::sqrt(Sum<T>(a.head_dim));
    for (int64_t d = 0; d < a.head_dim; d++) to[d * step] = load(from[d]) * scale;
}

template <typename T>
static void store_out(const Attention &a, int64_t row, int64_t head, const Sum<T> *from, int64_t step, Sum<T> total) {
    T *to = (T *)a.out + (row * a.heads + head) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d++) store(to[d], from[d * step] / total);
}

// One row, a decode. The head's numbers lie in the lanes: a page is read as it comes from memory, and
// that is what the time goes into.
template <typename T> static void attend_row(const Attention &a, const int64_t *tile, int64_t kv_head) {
    using S = Sum<T>;
    Pages<T> pages(a, tile, kv_head);
    const int64_t dim = pages.dim, vecs = dim / LANES<S>, group = a.heads / a.kv_heads;
    std::vector<S> q(group * dim), out(group * dim), best(group, LOWEST), total(group), weight(pages.keys);
    for (int64_t i = 0; i < group; i++) load_query<T>(a, tile[1], kv_head * group + i, &q[i * dim], 1);
    for (int64_t start = 0; start <= pages.last; start += a.block_size) {
        const int64_t filled = pages.load_page(start);
        for (int64_t i = 0; i < group; i++) {
            const S *query = &q[i * dim];
            S *mixed = &out[i * dim], highest = best[i];
            for (int64_t j = 0; j < filled; j++) {
                Vec<S> products = {};
                for (int64_t n = 0; n < vecs; n++) products += vec(query, n) * vec(pages.k[j], n);
                S score = 0;
                for (int64_t lane = 0; lane < LANES<S>; lane++) score += products[lane];
                weight[j] = score;
                highest = std::max(highest, score);
            }
            // The softmax runs along: what was summed so far shrinks when a higher score comes.
            const S shrink = std::exp(best[i] - highest);
            S added = 0;
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < filled; j++) added += weight[j] = std::exp(weight[j] - highest);
            best[i] = highest;
            total[i] = total[i] * shrink + added;
            for (int64_t n = 0; n < vecs; n += 4) {
                Vec<S> mix[4];
                for (int64_t b = 0; b < 4; b++) mix[b] = vec(mixed, n + b) * shrink;
                for (int64_t j = 0; j < filled; j++)
                    for (int64_t b = 0; b < 4; b++) mix[b] += weight[j] * vec(pages.v[j], n + b);
                for (int64_t b = 0; b < 4; b++) vec(mixed, n + b) = mix[b];
            }
        }
    }
    for (int64_t i = 0; i < group; i++)
        store_out<T>(a, tile[1], kv_head * group + i, &out[i * dim], 1, total[i]);
}

// Several rows of a chunk, and of each the query heads that share a key head: so many that each has a
// lane to itself, as on a GPU it has a thread. No sum crosses lanes, and a key serves a vector of queries.
template <typename T> static void attend_chunk(const Attention &a, const int64_t *tile, int64_t kv_head) {
    using S = Sum<T>;
    Pages<T> pages(a, tile, kv_head);
    const int64_t lanes = LANES<S>, dim = pages.dim, group = a.heads / a.kv_heads;
    const int64_t first = tile[1], num = (tile[2] - first) * group, room = round_up(num, lanes);
    std::vector<S> q(room * dim), out(room * dim), best(room, LOWEST), total(room), limit(room);
    std::vector<S> weight(pages.keys * lanes);
    auto lane = [&](int64_t i) { return i / lanes * dim * lanes + i % lanes; };  // of query i, in q and out
    for (int64_t i = 0; i < num; i++) {
        load_query<T>(a, first + i / group, kv_head * group + i % group, &q[lane(i)], lanes);
        limit[i] = a.positions[first + i / group];
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
    for (int64_t i = 0; i < num; i++)
        store_out<T>(a, first + i / group, kv_head * group + i % group, &out[lane(i)], lanes, total[i]);
}

template <typename T> static void attend(const Attention &a) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < a.num_tiles * a.kv_heads; i++) {
        const int64_t *tile = a.tiles + i / a.kv_heads * 3;
        (tile[2] - tile[1] == 1 ? attend_row<T> : attend_chunk<T>)(a, tile, i % a.kv_heads);
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

// Turn each head's pairs (x[i], x[i + half]) by the angles of its row, in place; cos and sin (rows, half).
template <typename T>
static void rope(T *x, int64_t stride, const Sum<T> *cos, const Sum<T> *sin, int64_t rows, int64_t heads,
                 int64_t half) {
#pragma omp parallel for if (rows * heads * half > SMALL)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            T *low = x + row * stride + head * 2 * half, *high = low + half;
            const Sum<T> *c = cos + row * half, *s = sin + row * half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const Sum<T> a = load(low[i]), b = load(high[i]);
                store(low[i], a * c[i] - b * s[i]);
                store(high[i], b * c[i] + a * s[i]);
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

// Rows of keys and values to their slots of one layer's cache; size is kv_heads * head_dim.
template <typename T>
static void write_kv(const T *k, const T *v, int64_t stride, T *k_cache, T *v_cache, const int64_t *slots,
                     int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        std::copy_n(k + row * stride, size, k_cache + slots[row] * size);
        std::copy_n(v + row * stride, size, v_cache + slots[row] * size);
    }
}

// ------------------------------------------------------------------------------------------- products
// For bfloat16 on a processor without instructions for it: the weights are read as they are, half as many
// bytes as float32, and widened in registers. They lie in panels of 16 outputs, and in a panel two columns side
// by side, so that a word holds both: the upper half of a float each, one shift or one mask away from it.

typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32), may_alias));
static const int64_t PANEL = 16, ROWS = 6;  // their sums fill twelve of AVX2's sixteen registers

// NUM rows of x (float, a row every `columns`) times one panel: out is (NUM, PANEL).
template <int64_t NUM>
static void times_panel(const float *x, int64_t columns, const EightWords *panel, float *out) {
    Eight sums[NUM][2] = {};
    for (int64_t k = 0; k < columns; k += 2, panel += 2)
        for (int64_t half = 0; half < 2; half++) {
            const Eight even = (Eight)(panel[half] << 16), odd = (Eight)(panel[half] & 0xFFFF0000u);
            for (int64_t row = 0; row < NUM; row++) {
                sums[row][half] += x[row * columns + k] * even;
                sums[row][half] += x[row * columns + k + 1] * odd;
            }
        }
    std::memcpy(out, sums, sizeof sums);
}

// As many rows as are left, up to ROWS.
template <int64_t NUM = ROWS>
static void times_panel(int64_t num, const float *x, int64_t columns, const EightWords *panel, float *out) {
    if (num >= NUM) return times_panel<NUM>(x, columns, panel, out);
    if constexpr (NUM > 1) times_panel<NUM - 1>(num, x, columns, panel, out);
}

// out (rows, outputs) = x (rows, columns) @ weight.T + bias, where there is one. `columns` is even.
extern "C" void linear_bfloat16(const float *x, const EightWords *weight, const bfloat16 *bias, bfloat16 *out,
                                int64_t rows, int64_t columns, int64_t outputs) {
#pragma omp parallel for
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const EightWords *panel = weight + first / PANEL * columns;
        for (int64_t row = 0; row < rows; row += ROWS) {
            float sums[ROWS * PANEL];
            const int64_t num = std::min(ROWS, rows - row);
            times_panel(num, x + row * columns, columns, panel, sums);
            for (int64_t i = 0; i < num; i++)
                for (int64_t j = 0; j < std::min(PANEL, outputs - first); j++)
                    store(out[(row + i) * outputs + first + j],
                          sums[i * PANEL + j] + (bias ? load(bias[first + j]) : 0));
        }
    }
}

// For weights of 4 or 8 bits in blocks of 32 columns, each block with a scale and a least value of its own: a
// number n of BITS bits, put behind the exponent of 1, is the float 1 + n / 2^BITS. So three instructions
// widen eight of them, and what they are too large by is taken from the block's sum. They lie in panels of
// 16 outputs, in words of one output's columns.
static const int64_t BLOCK = 32;

template <int BITS, int COLUMN> static inline Eight widened(EightWords words) {
    const int up = 23 - BITS - COLUMN * BITS;  // from its place in the word to the top of a float's fraction
    const EightWords moved = up >= 0 ? words << (up >= 0 ? up : 0) : words >> (up >= 0 ? 0 : -up);
    return (Eight)((moved & ((1u << 23) - (1u << (23 - BITS)))) | 0x3F800000u);
}

// Add the columns of one word, from COLUMN on, to NUM rows' sums of 16 outputs.
template <int BITS, int64_t NUM, int COLUMN = 0>
static inline void times_word(const float *x, int64_t columns, const EightWords *words, Eight (&sums)[NUM][2]) {
    if constexpr (COLUMN < 32 / BITS) {
        for (int64_t half = 0; half < 2; half++) {
            const Eight weight = widened<BITS, COLUMN>(words[half]);
            for (int64_t row = 0; row < NUM; row++) sums[row][half] += x[row * columns + COLUMN] * weight;
        }
        times_word<BITS, NUM, COLUMN + 1>(x, columns, words, sums);
    }
}

// NUM rows of x times one panel. `steps` has for each block 16 scales and 16 least values; x_sums the sum of
// each block of x.
template <int BITS, int64_t NUM>
static void times_blocks(const float *x, const float *x_sums, int64_t columns, const EightWords *words,
                         const Eight *steps, float *out) {
    Eight totals[NUM][2] = {};
    for (int64_t k = 0; k < columns; k += BLOCK, steps += 4) {
        Eight sums[NUM][2] = {};
        for (int64_t word = 0; word < BITS; word++, words += 2)
            times_word<BITS>(x + k + word * (32 / BITS), columns, words, sums);
        for (int64_t row = 0; row < NUM; row++)
            for (int64_t half = 0; half < 2; half++)
                totals[row][half] += sums[row][half] * steps[half] +
                                     x_sums[(row * columns + k) / BLOCK] * steps[2 + half];
    }
    std::memcpy(out, totals, sizeof totals);
}

template <int BITS, int64_t NUM = ROWS>
static void times_blocks(int64_t num, const float *x, const float *x_sums, int64_t columns, const EightWords *words,
                         const Eight *steps, float *out) {
    if (num >= NUM) return times_blocks<BITS, NUM>(x, x_sums, columns, words, steps, out);
    if constexpr (NUM > 1) times_blocks<BITS, NUM - 1>(num, x, x_sums, columns, words, steps, out);
}

// out (rows, outputs) = x (rows, columns) @ weight.T + bias, where there is one. `columns` is a multiple of 32.
template <int BITS>
static void linear_blocks(const float *x, const EightWords *weight, const Eight *steps, const float *bias, float *out,
                          int64_t rows, int64_t columns, int64_t outputs) {
    std::vector<float> x_sums(rows * columns / BLOCK);
    for (int64_t i = 0; i < rows * columns; i++) x_sums[i / BLOCK] += x[i];
#pragma omp parallel for
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t blocks = first / PANEL * (columns / BLOCK);
        for (int64_t row = 0; row < rows; row += ROWS) {
            alignas(32) float sums[ROWS * PANEL];
            const int64_t num = std::min(ROWS, rows - row);
            times_blocks<BITS>(num, x + row * columns, &x_sums[row * columns / BLOCK], columns,
                               weight + blocks * BITS * 2, steps + blocks * 4, sums);
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
    extern "C" void attend_##NAME(const Attention *a) { attend<T>(*a); } \
    extern "C" void add_rms_norm_##NAME(T *x, const T *delta, const T *weight, T *out, int64_t rows, \
                                        int64_t size, double eps) { \
        add_rms_norm(x, delta, weight, out, rows, size, eps); \
    } \
    extern "C" void rope_##NAME(T *x, int64_t stride, const Sum<T> *cos, const Sum<T> *sin, int64_t rows, \
                                int64_t heads, int64_t half) { \
        rope(x, stride, cos, sin, rows, heads, half); \
    } \
    extern "C" void silu_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t size) { \
        silu_mul(gate_up, out, rows, size); \
    } \
    extern "C" void write_kv_##NAME(const T *k, const T *v, int64_t stride, T *k_cache, T *v_cache, \
                                    const int64_t *slots, int64_t rows, int64_t size) { \
        write_kv(k, v, stride, k_cache, v_cache, slots, rows, size); \
    }

FOR_TYPE(float, float32)
FOR_TYPE(bfloat16, bfloat16)
FOR_TYPE(double, float64)
