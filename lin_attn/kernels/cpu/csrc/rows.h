// Rows of q, k, v and of their gradients: read from the caller's tensors, mapped to features and back.
//
//     numerator: R φ(x), denominator: φ(x)        rope after φ (RoFormer, arXiv 2104.09864, eq. 19)
//     both: φ(R x)                                rope before φ
//
// R turns the pairs (x_2i, x_2i+1) by the angles of a position. What is made of a row lies in scratch memory as float32, filled up
// with zeros to whole vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "problem.h"
#include "vectors.h"

namespace lin_attn {

// The rows of one head of a tensor, of float or bf16 as the problem says.
struct Rows {
    void* p;
    Index row, col;  // strides, in elements
    Index dim;       // columns
    Index element;   // bytes

    bool is_bf16() const { return element == sizeof(bf16); }
    char* at(Index n) const { return static_cast<char*>(p) + n * row * element; }

    bool is_dense() const { return col == 1 && dim % W == 0; }  // whole vectors, without gaps

    // Whether they can be operands of products in float32; those of another alignment take two lines a vector.
    bool is_aligned() const {
        return !is_bf16() && is_dense() && reinterpret_cast<uintptr_t>(p) % (4 * W) == 0 && row % W == 0;
    }

    template <class T>
    T* elements(Index n) const {
        return reinterpret_cast<T*>(at(n));
    }
    float* floats(Index n) const { return elements<float>(n); }

    // Whether products can write vectors of T to them.
    template <class T>
    bool can_hold() const {
        return std::is_same_v<T, bf16> ? is_bf16() && is_dense() : is_aligned();
    }
};

inline Index element_size(const Problem& problem) { return problem.bf16_tensors ? sizeof(bf16) : sizeof(float); }

inline Rows rows_of(const Problem& problem, const Tensor& x, Index batch, Index head, Index dim) {
    const Index element = element_size(problem), start = (batch * x.stride[0] + head * x.stride[1]) * element;
    return {static_cast<char*>(x.data) + start, x.stride[2], x.stride[3], dim, element};
}

// A tensor's element type in memory, where its rows are whole vectors without gaps; else Any.
struct Any {};

// A feature map and the place of its rotation, each a value or a type that the compiler knows, and what is known of the rows.
template <class F, class R, class Element>
struct Map {
    F phi;
    R rope;
};

// What is worth loops of its own.
using Elu1 = std::integral_constant<Phi, Phi::elu1>;
using RopeAfter = std::integral_constant<Rope, Rope::after>;

namespace detail {

template <class T>
INLINE void read_elements(const T* p, Index col, Index dim, float* buffer) {
    Index j = 0;
    if (col == 1)
        for (; j + W <= dim; j += W) store(buffer + j, load(p + j));
    for (; j < dim; ++j) buffer[j] = widen(p[j * col]);
    for (; j % W; ++j) buffer[j] = 0;
}

template <class T>
INLINE void write_elements(T* p, Index col, Index dim, const float* row, float scale) {
    Index j = 0;
    if (col == 1)
        for (; j + W <= dim; j += W) store(p + j, load(row + j) * scale);
    for (; j < dim; ++j) put(p + j * col, row[j] * scale);
}

}  // namespace detail

// Row n as float32 with zeros up to whole vectors; `buffer` has room for it, and is not used where it lies so already.
INLINE const float* read_row(const Rows& x, Index n, float* buffer) {
    if (x.is_bf16()) {
        detail::read_elements(reinterpret_cast<const bf16*>(x.at(n)), x.col, x.dim, buffer);
        return buffer;
    }
    const auto* p = reinterpret_cast<const float*>(x.at(n));
    if (x.col == 1 && x.dim % W == 0) return p;
    detail::read_elements(p, x.col, x.dim, buffer);
    return buffer;
}

// The same, where it lies if the map knows its elements.
template <class F, class R, class Element>
INLINE auto read_row(Map<F, R, Element>, const Rows& x, Index n, float* buffer) {
    if constexpr (std::is_same_v<Element, Any>) return read_row(x, n, buffer);
    else return reinterpret_cast<const Element*>(x.at(n));
}

// Row n = scale · row.
INLINE void write_row(const Rows& x, Index n, const float* row, float scale = 1) {
    if (x.is_bf16()) detail::write_elements(reinterpret_cast<bf16*>(x.at(n)), x.col, x.dim, row, scale);
    else detail::write_elements(reinterpret_cast<float*>(x.at(n)), x.col, x.dim, row, scale);
}

inline void write_zeros(const Rows& x, Index n) {
    static constexpr float zeros[MAX_DIM] = {};
    write_row(x, n, zeros);
}

// The rotation of one position: cos and sin of D / 2 angles; null without rotation.
struct Angles {
    const float *cos, *sin;
};

// cos and sin of a vector's pairs, each of them twice.
struct Turn {
    Vec cos, sin;

    // From column j, of which only so many `columns` are there.
    INLINE static Turn at(Angles angles, Index j, Index columns) {
        if (columns >= W) return {twice(angles.cos + j / 2), twice(angles.sin + j / 2)};
        float cos[W / 2] = {}, sin[W / 2] = {};
        std::copy_n(angles.cos + j / 2, columns / 2, cos);
        std::copy_n(angles.sin + j / 2, columns / 2, sin);
        return {twice(cos), twice(sin)};
    }
};

INLINE Vec rotate(Vec x, Turn turn) { return multiply_subtract_add(x, turn.cos, swap_pairs(x) * turn.sin); }
INLINE Vec rotate_back(Vec x, Turn turn) { return multiply_subtract_add(x, turn.cos, swap_pairs(x) * -turn.sin); }

// Calls body(map) once for all rows of a loop. Not inline: among all else that a scan does, GCC runs out of registers for the
// constants of elu + 1.
template <class Body>
__attribute__((noinline)) void with(Phi phi, Rope rope, const Rows& rows, const Body& body) {
    if (phi != Phi::elu1) body(Map<Phi, Rope, Any>{phi, rope});
    else if (rope != Rope::after || !rows.is_dense()) body(Map<Elu1, Rope, Any>{{}, rope});
    else if (rows.is_bf16()) body(Map<Elu1, RopeAfter, bf16>{});
    else body(Map<Elu1, RopeAfter, float>{});
}

INLINE Vec apply(Elu1, Vec x) { return x > Vec{} ? x + 1.0f : exp_nonpositive(x); }  // elu(x) + 1, without its cancellation

INLINE Vec apply(Phi phi, Vec x) {
    switch (phi) {
        case Phi::identity: return x;
        case Phi::relu: return maximum(x, Vec{});
        case Phi::squared_relu: return maximum(x, Vec{}) * maximum(x, Vec{});
        default: __builtin_unreachable();  // elu + 1 comes as Elu1
    }
}

// φ'(x)
INLINE Vec slope(Elu1, Vec x) { return x > Vec{} ? splat(1.0f) : exp_nonpositive(x); }

INLINE Vec slope(Phi phi, Vec x) {
    switch (phi) {
        case Phi::identity: return splat(1.0f);
        case Phi::relu: return x > Vec{} ? splat(1.0f) : Vec{};
        case Phi::squared_relu: return 2.0f * maximum(x, Vec{});
        default: __builtin_unreachable();
    }
}

// Calls body(j, columns) for each vector of a row: its first column, and how many there are from there on, at most W.
template <class Element, class Body>
INLINE void each_vector(Index dim, Body body) {
    Index j = 0;
    if constexpr (!std::is_same_v<Element, Any>) {
        constexpr int TOGETHER = 4;  // a head of 64 is one of these with AVX-512
        for (; j + TOGETHER * W <= dim; j += TOGETHER * W)
            for (int i = 0; i < TOGETHER; ++i) body(j + i * W, W);
        for (; j < dim; j += W) body(j, W);
    } else {
        for (; j < dim; j += W) body(j, std::min<Index>(W, dim - j));
    }
}

// φ and R of a row of `dim` entries: the numerator's features, with zeros up to whole vectors, and a call of take(j, y) for
// each vector of the denominator's, j being its first column.
template <class F, class R, class Element, class X, class Take>
INLINE void features(Map<F, R, Element> map, const X* x, Index dim, Angles angles, float* numerator, Take take) {
    each_vector<Element>(dim, [&](Index j, Index columns) INLINE_LAMBDA {
        Vec y = load(x + j);
        if (map.rope == Rope::before) y = rotate(y, Turn::at(angles, j, columns));
        y = apply(map.phi, y);
        if (columns < W) y = first_lanes(y, columns);  // φ(0) need not be 0
        take(j, y);
        store(numerator + j, map.rope == Rope::after ? rotate(y, Turn::at(angles, j, columns)) : y);
    });
}

// grad = x's gradient, from those of its numerator's and its denominator's features, of which the latter is
// `scale` · denominator. grad may be numerator.
template <class F, class R, class Element, class X>
INLINE void gradient(
    Map<F, R, Element> map, const X* x, Index dim, Angles angles, const float* numerator, const float* denominator,
    float scale, float* grad) {
    each_vector<Element>(dim, [&](Index j, Index columns) INLINE_LAMBDA {
        Vec y = load(x + j), g = load(numerator + j);
        if (map.rope == Rope::before) y = rotate(y, Turn::at(angles, j, columns));
        if (map.rope == Rope::after) g = rotate_back(g, Turn::at(angles, j, columns));
        g = (g + scale * load(denominator + j)) * slope(map.phi, y);
        if (map.rope == Rope::before) g = rotate_back(g, Turn::at(angles, j, columns));
        store(grad + j, g);
    });
}

// Of such magnitude that it can divide.
inline float floored(float d, float eps) { return std::fabs(d) < eps ? (d < 0 ? -eps : eps) : d; }

inline float dot(const float* x, const float* y, Index padded) {
    Vec total{};
    for (Index j = 0; j < padded; j += W) total += load(x + j) * load(y + j);
    return sum(total);
}

inline void zero_row(float* y, Index padded) {
    for (Index j = 0; j < padded; j += W) store(y + j, Vec{});
}

inline void copy_row(const float* x, float* y, Index padded) {
    for (Index j = 0; j < padded; j += W) store(y + j, load(x + j));
}

// y = scale · x
inline void scale_row(const float* x, float scale, float* y, Index padded) {
    for (Index j = 0; j < padded; j += W) store(y + j, load(x + j) * scale);
}

// y += scale · x
inline void add_scaled(float* y, float scale, const float* x, Index padded) {
    for (Index j = 0; j < padded; j += W) store(y + j, load(y + j) + scale * load(x + j));
}

}  // namespace lin_attn
