// Scratch memory of one thread, lines that are asked for ahead, pages of results, and the threads.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "vectors.h"

namespace lin_attn {

struct Freed {
    void operator()(float* p) const { std::free(p); }
};
using Block = std::unique_ptr<float[], Freed>;

// n floats, aligned to a cache line.
inline Block allocate(Index n, bool poison) {
    float* p = static_cast<float*>(std::aligned_alloc(64, round_up(std::max<Index>(n, 1) * 4, 64)));
    if (p == nullptr) throw std::bad_alloc();
    if (poison) std::fill(p, p + n, std::numeric_limits<float>::quiet_NaN());
    return Block(p);
}

// Hands out memory that all goes back at once, when `clear` is called, and is kept for the next requests.
class Arena {
  public:
    void start(bool poison) {
        poison_ = poison;
        if (poison) blocks_.clear();  // each will be of the size that is asked for, and a sanitizer sees where it ends
        next_ = 0;
    }

    float* take(Index n) {
        if (next_ == blocks_.size()) blocks_.emplace_back();
        Sized& block = blocks_[next_++];
        if (block.size < n) {
            block = {};  // not two at a time
            block = {allocate(n, poison_), n};
        }
        return block.memory.get();
    }

    void clear() {
        next_ = 0;
        if (poison_)
            for (Sized& block : blocks_)
                std::fill(block.memory.get(), block.memory.get() + block.size, std::numeric_limits<float>::quiet_NaN());
    }

    // After a call: gives back what is much.
    void finish() {
        Index size = 0;
        for (const Sized& block : blocks_) size += block.size;
        if (size > KEPT) blocks_.clear();
    }

  private:
    static constexpr Index KEPT = 1 << 20;  // floats

    // A block for each request: a call's chunks all make the same ones.
    struct Sized {
        Block memory;
        Index size = 0;
    };
    std::vector<Sized> blocks_;
    size_t next_ = 0;
    bool poison_ = false;
};

// A thread's own, for a call's sums and for the scratch memory of its parts. They keep up to 4 MiB each for the next call:
// taking it from the system each time, a page at a time, can cost a short call more than its work.
inline Arena& arena_of_sums() {
    static thread_local Arena arena;
    return arena;
}
inline Arena& arena_of_scratch() {
    static thread_local Arena arena;
    return arena;
}

// Lines of memory that will be wanted in the next chunk, asked for a few at a time in the midst of this one's work: all at
// once they would fill the buffers that wait for lines, and every load behind them would wait too.
class Ahead {
  public:
    // most: the lines that a product asks for.
    explicit Ahead(Index most) : most_(most), lines_(round_up(most, 4)) { close(); }

    void clear() { count_ = next_ = 0; }

    // Rows of so many bytes, `stride` bytes apart.
    void add(const void* p, Index stride, Index rows, Index bytes) {
        if (stride == bytes) {  // one after the other
            bytes *= rows;
            rows = 1;
        }
        const Index lines = (bytes + 63) / 64, end = count_ + rows * lines;
        if (static_cast<Index>(lines_.size()) < end + most_ + 4) lines_.resize(end + most_ + 4);
        const auto first = static_cast<Index>(reinterpret_cast<uintptr_t>(p));
        const char** to = lines_.data() + count_;
        for (Index row = 0; row < rows; ++row, to += lines)
            for (Index i = 0; i < lines; i += 4) {  // what is too much is written over, or lies in the room behind
                const Four four = first + row * stride + 64 * i + Four{0, 64, 128, 192};
                std::memcpy(to + i, &four, sizeof four);
            }
        count_ = end;
    }

    // After the last `add`: fills the room behind with a line that is always at hand.
    void close() {
        const Four four = static_cast<Index>(reinterpret_cast<uintptr_t>(this)) + Four{};
        for (Index i = 0; i < most_; i += 4) std::memcpy(lines_.data() + count_ + i, &four, sizeof four);
    }

    Index left() const { return count_ - next_; }

    void ask(Index n) {
        for (n = std::min(n, left()); n > 0; --n) __builtin_prefetch(lines_[next_++], 0, 2);
    }

    // What is left, and behind it as much as a product may run over; how many were asked for is said afterwards.
    const char* const* lines() const { return lines_.data() + next_; }
    void asked(Index n) { next_ += std::min(n, left()); }

  private:
    typedef Index Four __attribute__((vector_size(4 * sizeof(Index))));
    Index most_, count_ = 0, next_ = 0;
    std::vector<const char*> lines_;
};

// Asks for pages of 2 MiB under memory that is about to be written for the first time: taking it in pages of 4 KiB, one fault
// each, can take longer than the attention that fills it. A hint: where it is not understood, nothing is lost.
inline void expect_writes(void* p, Index bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 2 << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

// torch's own pool of threads, if it is OpenMP's: a second pool beside it would fight it for the cores.
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

// Calls body(arena, i) for each i < items, on so many threads; each takes the next item when it is done with one.
template <class Body>
void parallel(Index items, int threads, bool poison, Body body) {
    struct Shared {
        std::atomic<Index> next{0};
        std::atomic<bool> failed{false};
        Index items;
        bool poison;
        Body* body;
    } shared;
    shared.items = items;
    shared.poison = poison;
    shared.body = &body;
    const auto run = +[](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        try {  // an exception may not leave a thread
            Arena& arena = arena_of_scratch();
            arena.start(shared.poison);
            for (Index i; (i = shared.next++) < shared.items;) (*shared.body)(arena, i);
            arena.finish();
        } catch (const std::bad_alloc&) {
            shared.failed = true;
        }
    };
    const int team = static_cast<int>(std::min<Index>(threads, items));
    if (team <= 1) {
        run(&shared);
    } else if (GOMP_parallel != nullptr) {
        GOMP_parallel(run, &shared, team, 0);
    } else {
        std::vector<std::thread> others;
        for (int i = 1; i < team; ++i) others.emplace_back(run, &shared);
        run(&shared);
        for (std::thread& other : others) other.join();
    }
    if (shared.failed) throw std::bad_alloc();
}

}  // namespace lin_attn
