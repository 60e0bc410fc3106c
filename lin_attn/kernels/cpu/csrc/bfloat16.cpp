// Forward and backward with bfloat16 products, a file of their own as files are compiled side by side.

#include "passes.h"

template void lin_attn::forward<lin_attn::bf16>(const Problem&);
template void lin_attn::backward<lin_attn::bf16>(const Problem&);
