// Linear attention on the CPU: forward, backward, and for a step of decoding attention and projection, as functions of C.

#include "attend.h"
#include "tiles.h"

namespace lin_attn {

// Of passes.h, compiled in float32.cpp and bfloat16.cpp.
template <class P>
void forward(const Problem& p);
template <class P>
void backward(const Problem& p);

namespace {

// Whether products are of bfloat16: if that is asked for, and D and M and the system allow it.
bool in_bf16(const Problem& p) {
    const bool in_pairs = p.dim % (2 * W) == 0 && p.value_dim % (2 * W) == 0;
    return p.bf16_tensors && p.bf16_products && in_pairs && (!LIN_ATTN_HAS_AMX || tiles_permitted());
}

// 1 if memory ran out, else 0.
template <class What, class... Arguments>
int run(What what, const Arguments&... arguments) {
    try {
        what(arguments...);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace
}  // namespace lin_attn

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int lin_attn_forward(const lin_attn::Problem* p) {
    return lin_attn::run(lin_attn::in_bf16(*p) ? lin_attn::forward<lin_attn::bf16> : lin_attn::forward<float>, *p);
}

EXPORT int lin_attn_backward(const lin_attn::Problem* p) {
    return lin_attn::run(lin_attn::in_bf16(*p) ? lin_attn::backward<lin_attn::bf16> : lin_attn::backward<float>, *p);
}

EXPORT int lin_attn_step(const lin_attn::Problem* p) { return lin_attn::run(lin_attn::step, *p); }

// Of attend.h.
EXPORT int lin_attn_attend(
    const lin_attn::Problem* p, const void* x, int64_t in, const lin_attn::Layer* layers, int32_t normalize,
    int32_t threads) {
    const auto attend = p->bf16_tensors ? lin_attn::attend<lin_attn::bf16> : lin_attn::attend<float>;
    return lin_attn::run(attend, *p, x, in, layers, normalize, threads);
}

// x (tokens, in) through so many layers; all tensors are bfloat16 or float32.
EXPORT void lin_attn_project(
    const void* x, const lin_attn::Layer* layers, int64_t count, int64_t tokens, int64_t in, int32_t bf16,
    int32_t threads) {
    (bf16 ? lin_attn::project<lin_attn::bf16> : lin_attn::project<float>)(x, layers, count, tokens, in, threads);
}

// What was built: size of Problem, floats a vector, and how bfloat16 is multiplied (lin_attn::Bf16).
EXPORT int64_t lin_attn_built(int what) {
    switch (what) {
        case 0: return sizeof(lin_attn::Problem);
        case 1: return lin_attn::W;
        default: return static_cast<int64_t>(lin_attn::best_bf16());
    }
}
}
