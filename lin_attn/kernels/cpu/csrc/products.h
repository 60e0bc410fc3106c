// Matrix products of small operands that lie in cache: C (m × n) = or += A (m × k) B (k × n), float32 sums always.
//
// An operand's element type P is float or bf16. bf16 is multiplied two by two along k (vdpbf16ps), for which A lies
// contiguous along k and B has rows 2i and 2i + 1 interleaved, see `pack`.
//
// A tile of 6 rows, or 4 or 2 where they end, by as many vectors as there are registers for is kept in registers over all
// of k: 12 or 24 sums, which hide the latency of the multiply-add.

#pragma once

#include <algorithm>
#include <array>

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
    of_result,   // C (i, j) for j > i: what is left there is not meaningful
    of_left,     // A (i, k) for k > i
    of_left_up,  // A (i, k) for k < i
};

namespace detail {

template <class P>
constexpr int K_STEP = sizeof(P) == 4 ? 1 : 2;

inline Vec multiply_add(Vec acc, const float* a, Vec b) { return acc + *a * b; }

// Two products a sum: acc[j] + a[0] b[2j] + a[1] b[2j + 1].
#if LIN_ATTN_HAS_DPBF16 && LIN_ATTN_LANES == 16
using Pairs = __m512bh;
inline Pairs load_pairs(const bf16* p) { return read<__m512bh>(p); }
inline Vec multiply_add(Vec acc, const bf16* a, Pairs b) {
    const __m512i pair = _mm512_set1_epi32(read<int32_t>(a));
    const __m512 sums = _mm512_dpbf16_ps(read<__m512>(&acc), read<__m512bh>(&pair), b);
    return read<Vec>(&sums);
}
#else  // the same in float32, for tests on machines without the instruction
struct Pairs {
    Vec even, odd;
};
inline Pairs load_pairs(const bf16* p) {
    const BitVec both = read<BitVec>(p), even = both << 16, odd = both & 0xffff0000u;
    return {read<Vec>(&even), read<Vec>(&odd)};
}
inline Vec multiply_add(Vec acc, const bf16* a, Pairs b) {
    return acc + widen(a[0]) * b.even + widen(a[1]) * b.odd;
}
#endif

inline Vec load_right(const float* p) { return load(p); }
inline Pairs load_right(const bf16* p) { return load_pairs(p); }

template <class P, int rows, int vectors>
inline void tile(Index k_begin, Index k_end, Left<P> a, Right<P> b, float* c, Index ldc, bool add) {
    constexpr int step = K_STEP<P>;
    Vec acc[rows][vectors] = {};
    const P* left = a.p + k_begin * a.col;
    const P* right = b.p + k_begin * b.ld;
    Index k = k_begin;
    do {  // at least once: no operand is empty
        decltype(load_right(right)) row[vectors];
        for (int j = 0; j < vectors; ++j) row[j] = load_right(right + j * W * step);
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < vectors; ++j) acc[i][j] = multiply_add(acc[i][j], left + i * a.row, row[j]);
        left += step * a.col;
        right += step * b.ld;
        k += step;
    } while (k < k_end);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < vectors; ++j) {
            float* to = c + i * ldc + j * W;
            store(to, add ? load(to) + acc[i][j] : acc[i][j]);
        }
}

template <class P, int rows, int vectors = TILE_VECTORS>
inline void tile_of(int n_vectors, Index k0, Index k1, Left<P> a, Right<P> b, float* c, Index ldc, bool add) {
    if (n_vectors == vectors) return tile<P, rows, vectors>(k0, k1, a, b, c, ldc, add);
    if constexpr (vectors > 1) tile_of<P, rows, vectors - 1>(n_vectors, k0, k1, a, b, c, ldc, add);
}

template <class P, int rows = TILE_ROWS>
inline void tile_of(int n_rows, int n_vectors, Index k0, Index k1, Left<P> a, Right<P> b, float* c, Index ldc, bool add) {
    if (n_rows == rows) return tile_of<P, rows>(n_vectors, k0, k1, a, b, c, ldc, add);
    if constexpr (rows > 2) tile_of<P, rows - 2>(n_rows, n_vectors, k0, k1, a, b, c, ldc, add);
}

}  // namespace detail

namespace detail {

// Columns of tiles go outermost, so that a tile's part of B stays in the first-level cache while A passes.
template <class P>
void multiply_in_vectors(
    Triangle triangle, bool add, Index m, Index n, Index k, Left<P> a, Right<P> b, float* c, Index ldc) {
    constexpr Index step = K_STEP<P>;
    for (Index j = 0; j < n; j += TILE_VECTORS * W) {
        for (Index i = 0; i < m; i += TILE_ROWS) {
            const Index rows = std::min<Index>(TILE_ROWS, m - i);
            const Index columns = std::min(n, triangle == Triangle::of_result ? i + rows : n) - j;
            if (columns <= 0) continue;
            const Index vectors = std::min<Index>(TILE_VECTORS, (columns + W - 1) / W);
            const Index begin = triangle == Triangle::of_left_up ? i / step * step : 0;
            const Index end = round_up(triangle == Triangle::of_left ? std::min(k, i + rows) : k, step);
            const Left<P> left{a.p + i * a.row, a.row, a.col};
            const Right<P> right{b.p + j * step, b.ld};
            tile_of<P>(rows, vectors, begin, end, left, right, c + i * ldc + j, ldc, add);
        }
    }
}

#if LIN_ATTN_HAS_AMX
// k a multiple of 32.
inline void multiply_in_tiles(
    Triangle triangle, bool add, Index m, Index n, Index k, Left<bf16> a, Right<bf16> b, float* c, Index ldc) {
    constexpr auto blocks = std::array{amx_block<1, 1>, amx_block<1, 2>, amx_block<2, 1>, amx_block<2, 2>};
    for (Index i = 0; i < m; i += 32) {
        const bool down = i + 16 < m;
        const Index columns = triangle == Triangle::of_result ? std::min(n, i + 32) : n;
        const Index begin = triangle == Triangle::of_left_up ? i : 0;
        const Index end = triangle == Triangle::of_left ? std::min(k, i + 32) : k;
        for (Index j = 0; j < columns; j += 32) {
            const bool across = j + 16 < columns;
            const auto *left = reinterpret_cast<const char*>(a.p + i * a.row), *right = reinterpret_cast<const char*>(b.p + 2 * j);
            blocks[2 * down + across](begin, end, left, 2 * a.row, right, 4 * b.ld, c + i * ldc + j, ldc, add);
        }
    }
}
#endif

}  // namespace detail

// C (m × n, both multiples of W, row stride ldc) = A B, or += it.
template <class P>
void multiply(Triangle triangle, bool add, Index m, Index n, Index k, Left<P> a, Right<P> b, float* c, Index ldc) {
#if LIN_ATTN_HAS_AMX
    if constexpr (sizeof(P) == 2) {
        if (k % 32 == 0 && tiles_permitted()) return detail::multiply_in_tiles(triangle, add, m, n, k, a, b, c, ldc);
    }
#endif
    detail::multiply_in_vectors<P>(triangle, add, m, n, k, a, b, c, ldc);
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

// x (rows × columns, row stride ld) to y as a right operand: rows 2i and 2i + 1 interleaved; a missing last row is zero.
inline void pack(const float* x, Index ld, Index rows, Index columns, bf16* y) {
    for (Index i = 0; i < rows; i += 2) {
        for (Index j = 0; j < columns; j += W) {
            const BitVec both = interleave(load(x + i * ld + j), i + 1 < rows ? load(x + (i + 1) * ld + j) : Vec{});
            std::memcpy(y + i * columns + 2 * j, &both, sizeof both);
        }
    }
}

}  // namespace lin_attn
