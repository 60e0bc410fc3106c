// Vectors of float32 as wide as the target's registers, written with the vector types that GCC and Clang share: the same
// lines become AVX-512, AVX2, NEON or SSE2.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && !defined(LIN_ATTN_LANES)
#define LIN_ATTN_HAS_DPBF16 1
#else
#define LIN_ATTN_HAS_DPBF16 0
#endif

// How many floats a vector holds. Tests set other widths than the target's; the compiler then splits or pads them.
#if !defined(LIN_ATTN_LANES)
#if defined(__AVX512F__)
#define LIN_ATTN_LANES 16
#elif defined(__AVX__)
#define LIN_ATTN_LANES 8
#else
#define LIN_ATTN_LANES 4
#endif
#endif

// For what is called once a row or a vector: compilers judge it too large, and a call would reload its constants.
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace lin_attn {

using Index = int64_t;

constexpr int W = LIN_ATTN_LANES;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IntVec __attribute__((vector_size(W * 4)));
typedef uint32_t BitVec __attribute__((vector_size(W * 4)));
typedef float HalfVec __attribute__((vector_size(W * 2)));
typedef uint16_t ShortVec __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};

constexpr Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

inline Vec splat(float x) { return x - Vec{}; }  // minus: 0 + (−0) would lose the sign

template <class V, class T>
inline V read(const T* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline Vec load(const float* p) { return read<Vec>(p); }

inline Vec load(const bf16* p) {
    const BitVec bits = __builtin_convertvector(read<ShortVec>(p), BitVec) << 16;
    return read<Vec>(&bits);
}

// At any address; unlike a copy of bytes, it is not taken to change anything but floats.
typedef float LooseVec __attribute__((vector_size(W * 4), aligned(4)));
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }

// To bfloat16, to nearest, ties to even; a NaN stays one.
inline ShortVec narrow(Vec x) {
#if LIN_ATTN_HAS_DPBF16 && LIN_ATTN_LANES == 16
    const __m256bh y = _mm512_cvtneps_pbh(read<__m512>(&x));
    return read<ShortVec>(&y);
#else
    const BitVec bits = read<BitVec>(&x);
    const BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const BitVec quiet = (bits >> 16) | 0x40u;
    return __builtin_convertvector(x != x ? quiet : rounded, ShortVec);
#endif
}

// Two vectors to bfloat16, the first's entries in the lower halves of 32 bits.
inline BitVec interleave(Vec low, Vec high) {
#if LIN_ATTN_HAS_DPBF16 && LIN_ATTN_LANES == 16
    const __m512bh side_by_side = _mm512_cvtne2ps_pbh(read<__m512>(&high), read<__m512>(&low));
    const __m512i even_odd = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = _mm512_permutexvar_epi16(even_odd, read<__m512i>(&side_by_side));
    return read<BitVec>(&both);
#else
    return __builtin_convertvector(narrow(low), BitVec) | (__builtin_convertvector(narrow(high), BitVec) << 16);
#endif
}

// Two vectors in memory likewise.
inline BitVec interleave(const float* low, const float* high) { return interleave(load(low), load(high)); }

inline BitVec interleave(const bf16* low, const bf16* high) {
    const auto widened = [](const bf16* p) { return __builtin_convertvector(read<ShortVec>(p), BitVec); };
    return widened(low) | (widened(high) << 16);
}

inline void store(bf16* p, Vec x) {
    const ShortVec y = narrow(x);
    std::memcpy(p, &y, sizeof y);
}

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    return read<float>(&bits);
}

inline void put(float* p, float x) { *p = x; }

inline void put(bf16* p, float x) {
    const ShortVec y = narrow(splat(x));
    p->bits = y[0];
}


inline Vec maximum(Vec x, Vec bound) {  // NaN stays
#if defined(__AVX512F__) && LIN_ATTN_LANES == 16
    const __m512 larger = _mm512_max_ps(read<__m512>(&bound), read<__m512>(&x));  // of a NaN and a number, the second
    return read<Vec>(&larger);
#else
    return x < bound ? bound : x;
#endif
}

// exp(x) for x ≤ 0, to 2 ulp; below −86, where it leaves the normal numbers, exp(−86) = 4·10⁻³⁸, which is positive. For
// x > 0 what comes out means nothing.
//
// With n = round(x / u) and r = x − n u in two parts (Cody and Waite), exp(x) = exp(n u) exp(r).
//     AVX-512: u = ln 2 / 16. exp(n u) is one of 16 numbers, which a register holds, times a power of two: n's lowest 4 bits
//              choose the number, and what is above them is added to its exponent. On |r| ≤ u / 2 the Taylor polynomial of
//              degree 3 is exp(r) to 10⁻⁸.
//     else:    u = ln 2. exp(r) is the polynomial 1 + r + … of degree 6 that is nearest to it on |r| ≤ u / 2, to 4·10⁻⁹ of its
//              value, summed by halves, for a shorter chain of dependent operations.
inline Vec exp_nonpositive(Vec x) {
    x = maximum(x, splat(-86.0f));
    const float magic = 12582912.0f;  // 1.5 · 2²³: added, it leaves the rounded integer in the lowest bits
#if defined(__AVX512F__) && LIN_ATTN_LANES == 16
    // 2^(i / 16), less what i, shifted by 19, will add to it: n's lowest bits come into the mantissa with the exponent.
    const Vec powers = {1.0f,        1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f,
                        1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f, 1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
    const BitVec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const BitVec table = read<BitVec>(&powers) - (numbers << 19);
    const Vec shifted = x * 23.08312f + magic;
    const Vec n = shifted - magic;
    Vec r = x - n * 0.043319702f;
    r = r - n * 1.9966365e-06f;
    const __m512i chosen = _mm512_permutexvar_epi32(read<__m512i>(&shifted), read<__m512i>(&table));  // by the lowest 4 bits
    const BitVec scaled = read<BitVec>(&chosen) + (read<BitVec>(&shifted) << 19);
    const Vec power = read<Vec>(&scaled), p = r * r * (r * 0.166666667f + 0.5f) + r;
    return power * p + power;
#else
    const Vec shifted = x * 1.44269504f + magic;
    const Vec n = shifted - magic;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    const Vec r2 = r * r;
    const Vec low = r2 * (r * 1.66665211e-1f + 4.9999994e-1f) + (r + 1.0f);
    const Vec high = r2 * 1.38145394e-3f + (r * 8.36874545e-3f + 4.1668389e-2f);
    const Vec p = (r2 * r2) * high + low;
    const BitVec scaled = read<BitVec>(&p) + (read<BitVec>(&shifted) << 23);
    return read<Vec>(&scaled);
#endif
}

namespace detail {

template <int... i>
inline Vec swap_pairs(Vec x, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(x, x, (i ^ 1)...);
}

template <int... i>
inline Vec twice(HalfVec x, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(x, x, (i / 2)...);
}

template <int... i>
inline IntVec lane_numbers(std::integer_sequence<int, i...>) {
    return IntVec{i...};
}

template <int... i>
inline Vec even_odd(Vec even, Vec odd, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(even, odd, (i % 2 ? W + i : i)...);
}

// Of two rows that lie `step` apart in a block, the first (upper = false) or second row after blocks of `step` entries
// have changed places across the diagonal.
template <int step, bool upper, int... i>
inline Vec exchange(Vec a, Vec b, std::integer_sequence<int, i...>) {
    return upper ? __builtin_shufflevector(a, b, ((i & step) ? W + i : i + step)...)
                 : __builtin_shufflevector(a, b, ((i & step) ? W + i - step : i)...);
}

// x with its lanes moved by `step`, round.
template <int step, int... i>
inline Vec turn(Vec x, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(x, x, ((i + step) % W)...);
}

using Lanes = std::make_integer_sequence<int, W>;

// The sum over lanes in each lane, by halves: the lanes' own order would be a chain of W dependent additions.
template <int step>
inline Vec sum_lanes(Vec x) {
    x += turn<step>(x, Lanes{});
    if constexpr (step > 1) return sum_lanes<step / 2>(x);
    return x;
}

template <int step>
inline void exchange_all(Vec (&rows)[W]) {
    if constexpr (step > 0) {
        for (int i = 0; i < W; ++i) {
            if (i & step) continue;
            const Vec a = rows[i], b = rows[i + step];
            rows[i] = exchange<step, false>(a, b, Lanes{});
            rows[i + step] = exchange<step, true>(a, b, Lanes{});
        }
        exchange_all<step / 2>(rows);
    }
}

}  // namespace detail

// x with zeros in all lanes but the first n.
inline Vec first_lanes(Vec x, int32_t n) { return detail::lane_numbers(detail::Lanes{}) < n ? x : Vec{}; }

// (x0, x1, x2, x3, …) → (x1, x0, x3, x2, …)
inline Vec swap_pairs(Vec x) { return detail::swap_pairs(x, detail::Lanes{}); }

// (x0, x1, …) of half the width → (x0, x0, x1, x1, …)
inline Vec twice(const float* p) { return detail::twice(read<HalfVec>(p), detail::Lanes{}); }

inline float sum(Vec x) { return detail::sum_lanes<W / 2>(x)[0]; }

// x y − z in even lanes, x y + z in odd ones.
inline Vec multiply_subtract_add(Vec x, Vec y, Vec z) {
#if defined(__AVX512F__) && LIN_ATTN_LANES == 16
    const __m512 result = _mm512_fmaddsub_ps(read<__m512>(&x), read<__m512>(&y), read<__m512>(&z));
    return read<Vec>(&result);
#else
    return detail::even_odd(x * y - z, x * y + z, detail::Lanes{});
#endif
}

// Transposes a W × W block in registers.
inline void transpose_block(Vec (&rows)[W]) { detail::exchange_all<W / 2>(rows); }

}  // namespace lin_attn
