// A few tokens' projection, y = x Wᵀ + b: what a step of decoding spends its time on, beside attention itself.
//
// Each weight is read once and used for all tokens while it is at hand; there is nothing to pack, and the threads get equal
// parts of W's rows. Sums are float32.

#pragma once

#include "memory.h"
#include "vectors.h"

namespace lin_attn {

template <class T>
struct Projection {
    const T *x, *weight, *bias;  // (tokens, in), (out, in), (out); null is no bias
    T* y;                        // (tokens, out)
    Index tokens, in, out;

    // Outputs `begin` to `end` of all tokens.
    void outputs(Index begin, Index end) const {
        Index i = begin;
        for (; i + 4 <= end; i += 4)
            for (Index t = 0; t < tokens; ++t) outputs<4>(t, i);
        for (; i < end; ++i)
            for (Index t = 0; t < tokens; ++t) outputs<1>(t, i);
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
void project(const Projection<T>& p, int threads) {
    const Index part = round_up((p.out + threads - 1) / threads, 4);
    parallel((p.out + part - 1) / part, threads, false, [&](Arena&, Index i) {
        p.outputs(i * part, std::min((i + 1) * part, p.out));
    });
}

}  // namespace lin_attn
