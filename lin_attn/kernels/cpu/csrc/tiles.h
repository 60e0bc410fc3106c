// bfloat16 products on the tile registers of x86 (AMX, Intel's Sapphire Rapids and later): one instruction multiplies a tile of
// 16 × 32 bfloat16 by one of 32 × 16 and adds the float32 result to a tile of 16 × 16.
//
// The processor has them for a process that the system has permitted (Linux lends out their 8 KiB of state on request), and
// for a thread that has configured them.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__) && LIN_ATTN_HAS_DPBF16 && LIN_ATTN_LANES == 16
#define LIN_ATTN_HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define LIN_ATTN_HAS_AMX 0
#endif

namespace lin_attn {

// How bfloat16 is multiplied best here: not at all, but in float32; by vectors; by tiles.
enum class Bf16 : int64_t { floats, vectors, tiles };

#if LIN_ATTN_HAS_AMX
inline bool tiles_permitted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of the kernel's asm/prctl.h, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}
#else
inline bool tiles_permitted() { return false; }
#endif

inline Bf16 best_bf16() {
    if (tiles_permitted()) return Bf16::tiles;
#if LIN_ATTN_HAS_DPBF16
    // Intel's vectors multiply bfloat16 no faster than float32, AMD's do.
    return __builtin_cpu_is("intel") ? Bf16::floats : Bf16::vectors;
#else
    return Bf16::floats;
#endif
}

// While it lives, its thread has tiles of full size.
class Tiles {
  public:
#if LIN_ATTN_HAS_AMX
    explicit Tiles(bool wanted) : in_use_(wanted && tiles_permitted()) {
        if (!in_use_) return;
        _tile_loadconfig(&CONFIG);
    }
    ~Tiles() {
        if (in_use_) _tile_release();  // the system has less to save then
    }
#else
    explicit Tiles(bool) {}
#endif
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

  private:
#if LIN_ATTN_HAS_AMX
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    // Static: GCC believes that loading a configuration reads its first 8 bytes only, and would not write the rest of a local.
    static constexpr Config CONFIG = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#endif
    [[maybe_unused]] bool in_use_ = false;
};

#if LIN_ATTN_HAS_AMX
namespace detail {

// C (16 · row_tiles × 16 · column_tiles) += or = A B over k < depth, a multiple of 32. A's rows lie contiguous along k; B's
// rows 2i and 2i + 1 are interleaved. Strides in bytes. Two by two tiles share their loads: 4 to 4 products.
template <int row_tiles, int column_tiles>
inline void amx_block(
    Index depth, const char* a, Index a_stride, const char* b, Index b_stride, float* c, Index ldc, bool add) {
    constexpr bool down = row_tiles == 2, across = column_tiles == 2;
    const Index c_stride = ldc * 4;
    asm volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory, nor that they are stored to it
    if (add) {
        _tile_loadd(0, c, c_stride);
        if (across) _tile_loadd(1, c + 16, c_stride);
        if (down) _tile_loadd(2, c + 16 * ldc, c_stride);
        if (down && across) _tile_loadd(3, c + 16 * ldc + 16, c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (Index k = 0; k < depth; k += 32) {
        const char *left = a + 2 * k, *right = b + k / 2 * b_stride;
        _tile_loadd(4, left, a_stride);
        _tile_loadd(6, right, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (across) {
            _tile_loadd(7, right + 64, b_stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (down) {
            _tile_loadd(5, left + 16 * a_stride, a_stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (down && across) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride);
    if (across) _tile_stored(1, c + 16, c_stride);
    if (down) _tile_stored(2, c + 16 * ldc, c_stride);
    if (down && across) _tile_stored(3, c + 16 * ldc + 16, c_stride);
    asm volatile("" ::: "memory");
}

}  // namespace detail
#endif

}  // namespace lin_attn
