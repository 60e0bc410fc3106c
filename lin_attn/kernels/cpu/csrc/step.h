// One token: S' = S + k̃ vᵀ, z' = z + k̂, out = q̃ᵀ S' / (q̂ · z'), in one pass over S.

#pragma once

#include <cmath>

#include "memory.h"
#include "problem.h"
#include "rows.h"

namespace lin_attn {

inline void step_of_pair(const Problem& p, Arena& arena, Index pair) {
    arena.clear();
    const Index batch = pair / p.kv_heads, kv_head = pair % p.kv_heads, groups = p.heads / p.kv_heads;
    const Index dim = p.dim, M = p.value_dim, padded_dim = round_up(dim, W), padded_M = round_up(M, W);
    const auto with_map = [&](const Rows& x, const auto& body) {
        with(static_cast<Phi>(p.feature_map), static_cast<Rope>(p.rope), x, body);
    };
    const Angles angles{p.cos, p.sin};
    float* buffer = arena.take(std::max(padded_dim, padded_M));

    float *k_num = arena.take(padded_dim), *k_den = arena.take(padded_dim), *v = arena.take(padded_M);
    const bool hidden = p.key_mask != nullptr && !p.key_mask[batch * p.key_mask_stride[0]];
    if (!hidden) {
        const Rows x = rows_of(p, p.k, batch, kv_head, dim);
        with_map(x, [&](auto map) {
            features(map, read_row(map, x, 0, buffer), dim, angles, k_num, [&](Index j, Vec plain) INLINE_LAMBDA {
                store(k_den + j, plain);
            });
        });
        std::copy_n(read_row(rows_of(p, p.v, batch, kv_head, M), 0, buffer), padded_M, v);
    } else {
        std::fill_n(k_num, padded_dim, 0.0f);
        std::fill_n(k_den, padded_dim, 0.0f);
        std::fill_n(v, padded_M, 0.0f);
    }
    float *q_num = arena.take(groups * padded_dim), *q_den = arena.take(groups * padded_dim);
    float *out = arena.take(groups * padded_M), *z = arena.take(padded_dim);
    std::fill_n(out, groups * padded_M, 0.0f);
    std::fill_n(z, padded_dim, 0.0f);
    with_map(rows_of(p, p.q, batch, kv_head * groups, dim), [&](auto map) {
        for (Index g = 0; g < groups; ++g) {
            const Rows x = rows_of(p, p.q, batch, kv_head * groups + g, dim);
            float *num = q_num + g * padded_dim, *den = q_den + g * padded_dim;
            features(map, read_row(map, x, 0, buffer), dim, angles, num, [&](Index j, Vec plain) INLINE_LAMBDA {
                store(den + j, plain);
            });
        }
    });

    for (Index i = 0; i < dim; ++i) {
        const float* before = p.kv + (pair * dim + i) * M;
        float* after = p.new_kv + (pair * dim + i) * M;
        Index j = 0;
        for (; j + W <= M; j += W) {
            const Vec row = load(before + j) + k_num[i] * load(v + j);
            store(after + j, row);
            for (Index g = 0; g < groups; ++g) {
                float* to = out + g * padded_M + j;
                store(to, load(to) + q_num[g * padded_dim + i] * row);
            }
        }
        for (; j < M; ++j) {
            after[j] = before[j] + k_num[i] * v[j];
            for (Index g = 0; g < groups; ++g) out[g * padded_M + j] += q_num[g * padded_dim + i] * after[j];
        }
        z[i] = p.k_sum[pair * dim + i] + k_den[i];
        p.new_k_sum[pair * dim + i] = z[i];
    }
    for (Index g = 0; g < groups; ++g) {
        const Index head = kv_head * groups + g;
        float* row = out + g * padded_M;
        if (p.denominators != nullptr) {
            const float d = floored(dot(q_den + g * padded_dim, z, padded_dim), p.eps);
            p.denominators[batch * p.heads + head] = d;
            scale_row(row, 1 / d, row, padded_M);
        }
        write_row(rows_of(p, p.out, batch, head, M), 0, row);
    }
}

inline void step(const Problem& p) {
    parallel(p.batch * p.kv_heads, p.threads, p.poison, [&](Arena& arena, Index pair) { step_of_pair(p, arena, pair); });
}

}  // namespace lin_attn
