// One head of keys and values, and the heads of queries that share it, scanned in chunks of 32 tokens.
//
// With q̃, k̃ the rotated features and q̂, k̂ the plain ones, A = tril(q̃ k̃ᵀ) within a chunk, S and z the sums before it:
//
//     out = (A v + q̃ S) / d,   d = q̂ · (z + cumsum k̂),   then S ← S + k̃ᵀ v,  z ← z + Σ k̂
//
// and backward, with g = ∂out / d, Q = tril(g vᵀ), and dS, dz the sums from the right:
//
//     ∂q̃ = Q k̃ + g Sᵀ          ∂d = −(q̃ · ∂q̃) / d, as out · ∂out = q̃ · ∂q̃
//     ∂k̃ = Qᵀ q̃ + v dSᵀ        ∂v = Aᵀ g + k̃ dS
//     ∂q̂ = ∂d (z + cumsum k̂)   ∂k̂ = dz + reverse cumsum (∂d q̂),   then dS ← dS + q̃ᵀ g,  dz ← dz + Σ ∂d q̂
//
// In a chunk that is read from right to left Aᵀ and Qᵀ are lower triangular too: one product, tril(X Y) V + X S, serves forward
// and both passes of backward.
//
// Without causality S and z hold all keys, dS and dz all queries, and A and Q do not occur.

#pragma once

#include "chunk.h"
#include "operands.h"
#include "products.h"

namespace lin_attn {

// S (or dS), padded dims, and z (or dz), one after the other.
struct Sums {
    float *s, *z;
};

// P: the element type of the products' operands; D and M are multiples of 2 W if it is bf16.
template <class P>
class Scan : private Chunk {
    static constexpr bool FLOAT = sizeof(P) == sizeof(float), BY_ROWS = MULTIPLIES_CAUSAL<P>;

    // So many rows go through all their products together, for what they leave in between to stay in the first-level cache.
    static constexpr Index BLOCK = BY_ROWS ? CAUSAL_ROWS : CHUNK;

  public:
    Scan(const Problem& problem, Arena& arena, Index pair) : Chunk(problem, arena, pair, !FLOAT) {}

    // sums += those of the keys from `begin` to `end`.
    void add_keys(Index begin, Index end, Sums sums) {
        for (Range now = from(begin, end), next; now.begin < end; now = next) {
            next = from(now.end, end);
            start_chunk(now, Scanned::to_right);
            expect_keys(next);
            share_lines(1);
            const Keys keys = read_keys(sums.z);
            product(true, D_, M_, rows_, of_chunk(keys.k, D_).left_transposed(), values(keys).right(), sums.s, M_);
        }
    }

    // out; sums goes from those before `begin` to those before `end` if causal, else it stays.
    void outputs(Index begin, Index end, Sums sums) {
        for (Range now = from(begin, end), next; now.begin < end; now = next) {
            next = from(now.end, end);
            start_chunk(now, Scanned::to_right);
            if (p_.causal) expect_keys(next);
            for (Index head = first_head_; head < last_head_; ++head) {
                expect(p_.q, head, p_.dim, next);
                expect(p_.out, head, p_.value_dim, next);
            }
            share_lines(p_.causal ? 2 : 1);
            const Right<P> s = Matrix<P>(arena_, sums.s, D_, M_).right();
            const Keys keys = p_.causal ? read_keys(sums.z) : Keys{};
            Matrix<P> k = of_chunk(keys.k, D_), v = values(keys);
            const Right<P> kt = p_.causal ? k.right_transposed() : Right<P>{};
            const Right<P> right_v = p_.causal ? v.right() : Right<P>{};
            float* out = arena_.take(BLOCK * M_);
            for (Index head = first_head_; head < last_head_; ++head) {
                const float* queries = p_.causal ? read_queries(head, keys.sums, D_) : read_queries(head, sums.z, 0);
                const Left<P> q = of_chunk(queries, D_).left();
                const CausalProduct<P> attention{D_, M_, q, kt, right_v, s};
                const float* scale = inverse_denominators(head);
                const Rows to = rows_of_chunk(p_.out, head, p_.value_dim);
                each_block([&](Index i, Index rows) {
                    if constexpr (BY_ROWS)
                        if (p_.causal && to.can_hold<P>() && i + rows <= length_)
                            return causal_product(attention, CausalRows<P>{i, to.elements<P>(i), to.row, false, scale});
                    if (p_.causal) causal_product(attention, CausalRows<float>{i, out, M_});
                    else product(false, rows, M_, D_, q.from(i), s, out, M_);
                    write_outputs(to, i, rows, out, scale);
                });
            }
            if (p_.causal) product(true, D_, M_, rows_, k.left_transposed(), right_v, sums.s, M_);
        }
    }

    // grad_q and slopes, from left to right; sums as in `outputs`. What the queries give to dS and dz is added to
    // `from_queries`, unless that is null.
    void query_gradients(Index begin, Index end, Sums sums, const Sums* from_queries) {
        Block st = allocate(M_ * D_, p_.poison);  // Sᵀ serves here: ∂q̃ = g Sᵀ
        transpose(sums.s, M_, D_, M_, st.get(), D_);
        for (Range now = from(begin, end), next; now.begin < end; now = next) {
            next = from(now.end, end);
            start_chunk(now, Scanned::to_right);
            if (p_.causal) expect_keys(next);
            for (Index head = first_head_; head < last_head_; ++head) {
                expect_queries(head, next);
                expect(p_.grad_q, head, p_.dim, next);
            }
            share_lines(p_.causal ? 3 : 2);
            const Right<P> right_st = Matrix<P>(arena_, st.get(), M_, D_).right();
            const Keys keys = p_.causal ? read_keys(sums.z) : Keys{};
            Matrix<P> k = of_chunk(keys.k, D_), v = values(keys);
            const Right<P> vt = p_.causal ? v.right_transposed() : Right<P>{};
            const Right<P> right_k = p_.causal ? k.right() : Right<P>{};
            float *grad = arena_.take(BLOCK * D_), *plain = from_queries == nullptr ? nullptr : arena_.take(rows_ * D_);
            for (Index head = first_head_; head < last_head_; ++head) {
                const float* queries = read_queries(head, [&](Index i, auto read) INLINE_LAMBDA {
                    if (plain == nullptr) read([](Index, Vec) {});
                    else read([&](Index j, Vec y) INLINE_LAMBDA { store(plain + i * D_ + j, y); });
                });
                Matrix<P> g = of_chunk(read_output_gradient(head), M_);
                const Left<P> left_g = g.left();
                const CausalProduct<P> of_q{M_, D_, left_g, vt, right_k, right_st};
                each_block([&](Index i, Index rows) {
                    if (p_.causal) {
                        causal_product(of_q, CausalRows<float>{i, grad, D_});
                        write_query_gradients(head, i, rows, queries, keys.sums, D_, grad);
                    } else {
                        product(false, rows, D_, M_, left_g.from(i), right_st, grad, D_);
                        write_query_gradients(head, i, rows, queries, sums.z, 0, grad);
                    }
                });
                if (from_queries != nullptr) {
                    add_queries(of_chunk(queries, D_), g.right(), *from_queries);
                    if (const OfRows slopes = slopes_of(head); !slopes.empty())
                        for (Index i = 0; i < length_; ++i) add_scaled(from_queries->z, slopes[i], plain + i * D_, D_);
                }
            }
            if (p_.causal) product(true, M_, D_, rows_, v.left_transposed(), right_k, st.get(), D_);
        }
    }

    // grad_k and grad_v, from right to left; sums goes from dS and dz after `end` to those after `begin` if causal.
    void key_gradients(Index begin, Index end, Sums sums) {
        for (Range now = up_to(end, begin), next; now.end > begin; now = next) {
            next = up_to(now.begin, begin);
            start_chunk(now, Scanned::to_left);
            expect_keys(next);
            expect(p_.grad_k, kv_head_, p_.dim, next);
            expect(p_.grad_v, kv_head_, p_.value_dim, next);
            if (p_.causal)
                for (Index head = first_head_; head < last_head_; ++head) expect_queries(head, next);
            share_lines(p_.causal ? 3 : 1);
            Matrix<P> s(arena_, sums.s, D_, M_);
            const Right<P> right_s = s.right(), right_st = s.right_transposed();
            const Keys keys = read_keys(nullptr);
            const Left<P> k = of_chunk(keys.k, D_).left(), v = values(keys).left();
            float *grad_k = arena_.take(rows_ * D_), *grad_den = p_.causal ? arena_.take(rows_ * D_) : nullptr;
            const Rows to_v = rows_of_chunk(p_.grad_v, kv_head_, p_.value_dim);
            const bool in_place = can_be_operands(to_v) && !to_v.is_bf16();
            float* grad_v = in_place ? to_v.floats(0) : arena_.take(rows_ * M_);
            const Index grad_v_stride = in_place ? to_v.row : M_;
            if (!p_.causal) {
                product(false, rows_, D_, M_, v, right_st, grad_k, D_);
                product(false, rows_, M_, D_, k, right_s, grad_v, grad_v_stride);
            } else {
                std::fill(grad_den, grad_den + rows_ * D_, 0.0f);
                for (Index head = first_head_; head < last_head_; ++head) {
                    const OfRows slopes = slopes_of(head);
                    const float* queries = read_queries(head, [&](Index i, auto read) INLINE_LAMBDA {
                        float* to = grad_den + i * D_;
                        if (slopes.empty()) read([](Index, Vec) {});
                        else read([&](Index j, Vec plain) INLINE_LAMBDA { store(to + j, load(to + j) + slopes[i] * plain); });
                    });
                    Matrix<P> q = of_chunk(queries, D_), g = of_chunk(read_output_gradient(head), M_);
                    const Right<P> right_g = g.right();
                    const CausalProduct<P> of_k{M_, D_, v, g.right_transposed(), q.right(), right_st};
                    const CausalProduct<P> of_v{D_, M_, k, q.right_transposed(), right_g, right_s};
                    const bool add = head > first_head_;
                    each_block([&](Index i, Index) { causal_product(of_k, CausalRows<float>{i, grad_k + i * D_, D_, add}); });
                    each_block([&](Index i, Index) {
                        causal_product(of_v, CausalRows<float>{i, grad_v + i * grad_v_stride, grad_v_stride, add});
                    });
                    add_queries(q, right_g, sums);
                }
            }
            write_key_gradients(grad_k, in_place ? nullptr : grad_v, grad_den, sums.z);
        }
    }

  private:
    // The chunk from n on, and the one up to n; empty at the sequence's end.
    static Range from(Index n, Index end) { return {n, std::min(n + CHUNK, end)}; }
    static Range up_to(Index n, Index begin) { return {std::max(n - CHUNK, begin), n}; }

    void start_chunk(Range range, Scanned scanned) {
        start(range, scanned);
        if constexpr (BY_ROWS) scores_ = arena_.take(BLOCK * rows_);
    }

    template <class Body>
    void each_block(const Body& body) {
        for (Index i = 0; i < rows_; i += BLOCK) body(i, std::min(BLOCK, rows_ - i));
    }

    Matrix<P> of_chunk(const float* x, Index columns) { return {arena_, x, rows_, columns}; }

    Matrix<P> values(const Keys& keys) {
        if constexpr (!FLOAT)
            if (keys.v.is_bf16()) return {arena_, reinterpret_cast<const bf16*>(keys.v.p), rows_, M_, keys.v.row};
        return {arena_, keys.v.floats(0), rows_, M_, keys.v.row};
    }

    // dS += q̃ᵀ g
    void add_queries(Matrix<P> q, Right<P> g, Sums sums) {
        product(true, D_, M_, rows_, q.left_transposed(), g, sums.s, M_);
    }

    template <class C>
    void causal_product(const CausalProduct<P>& x, const CausalRows<C>& to) {
        if constexpr (BY_ROWS) {
            multiply_causal(x, to, scores_, ahead_);
        } else {  // all rows at once
            if (!to.add) product(false, rows_, x.columns, x.k, x.a, x.state, to.c, to.ldc);
            float* scores = arena_.take(rows_ * rows_);
            product(false, rows_, rows_, x.k, x.a, x.key, scores, rows_, Triangle::of_result);
            for (Index i = 0; i < rows_; ++i)
                for (Index j = i / W * W; j < rows_; j += W) {
                    float* p = scores + i * rows_ + j;
                    store(p, first_lanes(load(p), i + 1 - j));
                }
            product(true, rows_, x.columns, rows_, of_chunk(scores, rows_).left(), x.value, to.c, to.ldc, Triangle::of_left);
        }
    }

    void product(
        bool add, Index m, Index n, Index k, Left<P> a, Right<P> b, float* c, Index ldc, Triangle triangle = Triangle::none) {
        multiply(triangle, add, m, n, k, a, b, c, ldc, ahead_);
    }

    float* scores_ = nullptr;  // of a block
};

}  // namespace lin_attn
