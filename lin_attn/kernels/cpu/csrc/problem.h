// What Python hands over: one struct for forward, backward and decode. lin_attn/kernels/cpu/library.py mirrors it.
//
// Letters, as everywhere: B batch, H heads of q, K heads of k and v, N length, D head dim, M value head dim.

#pragma once

#include <cstdint>

namespace lin_attn {

// (batch, head, position, dim), strides in elements.
struct Tensor {
    void* data;
    int64_t stride[4];
};

struct Problem {
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;

    Tensor q, k, v;                   // (B, H, queries, D), (B, K, keys, D), (B, K, keys, M)
    Tensor out;                       // (B, H, queries, M)
    Tensor grad_out, grad_q, grad_k, grad_v;

    const uint8_t* key_mask;          // (B, keys), 0 where hidden; null if none is
    int64_t key_mask_stride[2];
    const float *cos, *sin;           // (positions, D / 2), dense; null without rotation

    const float *kv, *k_sum;          // S (B, K, D, M) and z (B, K, D) before these tokens, dense
    float *new_kv, *new_k_sum;        // and after them
    const float *grad_new_kv, *grad_new_k_sum;  // null: zero
    float *grad_kv, *grad_k_sum;

    float* denominators;              // (B, H, queries), dense; null if not normalised
    float* slopes;                    // likewise: the denominators' gradients, from one scan of backward to the next

    float eps;                        // least magnitude of a denominator
    int32_t feature_map;              // lin_attn::Phi
    int32_t rope;                     // lin_attn::Rope
    int32_t causal;
    int32_t bf16_tensors;             // q, k, v, out and their gradients: 1 bfloat16, 0 float32
    int32_t bf16_products;            // 1: operands of products are rounded to bfloat16, if D and M allow
    int32_t threads;
    int32_t poison;                   // 1: scratch memory starts as NaN
};

constexpr int64_t CHUNK = 32;     // tokens
constexpr int64_t MAX_DIM = 256;  // of D and M

enum class Phi : int32_t { identity, relu, squared_relu, elu1 };
enum class Rope : int32_t { none, after, before };

}  // namespace lin_attn
