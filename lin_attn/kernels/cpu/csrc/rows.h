// Rows of q, k, v and of their gradients: read from the caller's tensors, mapped to features and back.
//
//     numerator: R φ(x), denominator: φ(x)        rope after φ (RoFormer, arXiv 2104.09864, eq. 19)
//     both: φ(R x)                                rope before φ
//
// R turns the pairs (x_2i, x_2i+1) by the angles of a position. A row lies in scratch memory as float32, filled up with
// zeros to whole vectors.

#pragma once

#include <algorithm>

#include "problem.h"
#include "vectors.h"

namespace lin_attn {

// The rows of one head of a tensor.
template <class T>
struct Rows {
    T* p;
    Index row, col;  // strides
    Index dim;       // columns
};

template <class T>
Rows<T> rows_of(const Tensor& x, Index batch, Index head, Index dim) {
    return {static_cast<T*>(x.data) + batch * x.stride[0] + head * x.stride[1], x.stride[2], x.stride[3], dim};
}

// Rows are read once in a scan, a chunk at a time, and the work on a chunk is long: the one after the next is asked for
// meanwhile.
constexpr Index AHEAD = 2 * CHUNK;

template <class T>
void prefetch(const T* p, Index n) {
    for (Index j = 0; j < n; j += 64 / sizeof(T)) __builtin_prefetch(p + j, 0, 2);
}

template <class T>
void prefetch_to_write(const T* p, Index n) {
    for (Index j = 0; j < n; j += 64 / sizeof(T)) __builtin_prefetch(p + j, 1, 2);
}

// Row n as float32 with zeros up to whole vectors; `buffer` has room for it, and is not used where it lies so already.
template <class T>
const float* read_row(const Rows<T>& x, Index n, float* buffer) {
    const T* p = x.p + n * x.row;
    Index j = 0;
    if (x.col == 1) {
        prefetch(p + AHEAD * x.row, x.dim);
        if constexpr (sizeof(T) == sizeof(float)) {
            if (x.dim % W == 0) return p;
        }
        for (; j + W <= x.dim; j += W) store(buffer + j, load(p + j));
    }
    for (; j < x.dim; ++j) buffer[j] = widen(p[j * x.col]);
    for (; j % W; ++j) buffer[j] = 0;
    return buffer;
}

// Row n = scale · row.
template <class T>
void write_row(const Rows<T>& x, Index n, const float* row, float scale = 1) {
    T* p = x.p + n * x.row;
    Index j = 0;
    if (x.col == 1)
        for (; j + W <= x.dim; j += W) store(p + j, load(row + j) * scale);
    for (; j < x.dim; ++j) put(p + j * x.col, row[j] * scale);
}

template <class T>
void write_zeros(const Rows<T>& x, Index n) {
    for (Index j = 0; j < x.dim; ++j) put(x.p + n * x.row + j * x.col, 0.0f);
}

// The rotation of one position: cos and sin of D / 2 angles; null without rotation.
struct Angles {
    const float *cos, *sin;
};

inline Vec rotate(Vec x, Angles angles, Index j) {
    return multiply_subtract_add(x, twice(angles.cos + j / 2), swap_pairs(x) * twice(angles.sin + j / 2));
}

inline Vec rotate_back(Vec x, Angles angles, Index j) {
    return multiply_subtract_add(x, twice(angles.cos + j / 2), swap_pairs(x) * -twice(angles.sin + j / 2));
}

template <Phi phi>
Vec apply(Vec x) {
    if constexpr (phi == Phi::identity) return x;
    if constexpr (phi == Phi::relu) return maximum(x, Vec{});
    if constexpr (phi == Phi::squared_relu) return maximum(x, Vec{}) * maximum(x, Vec{});
    return x > Vec{} ? x + 1.0f : exp_nonpositive(x);  // elu(x) + 1, without its cancellation
}

// φ'(x)
template <Phi phi>
Vec slope(Vec x) {
    if constexpr (phi == Phi::identity) return splat(1.0f);
    if constexpr (phi == Phi::relu) return x > Vec{} ? splat(1.0f) : Vec{};
    if constexpr (phi == Phi::squared_relu) return 2.0f * maximum(x, Vec{});
    return x > Vec{} ? splat(1.0f) : exp_nonpositive(x);
}

// x with zeros in all lanes but the first `columns`: φ(0) need not be 0.
inline Vec only_columns(Vec x, Index columns) {
    if (columns == W) return x;
    float lanes[W];
    store(lanes, x);
    std::fill(lanes + columns, lanes + W, 0.0f);
    return load(lanes);
}

template <Phi phi>
void features_of(Rope rope, const float* x, Index dim, Angles angles, float* numerator, float* denominator) {
    const auto vector = [&](Index j, Index columns) {
        Vec y = load(x + j);
        if (rope == Rope::before) y = rotate(y, angles, j);
        y = only_columns(apply<phi>(y), columns);
        store(denominator + j, y);
        store(numerator + j, rope == Rope::after ? rotate(y, angles, j) : y);
    };
    Index j = 0;
    for (; j + W <= dim; j += W) vector(j, W);
    if (j < dim) vector(j, dim - j);
}

// φ and R of a row of `dim` entries, both zero from there to whole vectors.
inline void features(Phi phi, Rope rope, const float* x, Index dim, Angles angles, float* numerator, float* denominator) {
    switch (phi) {
        case Phi::identity: return features_of<Phi::identity>(rope, x, dim, angles, numerator, denominator);
        case Phi::relu: return features_of<Phi::relu>(rope, x, dim, angles, numerator, denominator);
        case Phi::squared_relu: return features_of<Phi::squared_relu>(rope, x, dim, angles, numerator, denominator);
        case Phi::elu1: return features_of<Phi::elu1>(rope, x, dim, angles, numerator, denominator);
    }
}

// grad = x's gradient, from those of its numerator's and its denominator's features, of which the latter is
// `scale` · denominator. grad may be numerator.
template <Phi phi>
void gradient_of(
    Rope rope, const float* x, Index dim, Angles angles, const float* numerator, const float* denominator, float scale,
    float* grad) {
    for (Index j = 0; j < dim; j += W) {
        Vec y = load(x + j), g = load(numerator + j);
        if (rope == Rope::before) y = rotate(y, angles, j);
        if (rope == Rope::after) g = rotate_back(g, angles, j);
        g = (g + scale * load(denominator + j)) * slope<phi>(y);
        if (rope == Rope::before) g = rotate_back(g, angles, j);
        store(grad + j, g);
    }
}

inline void gradient(
    Phi phi, Rope rope, const float* x, Index dim, Angles angles, const float* numerator, const float* denominator,
    float scale, float* grad) {
    const auto call = [&](auto of) { of(rope, x, dim, angles, numerator, denominator, scale, grad); };
    switch (phi) {
        case Phi::identity: return call(gradient_of<Phi::identity>);
        case Phi::relu: return call(gradient_of<Phi::relu>);
        case Phi::squared_relu: return call(gradient_of<Phi::squared_relu>);
        case Phi::elu1: return call(gradient_of<Phi::elu1>);
    }
}

inline float dot(const float* x, const float* y, Index padded) {
    Vec total{};
    for (Index j = 0; j < padded; j += W) total += load(x + j) * load(y + j);
    return sum(total);
}

// x *= scale
inline void scale_row(float* x, float scale, Index padded) {
    for (Index j = 0; j < padded; j += W) store(x + j, load(x + j) * scale);
}

// y += scale · x
inline void add_scaled(float* y, float scale, const float* x, Index padded) {
    for (Index j = 0; j < padded; j += W) store(y + j, load(y + j) + scale * load(x + j));
}

}  // namespace lin_attn
