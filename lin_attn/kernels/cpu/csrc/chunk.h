// A chunk of one head of keys and values, and of the heads of queries that share it: its rows as they are read from the
// caller's tensors into scratch memory, and written back.
//
// In scratch memory they are float32, in rows of whole vectors, the chunk's length filled up with zero rows: a zero feature
// adds nothing anywhere. Values, outputs and gradients of values stay in the tensors where products can use them there. Rows
// stand in the order of the scan, which goes from left to right or from right to left: what comes later sees what came before,
// in both.

#pragma once

#include <cmath>

#include "memory.h"
#include "problem.h"
#include "rows.h"

namespace lin_attn {

class Chunk {
  protected:
    Chunk(const Problem& problem, Arena& arena, Index pair, bool bf16_products)
        : p_(problem),
          arena_(arena),
          batch_(pair / problem.kv_heads),
          kv_head_(pair % problem.kv_heads),
          first_head_(kv_head_ * (problem.heads / problem.kv_heads)),
          last_head_(first_head_ + problem.heads / problem.kv_heads),
          D_(round_up(problem.dim, W)),
          M_(round_up(problem.value_dim, W)),
          ahead_(std::max(D_, M_) / 2 + CHUNK),
          bf16_products_(bf16_products) {}

    enum class Scanned { to_right, to_left };

    struct Range {
        Index begin, end;
    };

    struct Keys {
        const float* k;     // k̃ (rows, D)
        Rows v;             // where they lie, if they can be operands so, or float32 without gaps
        const float* sums;  // (rows, D): of k̂ up to each row, itself among them
    };

    void start(Range range, Scanned scanned) {
        first_ = scanned == Scanned::to_right ? range.begin : range.end - 1;
        step_ = scanned == Scanned::to_right ? 1 : -1;
        length_ = range.end - range.begin;
        rows_ = round_up(length_, bf16_products_ ? 2 * W : W);
        arena_.clear();
        ahead_.ask(ahead_.left());
        ahead_.clear();
    }

    // These rows will be read or written soon.
    void expect(const Tensor& x, Index head, Index dim, Range range) {
        const Rows rows = rows_of(p_, x, batch_, head, dim);
        if (rows.col == 1)
            ahead_.add(rows.at(range.begin), rows.row * rows.element, range.end - range.begin, dim * rows.element);
    }

    void expect_keys(Range range) {
        expect(p_.k, kv_head_, p_.dim, range);
        expect(p_.v, kv_head_, p_.value_dim, range);
        const Index half = half_dim(), bytes = half * sizeof(float);
        if (half == 0) return;
        ahead_.add(p_.cos + range.begin * half, bytes, range.end - range.begin, bytes);
        ahead_.add(p_.sin + range.begin * half, bytes, range.end - range.begin, bytes);
    }

    void expect_queries(Index head, Range range) {
        expect(p_.q, head, p_.dim, range);
        expect(p_.grad_out, head, p_.value_dim, range);
    }

    // After the last of them. Products in float32 ask for the lines, a few at a time; those in bfloat16 take too little time
    // for all, and so many loops over rows take a third from them.
    void share_lines(Index loops) {
        ahead_.close();
        lines_per_row_ = bf16_products_ ? (ahead_.left() + 3 * loops * rows_ - 1) / (3 * loops * rows_) : 0;
    }

    // The keys; z, unless it is null, takes them up, and only then are there `sums`.
    Keys read_keys(float* z) {
        float *k = arena_.take(rows_ * D_), *before = nullptr, *sums = nullptr;  // those before each row, and up to it
        if (z != nullptr) {
            before = arena_.take((rows_ + 1) * D_);
            sums = before + D_;
            copy_row(z, before, D_);
        }
        with_map(rows_of_chunk(p_.k, kv_head_, p_.dim), [&](auto map) {
            const FeatureRows read = features_of(p_.k, kv_head_);
            const Visible visible = visible_keys();
            for (Index i = 0; i < rows_; ++i) {
                ahead_.ask(lines_per_row_);
                const Index row = i * D_;
                if (!visible(i)) {  // taken out after the feature map, as φ(0) = 1
                    zero_row(k + row, D_);
                    if (z != nullptr) copy_row(before + row, sums + row, D_);
                } else if (z != nullptr) {
                    read(map, i, k + row, [&](Index j, Vec plain) INLINE_LAMBDA {
                        store(sums + row + j, load(before + row + j) + plain);
                    });
                } else {
                    read(map, i, k + row, [](Index, Vec) {});
                }
            }
        });
        if (z != nullptr) copy_row(before + rows_ * D_, z, D_);
        const Rows v = rows_of_chunk(p_.v, kv_head_, p_.value_dim);
        return {k, can_be_operands(v) ? v : copy_of_values(v), sums};
    }

    // q̃ (rows, D). For each row i, body(i, read) is called, and has to call read(take), see `features`.
    template <class Body>
    const float* read_queries(Index head, const Body& body) {
        float* queries = arena_.take(rows_ * D_);
        with_map(rows_of_chunk(p_.q, head, p_.dim), [&](auto map) {
            const FeatureRows read = features_of(p_.q, head);
            for (Index i = 0; i < length_; ++i) {
                ahead_.ask(lines_per_row_);
                body(i, [&](auto take) INLINE_LAMBDA { read(map, i, queries + i * D_, take); });
            }
        });
        std::fill(queries + length_ * D_, queries + rows_ * D_, 0.0f);
        return queries;
    }

    // With the denominators, of the sums of k̂ that each row sees; rows of them `stride` apart.
    const float* read_queries(Index head, const float* sums, Index stride) {
        const OfRows d = denominators(head);
        return read_queries(head, [&](Index i, auto read) INLINE_LAMBDA {
            Vec total{};
            read([&](Index j, Vec plain) INLINE_LAMBDA { total += plain * load(sums + i * stride + j); });
            if (!d.empty()) d[i] = floored(sum(total), p_.eps);
        });
    }

    // g = ∂out / d, (rows, M).
    const float* read_output_gradient(Index head) {
        float* g = arena_.take(rows_ * M_);
        const float* scale = inverse_denominators(head);
        const Rows grad = rows_of_chunk(p_.grad_out, head, p_.value_dim);
        for (Index i = 0; i < length_; ++i) {
            ahead_.ask(lines_per_row_);
            scale_row(read_row(grad, i, buffer_), scale[i], g + i * M_, M_);
        }
        std::fill(g + length_ * M_, g + rows_ * M_, 0.0f);
        return g;
    }

    // 1 / d, or 1 if nothing is divided.
    const float* inverse_denominators(Index head) {
        float* inverse = arena_.take(rows_);
        std::fill(inverse, inverse + rows_, 1.0f);
        if (const OfRows d = denominators(head); !d.empty())
            for (Index i = 0; i < length_; ++i) inverse[i] = 1 / d[i];
        return inverse;
    }

    // Rows `from` to from + rows of the tensor, from x in rows of M.
    void write_outputs(const Rows& to, Index from, Index rows, const float* x, const float* scale) {
        for (Index i = from; i < std::min(from + rows, length_); ++i) write_row(to, i, x + (i - from) * M_, scale[i]);
    }

    // Rows `from` to from + rows, of which `grad` holds ∂q̃. sums: of k̂, as each row sees them, rows of them `stride` apart.
    void write_query_gradients(
        Index head, Index from, Index rows, const float* numerator, const float* sums, Index stride, float* grad) {
        with_map(rows_of_chunk(p_.q, head, p_.dim), [&](auto map) {
            const FeatureRows x = features_of(p_.q, head);
            const Rows to = rows_of_chunk(p_.grad_q, head, p_.dim);
            const OfRows d = denominators(head), slopes = slopes_of(head);
            for (Index i = from; i < std::min(from + rows, length_); ++i) {
                float *row = grad + (i - from) * D_, slope = 0;
                if (!slopes.empty()) {
                    if (!(std::fabs(d[i]) <= p_.eps)) slope = -dot(numerator + i * D_, row, D_) / d[i];  // a floor is constant
                    slopes[i] = slope;
                }
                x.gradient(map, i, row, slopes.empty() ? row : sums + i * stride, slope);
                write_row(to, i, row);
            }
        });
    }

    // grad_k holds ∂k̃ and is written over, grad_den Σ ∂d q̂ of each row, which dz takes up. grad_v is null if it is where it
    // belongs.
    void write_key_gradients(float* grad_k, const float* grad_v, const float* grad_den, float* dz) {
        with_map(rows_of_chunk(p_.k, kv_head_, p_.dim), [&](auto map) {
            const FeatureRows x = features_of(p_.k, kv_head_);
            const Rows to_k = rows_of_chunk(p_.grad_k, kv_head_, p_.dim);
            const Rows to_v = rows_of_chunk(p_.grad_v, kv_head_, p_.value_dim);
            const Visible visible = visible_keys();
            for (Index i = 0; i < length_; ++i) {
                if (grad_den != nullptr) add_scaled(dz, 1.0f, grad_den + i * D_, D_);
                if (visible(i)) {
                    x.gradient(map, i, grad_k + i * D_, dz, 1.0f);
                    write_row(to_k, i, grad_k + i * D_);
                    if (grad_v != nullptr) write_row(to_v, i, grad_v + i * M_);
                } else {
                    write_zeros(to_k, i);
                    write_zeros(to_v, i);
                }
            }
        });
    }

    Rows rows_of_chunk(const Tensor& x, Index head, Index dim) const {
        Rows rows = rows_of(p_, x, batch_, head, dim);
        rows.p = rows.at(first_);
        rows.row *= step_;
        return rows;
    }

    // Whether the chunk's values, or their gradients, can be operands of products as they lie.
    bool can_be_operands(const Rows& x) const {
        const bool of_type = x.is_bf16() ? bf16_products_ && x.is_dense() : x.is_aligned();
        return of_type && length_ == rows_ && p_.key_mask == nullptr;
    }

    // A number of each row.
    struct OfRows {
        float* first;
        Index step;
        bool empty() const { return first == nullptr; }
        float& operator[](Index i) const { return first[i * step]; }
    };

    // Both empty if nothing is divided.
    OfRows denominators(Index head) const { return of_queries(p_.denominators, head); }
    OfRows slopes_of(Index head) const { return of_queries(p_.slopes, head); }

    const Problem& p_;
    Arena& arena_;
    const Index batch_, kv_head_, first_head_, last_head_;  // of the heads of queries, those that share the keys
    const Index D_, M_;                                     // in whole vectors
    Index length_ = 0, rows_ = 0;                           // rows: length, rounded up

    Ahead ahead_;

  private:
    const bool bf16_products_;
    Index first_ = 0, step_ = 1;  // position of row 0, and from one row to the next
    Index lines_per_row_ = 0;
    float buffer_[MAX_DIM] = {};

    // Rows of q or k of the chunk, with the angles of their positions.
    struct FeatureRows {
        Rows x;
        Angles first;
        Index half;  // from one row of angles to the next
        float* buffer;

        INLINE Angles angles(Index i) const { return {first.cos + i * half, first.sin + i * half}; }

        template <class Map, class Take>
        INLINE void operator()(Map map, Index i, float* numerator, Take take) const {
            features(map, read_row(map, x, i, buffer), x.dim, angles(i), numerator, take);
        }

        // In place of the numerator's gradient.
        template <class Map>
        INLINE void gradient(Map map, Index i, float* numerator, const float* denominator, float scale) const {
            lin_attn::gradient(map, read_row(map, x, i, buffer), x.dim, angles(i), numerator, denominator, scale, numerator);
        }
    };

    struct Visible {
        Index length;
        const uint8_t* mask;
        Index stride;

        INLINE bool operator()(Index i) const { return i < length && (mask == nullptr || mask[i * stride]); }
    };

    // Calls body(map) for a loop over rows of x.
    template <class Body>
    void with_map(const Rows& x, const Body& body) const {
        with(static_cast<Phi>(p_.feature_map), static_cast<Rope>(p_.rope), x, body);
    }

    FeatureRows features_of(const Tensor& x, Index head) {
        const Index half = half_dim();
        return {rows_of_chunk(x, head, p_.dim), {p_.cos + first_ * half, p_.sin + first_ * half}, half * step_, buffer_};
    }

    Visible visible_keys() const {
        const uint8_t* mask = p_.key_mask;
        if (mask != nullptr) mask += batch_ * p_.key_mask_stride[0] + first_ * p_.key_mask_stride[1];
        return {length_, mask, p_.key_mask_stride[1] * step_};
    }

    Rows copy_of_values(const Rows& v) {
        float* values = arena_.take(rows_ * M_);
        const Visible visible = visible_keys();
        for (Index i = 0; i < rows_; ++i) {
            if (visible(i)) copy_row(read_row(v, i, buffer_), values + i * M_, M_);
            else zero_row(values + i * M_, M_);  // a hidden value may be anything
        }
        return {values, M_, 1, M_, sizeof(float)};
    }

    Index half_dim() const { return static_cast<Rope>(p_.rope) == Rope::none ? 0 : p_.dim / 2; }

    OfRows of_queries(float* x, Index head) const {
        return {x == nullptr ? nullptr : x + (batch_ * p_.heads + head) * p_.queries + first_, step_};
    }
};

}  // namespace lin_attn
