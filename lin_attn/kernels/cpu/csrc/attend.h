// One token of each sequence through a layer of attention: queries, keys and values, a step, and what the output's
// projection makes of it.

#pragma once

#include "project.h"
#include "step.h"

namespace lin_attn {

// p says all but q, k, v, out and denominators. x is (B, in), and its layers are those of queries, keys, values and outputs,
// of which only the last has its y.
template <class T>
void attend(Problem p, const void* x, Index in, const Layer* layers, bool normalize, int threads) {
    Arena& memory = arena_of_sums();
    memory.start(p.poison);
    const auto heads_of = [&](Index heads) {
        const Index floats = (p.batch * heads * p.dim * sizeof(T) + sizeof(float) - 1) / sizeof(float);
        return Tensor{memory.take(floats), {heads * p.dim, p.dim, p.dim, 1}};
    };
    p.q = heads_of(p.heads), p.k = heads_of(p.kv_heads), p.v = heads_of(p.kv_heads), p.out = heads_of(p.heads);
    p.denominators = normalize ? memory.take(p.batch * p.heads) : nullptr;

    Layer inner[3] = {layers[0], layers[1], layers[2]};
    inner[0].y = p.q.data, inner[1].y = p.k.data, inner[2].y = p.v.data;
    project<T>(x, inner, 3, p.batch, in, threads);
    step(p);
    project<T>(p.out.data, layers + 3, 1, p.batch, p.heads * p.dim, threads);
    memory.finish();
}

}  // namespace lin_attn
