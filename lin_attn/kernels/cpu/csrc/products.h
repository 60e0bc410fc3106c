// Matrix products of small operands that lie in cache: C (m × n) = or += A (m × k) B (k × n), float32 sums always.
//
// An operand's elements are float or bf16. bf16 is multiplied two by two along k, for which A lies contiguous along k and B
// has rows 2i and 2i + 1 interleaved (operands.h).
//
// On vectors (vdpbf16ps for bf16), a tile of 6 rows, or 4 or 2 where they end, by as many vectors as there are registers
// for is kept in registers over all of k: 12 or 24 sums, which hide the latency of the multiply-add. Causal products have
// tiles of their own.

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "memory.h"
#include "problem.h"
#include "tiles.h"
#include "vectors.h"

namespace lin_attn {

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = REGISTERS == 32 ? 4 : 2;

// Element (i, k) at p[i · row + k · col].
template <class P>
struct Left {
    const P* p;
    Index row, col;

    Left from(Index i) const { return {p + i * row, row, col}; }
};

// Element (k, j) at p[k · ld + j] for float, at p[(k / 2 · ld + j) · 2 + k % 2] for bf16.
template <class P>
struct Right {
    const P* p;
    Index ld;
};

// Which elements are zero, and so are neither computed nor read beyond the tile that the diagonal crosses.
enum class Triangle {
    none,
    of_result,  // C (i, j) for j > i: what is left there is not meaningful
    of_left,    // A (i, k) for k > i; the pairs of bf16 keep to blocks of 2 W
};

namespace detail {

template <class P>
constexpr int K_STEP = sizeof(P) == 4 ? 1 : 2;

// What of A and of B meets in one step along k. For bf16 two products go into a sum: acc[j] + a[0] b[2j] + a[1] b[2j + 1].
inline Vec load_left(const float* p) { return splat(*p); }
inline Vec load_right(const float* p) { return load(p); }
inline Vec multiply_add(Vec acc, Vec a, Vec b) { return acc + a * b; }

#if LIN_ATTN_HAS_DPBF16 && LIN_ATTN_LANES == 16
using Pairs = __m512bh;
inline Pairs load_left(const bf16* p) {
    const __m512i pair = _mm512_set1_epi32(read<int32_t>(p));
    return read<__m512bh>(&pair);
}
inline Pairs load_right(const bf16* p) { return read<__m512bh>(p); }
inline Vec multiply_add(Vec acc, Pairs a, Pairs b) {
    const __m512 sums = _mm512_dpbf16_ps(read<__m512>(&acc), a, b);
    return read<Vec>(&sums);
}
#else  // the same in float32, for tests on machines without the instruction
struct Pairs {
    Vec even, odd;
};
inline Pairs load_left(const bf16* p) { return {splat(widen(read<bf16>(p))), splat(widen(read<bf16>(p + 1)))}; }
inline Pairs load_right(const bf16* p) {
    const BitVec both = read<BitVec>(p), even = both << 16, odd = both & 0xffff0000u;
    return {read<Vec>(&even), read<Vec>(&odd)};
}
inline Vec multiply_add(Vec acc, Pairs a, Pairs b) { return acc + a.even * b.even + a.odd * b.odd; }
#endif

template <class P, int rows, int vectors>
inline void tile(Index depth, Left<P> a, Right<P> b, float* c, Index ldc, bool add, Ahead& ahead) {
    constexpr int step = K_STEP<P>, unroll = 2 / step;  // two rows of B, in one or two steps, at a time
    constexpr bool LARGE = rows * vectors >= 16;        // two rows take long enough to ask for a line
    Vec acc[rows][vectors] = {};
    const P *left = a.p, *right = b.p;
    const char* const* line = ahead.lines();
    Index k = 0;
    do {  // at least once: no operand is empty
        if (LARGE || k % 4 == 0) __builtin_prefetch(*line++, 0, 2);
        for (int i = 0; i < unroll; ++i) {
            decltype(load_right(right)) row[vectors];
            for (int j = 0; j < vectors; ++j) row[j] = load_right(right + j * W * step);
            for (int i = 0; i < rows; ++i) {
                const auto entry = load_left(left + i * a.row);
                for (int j = 0; j < vectors; ++j) acc[i][j] = multiply_add(acc[i][j], entry, row[j]);
            }
            left += step * a.col;
            right += step * b.ld;
        }
        k += 2;
    } while (k < depth);
    ahead.asked(line - ahead.lines());
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < vectors; ++j) {
            float* to = c + i * ldc + j * W;
            store(to, add ? load(to) + acc[i][j] : acc[i][j]);
        }
}

template <class P, int rows, int vectors = TILE_VECTORS>
inline void tile_of(int n_vectors, Index depth, Left<P> a, Right<P> b, float* c, Index ldc, bool add, Ahead& ahead) {
    if (n_vectors == vectors) return tile<P, rows, vectors>(depth, a, b, c, ldc, add, ahead);
    if constexpr (vectors > 1) tile_of<P, rows, vectors - 1>(n_vectors, depth, a, b, c, ldc, add, ahead);
}

template <class P, int rows = TILE_ROWS>
inline void tile_of(
    int n_rows, int n_vectors, Index depth, Left<P> a, Right<P> b, float* c, Index ldc, bool add, Ahead& ahead) {
    if (n_rows == rows) return tile_of<P, rows>(n_vectors, depth, a, b, c, ldc, add, ahead);
    if constexpr (rows > 2) tile_of<P, rows - 2>(n_rows, n_vectors, depth, a, b, c, ldc, add, ahead);
}

// Columns of tiles go outermost, so that a tile's part of B stays in the first-level cache while A passes.
template <class P>
void multiply_in_vectors(
    Triangle triangle, bool add, Index m, Index n, Index k, Left<P> a, Right<P> b, float* c, Index ldc, Ahead& ahead) {
    constexpr Index block = sizeof(P) == sizeof(float) ? 2 : 2 * W;  // k is a multiple of it
    for (Index j = 0; j < n; j += TILE_VECTORS * W) {
        for (Index i = 0; i < m; i += TILE_ROWS) {
            const Index rows = std::min<Index>(TILE_ROWS, m - i);
            const Index columns = std::min(n, triangle == Triangle::of_result ? i + rows : n) - j;
            if (columns <= 0) continue;
            const Index vectors = std::min<Index>(TILE_VECTORS, (columns + W - 1) / W);
            const Index end = triangle == Triangle::of_left ? std::min(k, round_up(i + rows, block)) : k;
            const Left<P> left{a.p + i * a.row, a.row, a.col};
            const Right<P> right{b.p + j * K_STEP<P>, b.ld};
            tile_of<P>(rows, vectors, end, left, right, c + i * ldc + j, ldc, add, ahead);
        }
    }
}

#if LIN_ATTN_HAS_AMX
constexpr Index LINES_A_BLOCK = 24;  // that are asked for: a block takes as long as a few of them

inline void multiply_in_tiles(
    Triangle triangle, bool add, Index m, Index n, Index k, Left<bf16> a, Right<bf16> b, float* c, Index ldc, Ahead& ahead) {
    constexpr auto blocks = std::array{amx_block<1, 1>, amx_block<1, 2>, amx_block<2, 1>, amx_block<2, 2>};
    for (Index i = 0; i < m; i += 32) {
        const bool down = i + 16 < m;
        const Index columns = triangle == Triangle::of_result ? std::min(n, i + 32) : n;
        const Index end = triangle == Triangle::of_left ? std::min(k, i + 32) : k;
        for (Index j = 0; j < columns; j += 32) {
            ahead.ask(LINES_A_BLOCK);
            const bool across = j + 16 < columns;
            const auto* left = reinterpret_cast<const char*>(a.p + i * a.row);
            const auto* right = reinterpret_cast<const char*>(b.p + 2 * j);
            blocks[2 * down + across](end, left, 2 * a.row, right, 4 * b.ld, c + i * ldc + j, ldc, add);
        }
    }
}
#endif

}  // namespace detail

// C (m × n, row stride ldc) = A B, or += it; m is even, n a multiple of W; k is a multiple of 2, of 2 W for bf16.
inline void multiply(
    Triangle triangle, bool add, Index m, Index n, Index k, Left<float> a, Right<float> b, float* c, Index ldc, Ahead& ahead) {
    detail::multiply_in_vectors(triangle, add, m, n, k, a, b, c, ldc, ahead);
}

inline void multiply(
    Triangle triangle, bool add, Index m, Index n, Index k, Left<bf16> a, Right<bf16> b, float* c, Index ldc, Ahead& ahead) {
#if LIN_ATTN_HAS_AMX
    detail::multiply_in_tiles(triangle, add, m, n, k, a, b, c, ldc, ahead);
#else
    detail::multiply_in_vectors(triangle, add, m, n, k, a, b, c, ldc, ahead);
#endif
}

// C = tril(A K) V + A S: of queries, keys, values and state, what causal attention makes of a chunk.
// K (k × keys), V (keys × columns), S (k × columns).
template <class P>
struct CausalProduct {
    Index k, columns;
    Left<P> a;
    Right<P> key, value, state;
};

constexpr int CAUSAL_ROWS = 4;

// So many of its rows, of float or bf16.
template <class C>
struct CausalRows {
    Index first;
    C* c;
    Index ldc;
    bool add = false;              // C += tril(A K) V, the state's part being there; of float
    const float* scale = nullptr;  // of each row of the chunk, unless null; not with `add`
};

// Whether `multiply_causal` is there for P: for pairs of bfloat16 where a chunk is one block of them, and tiles are not better.
template <class P>
constexpr bool MULTIPLIES_CAUSAL = sizeof(P) == sizeof(float) || (2 * W == CHUNK && !LIN_ATTN_HAS_AMX);

namespace detail {

// tril(A K) as the left operand of V: rows of float; or of pairs, in the first half of a row of floats.
template <class P>
inline Left<P> as_weights(const float* scores, Index keys) {
    return {reinterpret_cast<const P*>(scores), keys * Index(sizeof(float) / sizeof(P)), 1};
}

// The scores (j ≤ i) of row i of the chunk's, in pairs.
inline void keep_pairs(Vec low, Vec high, Index i, float* to) {
    const BitVec pairs = interleave(first_lanes(low, i + 1), first_lanes(high, i + 1 - W));
    store(to, read<Vec>(&pairs));
}

// Scores that lie there as floats, without those right of the diagonal, as far as V is read.
inline void hide_later_keys(Left<float>, float* scores, Index keys, Index first) {
#pragma GCC unroll 4
    for (int i = 0; i < CAUSAL_ROWS; ++i)
#pragma GCC unroll 4
        for (int j = i + 1; j < CAUSAL_ROWS; ++j) scores[i * keys + first + j] = 0;
}

inline void hide_later_keys(Left<bf16>, float* scores, Index keys, Index first) {
    for (int i = 0; i < CAUSAL_ROWS; ++i, scores += keys) keep_pairs(load(scores), load(scores + W), first + i, scores);
}

// Column j of a tile: sums[i][j] += left[i] · right.
template <int rows, int vectors, class Entry>
inline void add_products(Vec (&sums)[rows][vectors], int j, const Entry (&left)[rows], Entry right) {
    for (int i = 0; i < rows; ++i) sums[i][j] = multiply_add(sums[i][j], left[i], right);
}

// One pass over k serves A K and A S, whose sums stay in registers for V. With the sums of A K if score_vectors is not 0, else
// from scores that are there.
template <int score_vectors, int vectors, class P, class C>
void causal_tile(const CausalProduct<P>& x, const CausalRows<C>& to, Index column, float* scores_at, Ahead& ahead) {
    constexpr int rows = CAUSAL_ROWS, step = K_STEP<P>;
    const Index keys = x.key.ld;
    const Left<P> weights = as_weights<P>(scores_at, keys);
    using Entry = decltype(load_left(weights.p));
    Vec sums[rows][vectors] = {}, scores[rows][score_vectors + 1] = {};
    const P *left = x.a.p + to.first * x.a.row, *state = x.state.p + column * step, *key = x.key.p;
    const char* const* line = ahead.lines();
    for (Index k = 0; k < x.k; k += 2) {
        __builtin_prefetch(*line++, 0, 2);
        for (int i = 0; i < 2; i += step) {
            Entry entry[rows];
            for (int i = 0; i < rows; ++i) entry[i] = load_left(left + i * x.a.row);
            for (int j = 0; j < vectors; ++j) add_products(sums, j, entry, load_right(state + j * W * step));
            for (int j = 0; j < score_vectors; ++j) add_products(scores, j, entry, load_right(key + j * W * step));
            left += step * x.a.col;
            state += step * x.state.ld;
            key += step * x.key.ld;
        }
    }
    if constexpr (score_vectors > 0 && step == 1) {
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < score_vectors; ++j) store(scores_at + i * keys + j * W, scores[i][j]);
        hide_later_keys(weights, scores_at, keys, to.first);
    } else if constexpr (score_vectors > 0) {  // scores[i][1] is 0 if there is but one vector
        Index first = to.first;
        asm("" : "+r"(first));  // GCC would make the masks before the loop, and have too few registers in it
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) keep_pairs(scores[i][0], scores[i][1], first + i, scores_at + i * keys);
    }
    const P *weight = weights.p, *value = x.value.p + column * step;
    const Index seen = to.first + rows, steps = step == 1 ? seen : std::min<Index>(seen, W);
    for (Index k = 0; k < steps; ++k, weight += step, value += step * x.value.ld) {
        __builtin_prefetch(*line++, 0, 2);
        Entry entry[rows];
        for (int i = 0; i < rows; ++i) entry[i] = load_left(weight + i * weights.row);
        for (int j = 0; j < vectors; ++j) add_products(sums, j, entry, load_right(value + j * W * step));
    }
    ahead.asked(x.k / 2 + steps);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
        const Vec scale = splat(to.scale == nullptr ? 1.0f : to.scale[to.first + i]);
        for (int j = 0; j < vectors; ++j) store(to.c + i * to.ldc + column + j * W, sums[i][j] * scale);
    }
}

template <int score_vectors, int vectors = TILE_VECTORS, class P, class C>
void causal_tile_of(
    Index n_vectors, const CausalProduct<P>& x, const CausalRows<C>& to, Index column, float* scores, Ahead& ahead) {
    if (n_vectors >= vectors) return causal_tile<score_vectors, vectors>(x, to, column, scores, ahead);
    constexpr int fewer = vectors - K_STEP<P>;
    if constexpr (fewer > 0) causal_tile_of<score_vectors, fewer>(n_vectors, x, to, column, scores, ahead);
}

}  // namespace detail

// CAUSAL_ROWS rows. `scores` has room for their tril(A K), in rows as long as those of K.
template <class P, class C>
inline void multiply_causal(const CausalProduct<P>& x, const CausalRows<C>& to, float* scores, Ahead& ahead) {
    constexpr bool PAIRS = sizeof(P) == sizeof(bf16);
    const Index seen = round_up(to.first + CAUSAL_ROWS, W), score_vectors = seen / W, keys = x.key.ld;
    Index column = 0;
    if ((REGISTERS == 32 || PAIRS) && score_vectors <= 2 && !to.add) {
        const Index vectors = std::min<Index>(x.columns / W, TILE_VECTORS);
        if (score_vectors == 1) detail::causal_tile_of<1>(vectors, x, to, 0, scores, ahead);
        else detail::causal_tile_of<2>(vectors, x, to, 0, scores, ahead);
        column = vectors * W;
    } else {
        multiply(Triangle::none, false, CAUSAL_ROWS, PAIRS ? keys : seen, x.k, x.a.from(to.first), x.key, scores, keys, ahead);
        detail::hide_later_keys(x.a, scores, keys, to.first);
    }
    if constexpr (std::is_same_v<C, float>)
        if (to.add)
            return multiply(
                Triangle::none, true, CAUSAL_ROWS, x.columns, PAIRS ? keys : to.first + CAUSAL_ROWS,
                detail::as_weights<P>(scores, keys), x.value, to.c, to.ldc, ahead);
    for (; column < x.columns; column += TILE_VECTORS * W)
        detail::causal_tile_of<0>((x.columns - column) / W, x, to, column, scores, ahead);
}

// x (rows × columns, row stride ld, both multiples of W) to its transpose.
inline void transpose(const float* x, Index ld, Index rows, Index columns, float* y, Index ldy) {
    for (Index i = 0; i < rows; i += W) {
        for (Index j = 0; j < columns; j += W) {
            Vec block[W];
            for (int r = 0; r < W; ++r) block[r] = load(x + (i + r) * ld + j);
            transpose_block(block);
            for (int r = 0; r < W; ++r) store(y + (j + r) * ldy + i, block[r]);
        }
    }
}

}  // namespace lin_attn
