// The matrices of a chunk as operands of products: from float32, or bfloat16 where it lies so, to the forms that products.h
// takes.
//
// Pairs of bfloat16 are multiplied along k. Which entries make a pair is free, as long as both operands have the same:
// those W apart, in blocks of 2 W, do so without a permutation of vectors. A pair is moved as one number of 32 bits.

#pragma once

#include "memory.h"
#include "products.h"
#include "vectors.h"

namespace lin_attn {

// A matrix (rows × columns), dense unless otherwise said, as operands whose elements are P. Pairs and transposes are kept for
// the next request.
template <class P>
class Matrix;

template <>
class Matrix<float> {
  public:
    Matrix(Arena& arena, const float* x, Index rows, Index columns) : Matrix(arena, x, rows, columns, columns) {}

    // Rows `stride` apart.
    Matrix(Arena& arena, const float* x, Index rows, Index columns, Index stride)
        : arena_(arena), x_(x), rows_(rows), columns_(columns), stride_(stride) {}

    Left<float> left() const { return {x_, stride_, 1}; }

    // From the transpose if that is there: it was read last, and lies in the first-level cache.
    Left<float> left_transposed() const {
        if (transposed_ != nullptr) return {transposed_, rows_, 1};
        return {x_, 1, stride_};
    }

    Right<float> right() const { return {x_, stride_}; }

    Right<float> right_transposed() {
        if (transposed_ == nullptr) {
            transposed_ = arena_.take(rows_ * columns_);
            transpose(x_, stride_, rows_, columns_, transposed_, rows_);
        }
        return {transposed_, rows_};
    }

  private:
    Arena& arena_;
    const float* x_;
    Index rows_, columns_, stride_;
    float* transposed_ = nullptr;
};

// Rows and columns are multiples of 2 W.
template <>
class Matrix<bf16> {
  public:
    Matrix(Arena& arena, const float* x, Index rows, Index columns) : Matrix(arena, x, rows, columns, columns) {}
    Matrix(Arena& arena, const float* x, Index rows, Index columns, Index stride)
        : arena_(arena), x_(x), rows_(rows), columns_(columns), stride_(stride) {}
    Matrix(Arena& arena, const bf16* x, Index rows, Index columns, Index stride)
        : arena_(arena), narrow_(x), rows_(rows), columns_(columns), stride_(stride) {}

    Left<bf16> left() { return {as_bf16(pairs_of_columns()), columns_, 1}; }

    Left<bf16> left_transposed() {
        const float* from = transposed_pairs();
        float* to = take_pairs();
        for (Index i = 0; i < columns_ / 2; i += W)
            for (Index row = i; row < i + W; ++row)
                for (Index j = 0; j < rows_; j += 2 * W) {
                    const float* pairs = from + row * rows_ + j;
                    float* lower = to + (i + row) * (rows_ / 2) + j / 2;
                    regroup(pairs, pairs + W, lower, lower + W * (rows_ / 2));
                }
        return {as_bf16(to), rows_, 1};
    }

    Right<bf16> right() {
        float* to = take_pairs();
        if (narrow_ != nullptr) pairs_of_rows(narrow_, to);
        else pairs_of_rows(x_, to);
        return {as_bf16(to), columns_};
    }

    Right<bf16> right_transposed() { return {as_bf16(transposed_pairs()), rows_}; }

  private:
    static const bf16* as_bf16(const float* pairs) { return reinterpret_cast<const bf16*>(pairs); }
    static void store_bits(float* p, BitVec x) { store(p, read<Vec>(&x)); }
    float* take_pairs() { return arena_.take(rows_ * columns_ / 2); }

    // (rows / 2, columns): rows i and i + W.
    template <class X>
    void pairs_of_rows(const X* x, float* to) const {
        for (Index i = 0; i < rows_; i += 2 * W)
            for (Index row = i; row < i + W; ++row, to += columns_)
                for (Index j = 0; j < columns_; j += W)
                    store_bits(to + j, interleave(x + row * stride_ + j, x + (row + W) * stride_ + j));
    }

    // (rows, columns / 2): columns j and j + W.
    const float* pairs_of_columns() {
        if (pairs_ != nullptr) return pairs_;
        pairs_ = take_pairs();
        if (narrow_ != nullptr) pairs_of_columns(narrow_, pairs_);
        else pairs_of_columns(x_, pairs_);
        return pairs_;
    }

    template <class X>
    void pairs_of_columns(const X* x, float* to) const {
        for (Index i = 0; i < rows_; ++i, x += stride_)
            for (Index j = 0; j < columns_; j += 2 * W, to += W) store_bits(to, interleave(x + j, x + j + W));
    }

    // (columns / 2, rows)
    const float* transposed_pairs() {
        if (transposed_ != nullptr) return transposed_;
        const float* from = pairs_of_columns();
        transposed_ = take_pairs();
        transpose(from, columns_ / 2, rows_, columns_ / 2, transposed_, rows_);
        return transposed_;
    }

    // (a, b) and (c, d), each a vector of pairs, to (a, c) and (b, d).
    static void regroup(const float* first, const float* second, float* lower, float* upper) {
        const BitVec x = read<BitVec>(first), y = read<BitVec>(second);
        store_bits(lower, (x & 0xffffu) | (y << 16));
        store_bits(upper, (x >> 16) | (y & 0xffff0000u));
    }

    Arena& arena_;
    const float* x_ = nullptr;  // either
    const bf16* narrow_ = nullptr;
    Index rows_, columns_, stride_;
    float *pairs_ = nullptr, *transposed_ = nullptr;
};

}  // namespace lin_attn
