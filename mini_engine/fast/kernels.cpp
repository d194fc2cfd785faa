// Attention that reads the pages where they lie, and the small steps between two products.
//
// Kwon et al., PagedAttention (2023); the running softmax is Milakov and Gimelshein's (2018). Plain C++
// without torch's headers: it builds in seconds. kernels.py builds it, calls it, and checks the shapes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

// ------------------------------------------------------------------------------------------ attention

// What attention is given; kernels.py has the same fields in the same order. Strides count elements, from one row to the next.
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

// A row of a page as the sums need it: where it lies, or widened into `room`.
template <typename T> static inline const T *widened(const T *row, T *, int64_t) { return row; }
static inline const float *widened(const bfloat16 *row, float *room, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) room[i] = load(row[i]);
    return room;
}

// The query heads that share a key head, over a few rows of one request. DIM is head_dim where the
// compiler may know it, else 0.
template <typename T, int DIM>
static void attend_tile(const Attention &a, const int64_t *tile, int64_t kv_head, std::vector<Sum<T>> &room) {
    const int64_t dim = DIM ? DIM : a.head_dim, group = a.heads / a.kv_heads, size = a.block_size;
    const int64_t first = tile[1], num = (tile[2] - tile[1]) * group, stride = a.kv_heads * dim;
    const int64_t *table = a.tables + tile[0] * a.table_stride;
    room.assign(num * (2 * dim + 2) + size * (2 * dim + 1), 0);
    Sum<T> *q = room.data(), *out = q + num * dim, *best = out + num * dim, *total = best + num;
    Sum<T> *k_room = total + num, *v_room = k_room + size * dim, *weight = v_room + size * dim;
    const Sum<T> scale = 1 / std::sqrt(Sum<T>(dim));
    for (int64_t i = 0; i < num; i++) {
        const T *from = (const T *)a.q + (first + i / group) * a.q_stride + (kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d++) q[i * dim + d] = scale * load(from[d]);
        best[i] = -1e30f;
    }
    const int64_t last = a.positions[tile[2] - 1];
    for (int64_t start = 0; start <= last; start += size) {
        const int64_t page = (table[start / size] * size * a.kv_heads + kv_head) * dim;
        const int64_t filled = std::min(size, last + 1 - start);
        const Sum<T> *k[filled], *v[filled];
        for (int64_t j = 0; j < filled; j++) {
            k[j] = widened((const T *)a.k_cache + page + j * stride, k_room + j * dim, dim);
            v[j] = widened((const T *)a.v_cache + page + j * stride, v_room + j * dim, dim);
        }
        for (int64_t i = 0; i < num; i++) {
            // The keys of this page that the row may see: those up to its own position.
            const int64_t seen = std::min(filled, a.positions[first + i / group] + 1 - start);
            if (seen <= 0) continue;
            Sum<T> highest = best[i];
            for (int64_t j = 0; j < seen; j++) {
                Sum<T> score = 0;
#pragma omp simd reduction(+ : score)
                for (int64_t d = 0; d < dim; d++) score += q[i * dim + d] * k[j][d];
                weight[j] = score;
                highest = std::max(highest, score);
            }
            // The softmax runs along: what was summed so far shrinks when a higher score comes.
            const Sum<T> shrink = std::exp(best[i] - highest);
            Sum<T> sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < seen; j++) sum += weight[j] = std::exp(weight[j] - highest);
            best[i] = highest;
            total[i] = total[i] * shrink + sum;
            Sum<T> acc[DIM ? DIM : 1024];
            for (int64_t d = 0; d < dim; d++) acc[d] = out[i * dim + d] * shrink;
            for (int64_t j = 0; j < seen; j++)
#pragma omp simd
                for (int64_t d = 0; d < dim; d++) acc[d] += weight[j] * v[j][d];
            for (int64_t d = 0; d < dim; d++) out[i * dim + d] = acc[d];
        }
    }
    for (int64_t i = 0; i < num; i++) {
        T *to = (T *)a.out + ((first + i / group) * a.heads + kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d++) store(to[d], out[i * dim + d] / total[i]);
    }
}

template <typename T> static void attend(const Attention &a) {
    auto *tile_of = a.head_dim == 64    ? attend_tile<T, 64>
                    : a.head_dim == 128 ? attend_tile<T, 128>
                                        : attend_tile<T, 0>;
#pragma omp parallel
    {
        std::vector<Sum<T>> room;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a.num_tiles * a.kv_heads; i++)
            tile_of(a, a.tiles + i / a.kv_heads * 3, i % a.kv_heads, room);
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
