// Forward and backward with float32 products, a file of their own as files are compiled side by side.

#include "passes.h"

template void lin_attn::forward<float>(const Problem&);
template void lin_attn::backward<float>(const Problem&);
