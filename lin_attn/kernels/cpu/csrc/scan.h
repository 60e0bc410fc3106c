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
// Without causality S and z hold all keys, dS and dz all queries, and A and Q do not occur.
//
// All of a chunk lies in scratch memory as float32, in rows of whole vectors, its length filled up with zero rows: a zero
// feature adds nothing anywhere.

#pragma once

#include <cmath>

#include "memory.h"
#include "problem.h"
#include "products.h"
#include "rows.h"

namespace lin_attn {

// S (or dS), padded dims, and z (or dz), one after the other.
struct Sums {
    float *s, *z;
};

// T: the tensors' element type. P: that of the products' operands.
template <class T, class P>
class Scan {
  public:
    Scan(const Problem& problem, Arena& arena, Index pair)
        : p_(problem),
          arena_(arena),
          batch_(pair / problem.kv_heads),
          kv_head_(pair % problem.kv_heads),
          groups_(problem.heads / problem.kv_heads),
          D_(round_up(problem.dim, W)),
          M_(round_up(problem.value_dim, W)),
          phi_(static_cast<Phi>(problem.feature_map)),
          rope_(static_cast<Rope>(problem.rope)) {}

    // sums += those of the keys from `begin` to `end`.
    void add_keys(Index begin, Index end, Sums sums) {
        for (Index n = begin; n < end; n += CHUNK) {
            start_chunk(n, std::min(CHUNK, end - n));
            const Keys keys = read_keys(sums.z);
            multiply(Triangle::none, true, D_, M_, rows_, left_transposed(keys.k, D_), right(keys.v, rows_, M_), sums.s, M_);
        }
    }

    // out; sums goes from those before `begin` to those before `end` if causal, else it stays.
    void outputs(Index begin, Index end, Sums sums) {
        for (Index n = begin; n < end; n += CHUNK) {
            start_chunk(n, std::min(CHUNK, end - n));
            const Right<P> s = right(sums.s, D_, M_);
            const Keys keys = p_.causal ? read_keys(sums.z) : Keys{};
            const Right<P> kt = p_.causal ? right_transposed(keys.k, rows_, D_) : Right<P>{};
            const Right<P> v = p_.causal ? right(keys.v, rows_, M_) : Right<P>{};
            float* out = arena_.take(rows_ * M_);
            for (Index head = kv_head_ * groups_; head < (kv_head_ + 1) * groups_; ++head) {
                const Left<P> left_q = left(read_queries_and_sums(head, p_.causal ? keys.seen : sums.z), rows_, D_);
                multiply(Triangle::none, false, rows_, M_, D_, left_q, s, out, M_);
                if (p_.causal) {
                    const float* scores = causal_product(left_q, kt, D_);
                    multiply(Triangle::of_left, true, rows_, M_, rows_, left(scores, rows_, rows_), v, out, M_);
                }
                write_outputs(head, out);
            }
            if (p_.causal) multiply(Triangle::none, true, D_, M_, rows_, left_transposed(keys.k, D_), v, sums.s, M_);
        }
    }

    // grad_q and slopes, from left to right; sums as in `outputs`. What the queries give to dS and dz is added to
    // `from_queries`, unless that is null.
    void query_gradients(Index begin, Index end, Sums sums, const Sums* from_queries) {
        Block st = allocate(M_ * D_, false);  // Sᵀ serves here: ∂q̃ = g Sᵀ
        transpose(sums.s, M_, D_, M_, st.get(), D_);
        for (Index n = begin; n < end; n += CHUNK) {
            start_chunk(n, std::min(CHUNK, end - n));
            const Right<P> right_st = right(st.get(), M_, D_);
            const Keys keys = p_.causal ? read_keys(sums.z) : Keys{};
            const Right<P> vt = p_.causal ? right_transposed(keys.v, rows_, M_) : Right<P>{};
            const Right<P> k = p_.causal ? right(keys.k, rows_, D_) : Right<P>{};
            float* grad = arena_.take(rows_ * D_);
            for (Index head = kv_head_ * groups_; head < (kv_head_ + 1) * groups_; ++head) {
                const Queries q = read_queries(head);
                const float* g = read_output_gradient(head);
                const Left<P> left_g = left(g, rows_, M_);
                multiply(Triangle::none, false, rows_, D_, M_, left_g, right_st, grad, D_);
                if (p_.causal) {
                    const float* scores = causal_product(left_g, vt, M_);
                    multiply(Triangle::of_left, true, rows_, D_, rows_, left(scores, rows_, rows_), k, grad, D_);
                }
                write_query_gradients(head, q, p_.causal ? keys.seen : sums.z, grad);
                if (from_queries != nullptr) {
                    add_queries(q, g, *from_queries);
                    if (p_.slopes != nullptr)
                        for (Index i = 0; i < length_; ++i)
                            add_scaled(from_queries->z, slopes(head)[i], q.denominator + i * D_, D_);
                }
            }
            if (p_.causal) multiply(Triangle::none, true, M_, D_, rows_, left_transposed(keys.v, M_), k, st.get(), D_);
        }
    }

    // grad_k and grad_v, from right to left; sums goes from dS and dz after `end` to those after `begin` if causal.
    void key_gradients(Index begin, Index end, Sums sums) {
        const Index chunks = (end - begin + CHUNK - 1) / CHUNK;
        for (Index chunk = chunks; chunk-- > 0;) {
            const Index n = begin + chunk * CHUNK;
            start_chunk(n, std::min(CHUNK, end - n));
            const Keys keys = read_keys(nullptr);
            float *grad_k = arena_.take(rows_ * D_), *grad_v = arena_.take(rows_ * M_);
            multiply(Triangle::none, false, rows_, D_, M_, left(keys.v, rows_, M_), right_transposed(sums.s, D_, M_), grad_k, D_);
            multiply(Triangle::none, false, rows_, M_, D_, left(keys.k, rows_, D_), right(sums.s, D_, M_), grad_v, M_);
            float* grad_den = arena_.take(rows_ * D_);  // Σ ∂d q̂ of each row
            std::fill(grad_den, grad_den + rows_ * D_, 0.0f);
            if (p_.causal) {
                const Right<P> kt = right_transposed(keys.k, rows_, D_), vt = right_transposed(keys.v, rows_, M_);
                for (Index head = kv_head_ * groups_; head < (kv_head_ + 1) * groups_; ++head) {
                    const Queries q = read_queries(head);
                    const float* g = read_output_gradient(head);
                    const float* a = causal_product(left(q.numerator, rows_, D_), kt, D_);
                    const float* b = causal_product(left(g, rows_, M_), vt, M_);
                    const Right<P> right_q = right(q.numerator, rows_, D_), right_g = right(g, rows_, M_);
                    multiply(Triangle::of_left_up, true, rows_, D_, rows_, left_transposed(b, rows_), right_q, grad_k, D_);
                    multiply(Triangle::of_left_up, true, rows_, M_, rows_, left_transposed(a, rows_), right_g, grad_v, M_);
                    if (p_.slopes != nullptr)
                        for (Index i = 0; i < length_; ++i)
                            add_scaled(grad_den + i * D_, slopes(head)[i], q.denominator + i * D_, D_);
                    add_queries(q, g, sums);
                }
            }
            write_key_gradients(grad_k, grad_v, grad_den, sums.z);
        }
    }

  private:
    struct Keys {
        float *k, *v;  // k̃ (rows, D), v (rows, M)
        float* seen;   // z as each row sees it, (rows, D)
    };
    struct Queries {
        float *numerator, *denominator;  // q̃, q̂ (rows, D)
    };

    void start_chunk(Index begin, Index length) {
        begin_ = begin;
        length_ = length;
        rows_ = round_up(length, W);
        arena_.clear();
    }

    // The chunk's keys, z on its way to after them; without a z, `seen` is not made.
    Keys read_keys(float* z) {
        const Keys keys{arena_.take(rows_ * D_), arena_.take(rows_ * M_), z == nullptr ? nullptr : arena_.take(rows_ * D_)};
        const Rows<const T> k = rows_of<const T>(p_.k, batch_, kv_head_, p_.dim);
        const Rows<const T> v = rows_of<const T>(p_.v, batch_, kv_head_, p_.value_dim);
        float *plain = arena_.take(D_), *buffer = arena_.take(std::max(D_, M_));
        for (Index i = 0; i < rows_; ++i) {
            float *num = keys.k + i * D_, *values = keys.v + i * M_;
            if (visible(i)) {
                features(phi_, rope_, read_row(k, begin_ + i, buffer), p_.dim, angles(i), num, plain);
                const float* row = read_row(v, begin_ + i, buffer);
                std::copy(row, row + M_, values);
                if (z != nullptr) add_scaled(z, 1.0f, plain, D_);
            } else {  // taken out after the feature map, as φ(0) = 1; its values may be anything
                std::fill(num, num + D_, 0.0f);
                std::fill(values, values + M_, 0.0f);
            }
            if (z != nullptr) std::copy(z, z + D_, keys.seen + i * D_);
        }
        return keys;
    }

    Queries read_queries(Index head) {
        const Queries q{arena_.take(rows_ * D_), arena_.take(rows_ * D_)};
        const Rows<const T> x = rows_of<const T>(p_.q, batch_, head, p_.dim);
        float* buffer = arena_.take(D_);
        for (Index i = 0; i < length_; ++i)
            features(
                phi_, rope_, read_row(x, begin_ + i, buffer), p_.dim, angles(i), q.numerator + i * D_,
                q.denominator + i * D_);
        zero_rows_after(q.numerator, D_);
        zero_rows_after(q.denominator, D_);
        return q;
    }

    // q̃ (rows, D); the denominators are made while q̂ is at hand, and q̂ need not be kept. The rows of the output, which are
    // written when the products are done, are asked for.
    float* read_queries_and_sums(Index head, const float* seen) {
        float *numerator = arena_.take(rows_ * D_), *plain = arena_.take(D_), *buffer = arena_.take(D_);
        const Rows<const T> x = rows_of<const T>(p_.q, batch_, head, p_.dim);
        const Rows<T> out = rows_of<T>(p_.out, batch_, head, p_.value_dim);
        for (Index i = 0; i < length_; ++i) {
            features(phi_, rope_, read_row(x, begin_ + i, buffer), p_.dim, angles(i), numerator + i * D_, plain);
            if (out.col == 1) prefetch_to_write(out.p + (begin_ + i) * out.row, out.dim);
            if (p_.denominators == nullptr) continue;
            const float d = dot(plain, seen_by(seen, i), D_);
            denominators(head)[i] = std::fabs(d) < p_.eps ? (d < 0 ? -p_.eps : p_.eps) : d;
        }
        zero_rows_after(numerator, D_);
        return numerator;
    }

    // g = ∂out / d, (rows, M).
    float* read_output_gradient(Index head) {
        float *g = arena_.take(rows_ * M_), *buffer = arena_.take(M_);
        const Rows<const T> grad = rows_of<const T>(p_.grad_out, batch_, head, p_.value_dim);
        for (Index i = 0; i < length_; ++i) {
            const float* row = read_row(grad, begin_ + i, buffer);
            std::copy(row, row + M_, g + i * M_);
            if (p_.denominators != nullptr) scale_row(g + i * M_, 1 / denominators(head)[i], M_);
        }
        zero_rows_after(g, M_);
        return g;
    }

    void write_outputs(Index head, const float* out) {
        const Rows<T> to = rows_of<T>(p_.out, batch_, head, p_.value_dim);
        for (Index i = 0; i < length_; ++i)
            write_row(to, begin_ + i, out + i * M_, p_.denominators == nullptr ? 1.0f : 1 / denominators(head)[i]);
    }

    void write_query_gradients(Index head, const Queries& q, const float* seen, float* grad) {
        const Rows<const T> x = rows_of<const T>(p_.q, batch_, head, p_.dim);
        const Rows<T> to = rows_of<T>(p_.grad_q, batch_, head, p_.dim);
        float* buffer = arena_.take(D_);
        for (Index i = 0; i < length_; ++i) {
            float *row = grad + i * D_, slope = 0;
            if (p_.slopes != nullptr) {
                const float d = denominators(head)[i];
                if (!(std::fabs(d) <= p_.eps)) slope = -dot(q.numerator + i * D_, row, D_) / d;  // a floor is constant
                slopes(head)[i] = slope;
            }
            const float* plain = p_.slopes != nullptr ? seen_by(seen, i) : row;
            gradient(phi_, rope_, read_row(x, begin_ + i, buffer), p_.dim, angles(i), row, plain, slope, row);
            write_row(to, begin_ + i, row);
        }
    }

    // grad_den holds Σ ∂d q̂ of each row; dz, from the right, takes it up.
    void write_key_gradients(float* grad_k, const float* grad_v, const float* grad_den, float* dz) {
        const Rows<const T> x = rows_of<const T>(p_.k, batch_, kv_head_, p_.dim);
        const Rows<T> to_k = rows_of<T>(p_.grad_k, batch_, kv_head_, p_.dim);
        const Rows<T> to_v = rows_of<T>(p_.grad_v, batch_, kv_head_, p_.value_dim);
        float* buffer = arena_.take(D_);
        for (Index i = length_; i-- > 0;) {
            if (p_.causal) add_scaled(dz, 1.0f, grad_den + i * D_, D_);  // else it is shared, and grad_den is zero
            if (visible(i)) {
                float* row = grad_k + i * D_;
                gradient(phi_, rope_, read_row(x, begin_ + i, buffer), p_.dim, angles(i), row, dz, 1.0f, row);
                write_row(to_k, begin_ + i, row);
                write_row(to_v, begin_ + i, grad_v + i * M_);
            } else {
                write_zeros(to_k, begin_ + i);
                write_zeros(to_v, begin_ + i);
            }
        }
    }

    // dS += q̃ᵀ g
    void add_queries(const Queries& q, const float* g, Sums sums) {
        multiply(Triangle::none, true, D_, M_, rows_, left_transposed(q.numerator, D_), right(g, rows_, M_), sums.s, M_);
    }

    // tril(x y), (rows, rows).
    float* causal_product(Left<P> x, Right<P> y, Index inner) {
        float* scores = arena_.take(rows_ * rows_);
        multiply(Triangle::of_result, false, rows_, rows_, inner, x, y, scores, rows_);
        for (Index i = 0; i < rows_; ++i) std::fill(scores + i * rows_ + i + 1, scores + (i + 1) * rows_, 0.0f);
        return scores;
    }

    // Operands of products from matrices of dense rows.

    Left<P> left(const float* x, Index rows, Index columns) {
        if constexpr (sizeof(P) == sizeof(float)) return {x, columns, 1};
        P* y = take_operand(rows * columns);
        for (Index j = 0; j < rows * columns; j += W) store(y + j, load(x + j));
        return {y, columns, 1};
    }

    // Of xᵀ, x (rows, columns).
    Left<P> left_transposed(const float* x, Index columns) {
        if constexpr (sizeof(P) == sizeof(float)) return {x, 1, columns};
        return left(transposed(x, rows_, columns), columns, rows_);
    }

    Right<P> right(const float* x, Index rows, Index columns) {
        if constexpr (sizeof(P) == sizeof(float)) {
            return {x, columns};
        } else {
            P* y = take_operand(rows * columns);
            pack(x, columns, rows, columns, y);
            return {y, columns};
        }
    }

    // Of xᵀ, x (rows, columns).
    Right<P> right_transposed(const float* x, Index rows, Index columns) {
        if constexpr (sizeof(P) == sizeof(bf16)) {
            if (columns % (2 * W) == 0) {  // two entries of bfloat16 that lie side by side stay so: as one of 32 bits
                const auto* pairs = reinterpret_cast<const float*>(left(x, rows, columns).p);
                return {reinterpret_cast<const P*>(transposed(pairs, rows, columns / 2)), rows};
            }
        }
        return right(transposed(x, rows, columns), columns, rows);
    }

    const float* transposed(const float* x, Index rows, Index columns) {
        float* y = arena_.take(rows * columns);
        transpose(x, columns, rows, columns, y, rows);
        return y;
    }

    P* take_operand(Index n) { return reinterpret_cast<P*>(arena_.take((n * sizeof(P) + 3) / 4)); }

    void zero_rows_after(float* x, Index columns) { std::fill(x + length_ * columns, x + rows_ * columns, 0.0f); }

    bool visible(Index i) const {
        return i < length_ && (p_.key_mask == nullptr ||
            p_.key_mask[batch_ * p_.key_mask_stride[0] + (begin_ + i) * p_.key_mask_stride[1]]);
    }

    // Row i's own sums if causal, else those of all rows.
    const float* seen_by(const float* seen, Index i) const { return p_.causal ? seen + i * D_ : seen; }

    float* denominators(Index head) const { return p_.denominators + (batch_ * p_.heads + head) * p_.queries + begin_; }
    float* slopes(Index head) const { return p_.slopes + (batch_ * p_.heads + head) * p_.queries + begin_; }

    // The tables' rows have D / 2 entries, and a whole vector of the last ones is read.
    Angles angles(Index i) {
        if (rope_ == Rope::none) return {nullptr, nullptr};
        const Index half = p_.dim / 2;
        const float *cos = p_.cos + (begin_ + i) * half, *sin = p_.sin + (begin_ + i) * half;
        if (D_ == p_.dim) return {cos, sin};
        std::copy(cos, cos + half, cos_);
        std::copy(sin, sin + half, sin_);
        return {cos_, sin_};
    }

    const Problem& p_;
    Arena& arena_;
    const Index batch_, kv_head_, groups_, D_, M_;  // D and M in whole vectors
    const Phi phi_;
    const Rope rope_;
    Index begin_ = 0, length_ = 0, rows_ = 0;  // of the chunk; rows are length in whole vectors
    float cos_[MAX_DIM / 2 + W] = {}, sin_[MAX_DIM / 2 + W] = {};
};

}  // namespace lin_attn
