// A few tokens' projections, y = x Wᵀ + b or gelu of that: what a step of decoding spends its time on, beside attention itself.
//
// Each weight is read once and used for all tokens while it is at hand; there is nothing to pack. Several layers of one x
// are one after the other in the rows of W that threads get equal parts of. Sums are float32.

#pragma once

#include "memory.h"
#include "vectors.h"

namespace lin_attn {

// lin_attn/kernels/cpu/calls.py writes these.
struct Layer {
    const void *weight, *bias;  // (out, in) and (out); null is no bias
    void* y;                    // (tokens, out)
    int64_t out;
    int64_t gelu;  // whether y is gelu(x Wᵀ + b)
};

// x Φ(x), Φ the normal distribution's, to 2·10⁻⁶ of its value, and to 2·10⁻⁵ where x < −4.8 and Φ < 10⁻⁶.
//
// Φ(−√2 t) = erfc(t) / 2, and erfc(t) = u exp(P(u) − t²) with u = 1 / (1 + t/2) and a polynomial P (Press et al., Numerical
// Recipes in C, §6.2). This P is of degree 8 in u − 5/8, fitted to log(erfc(t) / u) + t² at Chebyshev nodes of 0.2 ≤ u ≤ 1,
// t ≤ 8, where it is off by 4·10⁻⁷ at most.
inline Vec gelu(Vec x) {
    const Vec t = (x < Vec{} ? -x : x) * 0.707106781f, u = 1.0f / (t * 0.5f + 1.0f), h = u - 0.625f;
    Vec p = splat(0.104708083f);
    for (const float coefficient : {-0.160198018f, -0.101847261f, 0.270242244f, 0.0238278452f, -0.407999545f, 0.0396404564f,
                                    1.3741653f, -0.50143683f})
        p = p * h + coefficient;
    const Vec exponent = p - t * t;  // at t = 0 it is 0 but for rounding
    const Vec tail = u * exp_nonpositive(exponent > Vec{} ? Vec{} : exponent) * 0.5f;
    return x * (x < Vec{} ? tail : 1.0f - tail);
}

template <class T>
void gelu(T* x, Index n) {
    for (; n >= W; x += W, n -= W) store(x, gelu(load(x)));
    T last[W] = {};
    std::copy_n(x, n, last);
    store(last, gelu(load(last)));
    std::copy_n(last, n, x);
}

template <class T>
struct Projection {
    const T *x, *weight, *bias;
    T* y;
    Index tokens, in, out;
    bool activated;

    Projection(const void* x, const Layer& layer, Index tokens, Index in)
        : x(static_cast<const T*>(x)),
          weight(static_cast<const T*>(layer.weight)),
          bias(static_cast<const T*>(layer.bias)),
          y(static_cast<T*>(layer.y)),
          tokens(tokens),
          in(in),
          out(layer.out),
          activated(layer.gelu) {}

    // Outputs `begin` to `end` of all tokens.
    void outputs(Index begin, Index end) const {
        Index i = begin;
        for (; i + 4 <= end; i += 4)
            for (Index t = 0; t < tokens; ++t) outputs<4>(t, i);
        for (; i < end; ++i)
            for (Index t = 0; t < tokens; ++t) outputs<1>(t, i);
        for (Index t = 0; activated && begin < end && t < tokens; ++t) gelu(y + t * out + begin, end - begin);
    }

  private:
    // n outputs of a token: two sums each, so that no addition waits for the one before.
    template <int n>
    void outputs(Index token, Index first) const {
        const T *row = x + token * in, *w = weight + first * in;
        Vec even[n] = {}, odd[n] = {};
        Index j = 0;
        for (; j + 2 * W <= in; j += 2 * W) {
            const Vec left = load(row + j), right = load(row + j + W);
            for (int k = 0; k < n; ++k) {
                even[k] += left * load(w + k * in + j);
                odd[k] += right * load(w + k * in + j + W);
            }
        }
        for (int k = 0; k < n; ++k) {
            float total = sum(even[k] + odd[k]);
            for (Index i = j; i < in; ++i) total += widen(row[i]) * widen(w[k * in + i]);
            if (bias != nullptr) total += widen(bias[first + k]);
            put(y + token * out + first + k, total);
        }
    }
};

template <class T>
void project(const void* x, const Layer* layers, Index count, Index tokens, Index in, int threads) {
    Index rows = 0;
    for (Index l = 0; l < count; ++l) rows += layers[l].out;
    if (rows == 0) return;
    const Index part = round_up((rows + threads - 1) / threads, 4);
    parallel((rows + part - 1) / part, threads, false, [&](Arena&, Index i) {
        Index begin = i * part, end = begin + part;  // from this layer's first row
        for (Index l = 0; l < count; begin -= layers[l].out, end -= layers[l].out, ++l)
            Projection<T>(x, layers[l], tokens, in).outputs(std::max<Index>(begin, 0), std::min(end, layers[l].out));
    });
}

}  // namespace lin_attn
