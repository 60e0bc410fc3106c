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
#include "operands.h"
#include "problem.h"
#include "products.h"
#include "rows.h"

namespace lin_attn {

// S (or dS), padded dims, and z (or dz), one after the other.
struct Sums {
    float *s, *z;
};

// P: the element type of the products' operands; D and M are multiples of 2 W if it is bf16.
template <class P>
class Scan {
    static constexpr bool FLOAT = sizeof(P) == sizeof(float);
    static constexpr Index ROWS = FLOAT ? W : 2 * W;  // a chunk's rows are a multiple of it

    // So many rows go through all their products together, for what they leave in between to stay in the first-level cache.
    static constexpr Index BLOCK = FLOAT ? CAUSAL_ROWS : CHUNK;

  public:
    Scan(const Problem& problem, Arena& arena, Index pair)
        : p_(problem),
          arena_(arena),
          batch_(pair / problem.kv_heads),
          kv_head_(pair % problem.kv_heads),
          groups_(problem.heads / problem.kv_heads),
          first_head_(kv_head_ * groups_),
          last_head_(first_head_ + groups_),
          D_(round_up(problem.dim, W)),
          M_(round_up(problem.value_dim, W)),
          phi_(static_cast<Phi>(problem.feature_map)),
          rope_(static_cast<Rope>(problem.rope)),
          ahead_(std::max(D_, M_) / 2 + CHUNK) {}

    // sums += those of the keys from `begin` to `end`.
    void add_keys(Index begin, Index end, Sums sums) {
        for (Index n = begin; n < end; n += CHUNK) {
            start_chunk(n, std::min(CHUNK, end - n));
            expect_keys(next_chunk(n, end));
            share_lines(1);
            const Keys keys = read_keys(sums.z);
            Matrix<P> k = of_chunk(keys.k, D_), v = of_chunk(keys.v, M_);
            product(true, D_, M_, rows_, k.left_transposed(), v.right(), sums.s, M_);
        }
    }

    // out; sums goes from those before `begin` to those before `end` if causal, else it stays.
    void outputs(Index begin, Index end, Sums sums) {
        for (Index n = begin; n < end; n += CHUNK) {
            start_chunk(n, std::min(CHUNK, end - n));
            if (p_.causal) expect_keys(next_chunk(n, end));
            for (Index head = first_head_; head < last_head_; ++head) {
                expect(p_.q, head, p_.dim, next_chunk(n, end));
                expect(p_.out, head, p_.value_dim, next_chunk(n, end));
            }
            share_lines(1);
            const Right<P> s = Matrix<P>(arena_, sums.s, D_, M_).right();
            float *queries = arena_.take(groups_ * rows_ * D_), *plain = arena_.take(D_);
            // While the sums that they see, and their q̂, are at hand.
            const auto read_queries_of_row = [&](Index i, auto phi) {
                for (Index head = first_head_; head < last_head_; ++head)
                    read_query(phi, head, i, queries + (head - first_head_) * rows_ * D_ + i * D_, plain, sums.z);
            };
            const Keys keys = p_.causal ? read_keys(sums.z, read_queries_of_row) : Keys{};
            if (!p_.causal) each_row(read_queries_of_row);
            Matrix<P> k = of_chunk(keys.k, D_), v = of_chunk(keys.v, M_);
            const Right<P> kt = p_.causal ? k.right_transposed() : Right<P>{};
            const Right<P> values = p_.causal ? v.right() : Right<P>{};
            float* out = arena_.take(BLOCK * M_);
            for (Index head = first_head_; head < last_head_; ++head) {
                const Left<P> q = of_chunk(queries + (head - first_head_) * rows_ * D_, D_).left();
                each_block([&](Index i, Index rows) {
                    block_product(i, rows, q.from(i), kt, s, values, D_, M_, out);
                    write_outputs(head, i, rows, out);
                });
            }
            if (p_.causal) product(true, D_, M_, rows_, k.left_transposed(), values, sums.s, M_);
        }
    }

    // grad_q and slopes, from left to right; sums as in `outputs`. What the queries give to dS and dz is added to
    // `from_queries`, unless that is null.
    void query_gradients(Index begin, Index end, Sums sums, const Sums* from_queries) {
        Block st = allocate(M_ * D_, false);  // Sᵀ serves here: ∂q̃ = g Sᵀ
        transpose(sums.s, M_, D_, M_, st.get(), D_);
        for (Index n = begin; n < end; n += CHUNK) {
            start_chunk(n, std::min(CHUNK, end - n));
            if (p_.causal) expect_keys(next_chunk(n, end));
            for (Index head = first_head_; head < last_head_; ++head) {
                expect_queries(head, next_chunk(n, end));
                expect(p_.grad_q, head, p_.dim, next_chunk(n, end));
            }
            share_lines(p_.causal ? 3 : 2);
            const Right<P> right_st = Matrix<P>(arena_, st.get(), M_, D_).right();
            float* seen = p_.causal ? arena_.take(rows_ * D_) : sums.z;  // z as each row sees it
            const auto see = [&](Index i, auto) { scale_row(sums.z, 1.0f, seen + i * D_, D_); };
            const Keys keys = p_.causal ? read_keys(sums.z, see) : Keys{};
            Matrix<P> k = of_chunk(keys.k, D_), v = of_chunk(keys.v, M_);
            const Right<P> vt = p_.causal ? v.right_transposed() : Right<P>{};
            const Right<P> right_k = p_.causal ? k.right() : Right<P>{};
            float *grad = arena_.take(BLOCK * D_), *plain = from_queries == nullptr ? nullptr : arena_.take(rows_ * D_);
            for (Index head = first_head_; head < last_head_; ++head) {
                const float* queries = read_queries(head, [&](Index i, const float* row) {
                    if (from_queries != nullptr) std::copy_n(row, D_, plain + i * D_);
                });
                Matrix<P> g = of_chunk(read_output_gradient(head), M_);
                const Left<P> left_g = g.left();
                each_block([&](Index i, Index rows) {
                    block_product(i, rows, left_g.from(i), vt, right_st, right_k, M_, D_, grad);
                    write_query_gradients(head, i, rows, queries, seen, grad);
                });
                if (from_queries != nullptr) {
                    add_queries(of_chunk(queries, D_), g.right(), *from_queries);
                    if (p_.slopes != nullptr)
                        for (Index i = 0; i < length_; ++i)
                            add_scaled(from_queries->z, slopes(head)[i], plain + i * D_, D_);
                }
            }
            if (p_.causal) product(true, M_, D_, rows_, v.left_transposed(), right_k, st.get(), D_);
        }
    }

    // grad_k and grad_v, from right to left; sums goes from dS and dz after `end` to those after `begin` if causal.
    void key_gradients(Index begin, Index end, Sums sums) {
        const Index chunks = (end - begin + CHUNK - 1) / CHUNK;
        for (Index chunk = chunks; chunk-- > 0;) {
            const Index n = begin + chunk * CHUNK;
            const Range next{std::max(n - CHUNK, begin), n};
            start_chunk(n, std::min(CHUNK, end - n));
            expect_keys(next);
            expect(p_.grad_k, kv_head_, p_.dim, next);
            expect(p_.grad_v, kv_head_, p_.value_dim, next);
            if (p_.causal)
                for (Index head = first_head_; head < last_head_; ++head) expect_queries(head, next);
            share_lines(p_.causal ? 3 : 1);
            const Keys keys = read_keys(nullptr);
            Matrix<P> k = of_chunk(keys.k, D_), v = of_chunk(keys.v, M_), s(arena_, sums.s, D_, M_);
            float *grad_k = arena_.take(rows_ * D_), *grad_v = arena_.take(rows_ * M_);
            product(false, rows_, D_, M_, v.left(), s.right_transposed(), grad_k, D_);
            product(false, rows_, M_, D_, k.left(), s.right(), grad_v, M_);
            float* grad_den = arena_.take(rows_ * D_);  // Σ ∂d q̂ of each row
            std::fill(grad_den, grad_den + rows_ * D_, 0.0f);
            if (p_.causal) {
                const Right<P> kt = k.right_transposed(), vt = v.right_transposed();
                for (Index head = first_head_; head < last_head_; ++head) {
                    const float* queries = read_queries(head, [&](Index i, const float* plain) {
                        if (p_.slopes != nullptr) add_scaled(grad_den + i * D_, slopes(head)[i], plain, D_);
                    });
                    Matrix<P> q = of_chunk(queries, D_), g = of_chunk(read_output_gradient(head), M_);
                    Matrix<P> a = of_chunk(causal_product(q.left(), kt, D_), rows_);
                    Matrix<P> b = of_chunk(causal_product(g.left(), vt, M_), rows_);
                    const Right<P> right_g = g.right();
                    product(true, rows_, D_, rows_, b.left_transposed(), q.right(), grad_k, D_, Triangle::of_left_up);
                    product(true, rows_, M_, rows_, a.left_transposed(), right_g, grad_v, M_, Triangle::of_left_up);
                    add_queries(q, right_g, sums);
                }
            }
            write_key_gradients(grad_k, grad_v, grad_den, sums.z);
        }
    }

  private:
    struct Keys {
        float *k, *v;  // k̃ (rows, D), v (rows, M)
    };

    void start_chunk(Index begin, Index length) {
        begin_ = begin;
        length_ = length;
        rows_ = round_up(length, ROWS);
        arena_.clear();
        if constexpr (FLOAT) scores_ = arena_.take(BLOCK * rows_);
        ahead_.ask(ahead_.left());
        ahead_.clear();
    }

    // Calls body(i, φ) for each row.
    template <class Body>
    void each_row(Body body) {
        with(phi_, [&](auto phi) {
            for (Index i = 0; i < rows_; ++i) {
                ahead_.ask(lines_per_row_);
                body(i, phi);
            }
        });
    }

    template <class Body>
    void each_block(Body body) {
        for (Index i = 0; i < rows_; i += BLOCK) body(i, std::min(BLOCK, rows_ - i));
    }

    struct Range {
        Index begin, end;
    };

    static Range next_chunk(Index n, Index end) { return {std::min(n + CHUNK, end), std::min(n + 2 * CHUNK, end)}; }

    // These rows will be read or written soon.
    void expect(const Tensor& x, Index head, Index dim, Range range) {
        const Rows rows = rows_of(p_, x, batch_, head, dim);
        if (rows.col == 1)
            ahead_.add(rows.at(range.begin), rows.row * rows.element, range.end - range.begin, dim * rows.element);
    }

    void expect_keys(Range range) {
        expect(p_.k, kv_head_, p_.dim, range);
        expect(p_.v, kv_head_, p_.value_dim, range);
        if (rope_ == Rope::none) return;
        const Index half = p_.dim / 2, bytes = half * sizeof(float);
        ahead_.add(p_.cos + range.begin * half, bytes, range.end - range.begin, bytes);
        ahead_.add(p_.sin + range.begin * half, bytes, range.end - range.begin, bytes);
    }

    void expect_queries(Index head, Range range) {
        expect(p_.q, head, p_.dim, range);
        expect(p_.grad_out, head, p_.value_dim, range);
    }

    // Products in float32 ask for the lines that were announced, a few at a time; those in bfloat16 are too short for that, and
    // so many loops over rows do it.
    void share_lines(Index loops) {
        ahead_.close();
        lines_per_row_ = FLOAT ? 0 : (ahead_.left() + loops * rows_ - 1) / (loops * rows_);
    }

    // The chunk's keys. If z is not null it takes them up row by row, with a call of then(i, φ) after each.
    template <class Then>
    Keys read_keys(float* z, Then then) {
        const Keys keys{arena_.take(rows_ * D_), arena_.take(rows_ * M_)};
        const Rows k = rows_of(p_, p_.k, batch_, kv_head_, p_.dim);
        const Rows v = rows_of(p_, p_.v, batch_, kv_head_, p_.value_dim);
        float* plain = arena_.take(D_);
        each_row([&](Index i, auto phi) {
            float *num = keys.k + i * D_, *values = keys.v + i * M_;
            if (visible(i)) {
                features(phi, rope_, read_row(k, begin_ + i, buffer_), p_.dim, angles(i), num, plain);
                scale_row(read_row(v, begin_ + i, buffer_), 1.0f, values, M_);
                if (z != nullptr) add_scaled(z, 1.0f, plain, D_);
            } else {  // taken out after the feature map, as φ(0) = 1; its values may be anything
                std::fill(num, num + D_, 0.0f);
                std::fill(values, values + M_, 0.0f);
            }
            then(i, phi);
        });
        return keys;
    }

    Keys read_keys(float* z) {
        return read_keys(z, [](Index, auto) {});
    }

    // q̃ (rows, D), with a call of then(i, row i of q̂) after each.
    template <class Then>
    const float* read_queries(Index head, Then then) {
        float *queries = arena_.take(rows_ * D_), *plain = arena_.take(D_);
        each_row([&](Index i, auto phi) {
            read_query(phi, head, i, queries + i * D_, plain, nullptr);
            if (i < length_) then(i, plain);
        });
        return queries;
    }

    // Row i of q̃ and of q̂, and, of the sums z that it sees unless they are null, its denominator.
    template <class Map>
    INLINE void read_query(Map phi, Index head, Index i, float* numerator, float* plain, const float* z) {
        if (i >= length_) {
            std::fill_n(numerator, D_, 0.0f);
            return;
        }
        const Rows x = rows_of(p_, p_.q, batch_, head, p_.dim);
        features(phi, rope_, read_row(x, begin_ + i, buffer_), p_.dim, angles(i), numerator, plain);
        if (z == nullptr || p_.denominators == nullptr) return;
        const float d = dot(plain, z, D_);
        denominators(head)[i] = std::fabs(d) < p_.eps ? (d < 0 ? -p_.eps : p_.eps) : d;
    }

    // g = ∂out / d, (rows, M).
    float* read_output_gradient(Index head) {
        float* g = arena_.take(rows_ * M_);
        const Rows grad = rows_of(p_, p_.grad_out, batch_, head, p_.value_dim);
        for (Index i = 0; i < rows_; ++i) {
            ahead_.ask(lines_per_row_);
            if (i >= length_) std::fill_n(g + i * M_, M_, 0.0f);
            else scale_row(read_row(grad, begin_ + i, buffer_), inverse_denominator(head, i), g + i * M_, M_);
        }
        return g;
    }

    // Rows `from` to from + rows, of which `out` holds the numerators.
    void write_outputs(Index head, Index from, Index rows, const float* out) {
        const Rows to = rows_of(p_, p_.out, batch_, head, p_.value_dim);
        for (Index i = from; i < std::min(from + rows, length_); ++i)
            write_row(to, begin_ + i, out + (i - from) * M_, inverse_denominator(head, i));
    }

    // Rows `from` to from + rows, of which `grad` holds ∂q̃. seen: z, of each row if causal.
    void write_query_gradients(Index head, Index from, Index rows, const float* numerator, const float* seen, float* grad) {
        const Rows x = rows_of(p_, p_.q, batch_, head, p_.dim);
        const Rows to = rows_of(p_, p_.grad_q, batch_, head, p_.dim);
        const auto write = [&](Index i, auto phi) {
            float *row = grad + (i - from) * D_, slope = 0;
            if (p_.slopes != nullptr) {
                const float d = denominators(head)[i];
                if (!(std::fabs(d) <= p_.eps)) slope = -dot(numerator + i * D_, row, D_) / d;  // a floor is constant
                slopes(head)[i] = slope;
            }
            const float* plain = p_.slopes == nullptr ? row : p_.causal ? seen + i * D_ : seen;
            gradient(phi, rope_, read_row(x, begin_ + i, buffer_), p_.dim, angles(i), row, plain, slope, row);
            write_row(to, begin_ + i, row);
        };
        with(phi_, [&](auto phi) {
            for (Index i = from; i < std::min(from + rows, length_); ++i) write(i, phi);
        });
    }

    // grad_den holds Σ ∂d q̂ of each row; dz, from the right, takes it up.
    void write_key_gradients(float* grad_k, const float* grad_v, const float* grad_den, float* dz) {
        const Rows x = rows_of(p_, p_.k, batch_, kv_head_, p_.dim);
        const Rows to_k = rows_of(p_, p_.grad_k, batch_, kv_head_, p_.dim);
        const Rows to_v = rows_of(p_, p_.grad_v, batch_, kv_head_, p_.value_dim);
        const auto write = [&](Index i, auto phi) {
            if (p_.causal) add_scaled(dz, 1.0f, grad_den + i * D_, D_);  // else it is shared, and grad_den is zero
            if (visible(i)) {
                float* row = grad_k + i * D_;
                gradient(phi, rope_, read_row(x, begin_ + i, buffer_), p_.dim, angles(i), row, dz, 1.0f, row);
                write_row(to_k, begin_ + i, row);
                write_row(to_v, begin_ + i, grad_v + i * M_);
            } else {
                write_zeros(to_k, begin_ + i);
                write_zeros(to_v, begin_ + i);
            }
        };
        with(phi_, [&](auto phi) {
            for (Index i = length_; i-- > 0;) write(i, phi);
        });
    }

    // dS += q̃ᵀ g
    void add_queries(Matrix<P> q, Right<P> g, Sums sums) {
        product(true, D_, M_, rows_, q.left_transposed(), g, sums.s, M_);
    }

    // tril(x y), (rows, rows).
    const float* causal_product(Left<P> x, Right<P> y, Index k) {
        float* scores = arena_.take(rows_ * rows_);
        product(false, rows_, rows_, k, x, y, scores, rows_, Triangle::of_result);
        for (Index i = 0; i < rows_; ++i)
            for (Index j = i / W * W; j < rows_; j += W) {
                float* p = scores + i * rows_ + j;
                store(p, first_lanes(load(p), i + 1 - j));
            }
        return scores;
    }

    // c (rows, columns) = x state, and + tril(x keys) values if causal, for rows i to i + rows; the state has k rows.
    void block_product(
        Index i, Index rows, Left<P> x, Right<P> keys, Right<P> state, Right<P> values, Index k, Index columns, float* c) {
        if (!p_.causal) return product(false, rows, columns, k, x, state, c, columns);
        if constexpr (FLOAT) {
            multiply_causal({i, k, rows_, columns, x, keys, state, values, scores_, c}, ahead_);
        } else {
            product(false, rows, columns, k, x, state, c, columns);
            Matrix<P> scores = of_chunk(causal_product(x, keys, k), rows_);
            product(true, rows, columns, rows_, scores.left(), values, c, columns, Triangle::of_left);
        }
    }

    Matrix<P> of_chunk(const float* x, Index columns) { return {arena_, x, rows_, columns}; }

    void product(
        bool add, Index m, Index n, Index k, Left<P> a, Right<P> b, float* c, Index ldc, Triangle triangle = Triangle::none) {
        multiply(triangle, add, m, n, k, a, b, c, ldc, ahead_);
    }

    float inverse_denominator(Index head, Index i) const {
        return p_.denominators == nullptr ? 1.0f : 1 / denominators(head)[i];
    }

    bool visible(Index i) const {
        return i < length_ && (p_.key_mask == nullptr ||
            p_.key_mask[batch_ * p_.key_mask_stride[0] + (begin_ + i) * p_.key_mask_stride[1]]);
    }

    float* denominators(Index head) const { return p_.denominators + (batch_ * p_.heads + head) * p_.queries + begin_; }
    float* slopes(Index head) const { return p_.slopes + (batch_ * p_.heads + head) * p_.queries + begin_; }

    // The tables' rows have D / 2 entries, and a whole vector of the last ones is read.
    INLINE Angles angles(Index i) {
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
    const Index batch_, kv_head_, groups_, first_head_, last_head_;  // of the heads of queries, those that share the keys
    const Index D_, M_;                                              // in whole vectors
    const Phi phi_;
    const Rope rope_;
    Index begin_ = 0, length_ = 0, rows_ = 0;  // of the chunk; rows are length in whole vectors, or twice that for bf16
    float* scores_ = nullptr;                  // of a block
    Ahead ahead_;
    Index lines_per_row_ = 0;
    float cos_[MAX_DIM / 2 + W] = {}, sin_[MAX_DIM / 2 + W] = {}, buffer_[MAX_DIM] = {};
};

}  // namespace lin_attn
