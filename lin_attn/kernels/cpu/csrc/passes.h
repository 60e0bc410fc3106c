// Forward and backward over all heads of a batch, on all threads.
//
// A head of keys and values, with the heads of queries that share it, is a pair (batch, kv head). Where there are too few
// pairs to keep the threads busy, each sequence is cut into segments: the sums of each are made first, from which follows
// what every segment starts with; then the segments are scanned side by side. Forward's first segment needs no sums, and so
// it is scanned while those of the others are made.

#pragma once

#include <cmath>

#include "scan.h"

namespace lin_attn {

// A sequence cut into parts of equal length, but for the last, and for a first one of another length if that is not 0.
struct Segments {
    Index count, length, total, first = 0;
    Index begin(Index j) const { return std::min(total, first == 0 || j == 0 ? j * length : first + (j - 1) * length); }
    Index end(Index j) const { return begin(j + 1); }
};

// S and z, or dS and dz, of every pair and segment, until the call ends.
class AllSums {
  public:
    AllSums(const Problem& p, Index segments)
        : dim_(p.dim), value_dim_(p.value_dim), D_(round_up(dim_, W)), M_(round_up(value_dim_, W)), segments_(segments),
          memory_(arena_of_sums().take(p.batch * p.kv_heads * segments * size())) {}

    Sums at(Index pair, Index segment) const {
        float* s = memory_ + (pair * segments_ + segment) * size();
        return {s, s + D_ * M_};
    }

    void clear(Index pair, Index segment) {
        const Sums sums = at(pair, segment);
        std::fill(sums.s, sums.s + size(), 0.0f);
    }

    void add(Index pair, Index segment, const AllSums& others, Index other) {
        const Sums to = at(pair, segment), from = others.at(pair, other);
        add_scaled(to.s, 1.0f, from.s, size());  // S and z, one after the other, in whole vectors
    }

    // From (or to) a pair's dense S (D, M) and z (D); null is zero.
    void add_state(Index pair, Index segment, const float* kv, const float* k_sum) {
        const Sums sums = at(pair, segment);
        for (Index i = 0; i < dim_ && kv != nullptr; ++i)
            add_dense(sums.s + i * M_, kv + (pair * dim_ + i) * value_dim_, value_dim_);
        if (k_sum != nullptr) add_dense(sums.z, k_sum + pair * dim_, dim_);
    }

    void write_state(Index pair, Index segment, float* kv, float* k_sum) const {
        const Sums sums = at(pair, segment);
        for (Index i = 0; i < dim_; ++i) std::copy_n(sums.s + i * M_, value_dim_, kv + (pair * dim_ + i) * value_dim_);
        std::copy_n(sums.z, dim_, k_sum + pair * dim_);
    }

  private:
    Index size() const { return D_ * M_ + D_; }

    static void add_dense(float* to, const float* from, Index n) {
        Index i = 0;
        for (; i + W <= n; i += W) store(to + i, load(to + i) + load(from + i));
        for (; i < n; ++i) to[i] += from[i];
    }

    Index dim_, value_dim_, D_, M_, segments_;  // D_, M_: in whole vectors
    float* memory_;
};

template <class P>
class Passes {
  public:
    explicit Passes(const Problem& p) : p_(p), pairs_(p.batch * p.kv_heads) { arena_of_sums().start(p.poison); }
    ~Passes() { arena_of_sums().finish(); }
    Passes(const Passes&) = delete;

    void forward() {
        expect(p_.out, p_.heads * p_.queries * p_.value_dim);
        if (p_.causal) {
            const Segments segments = cut_ahead(p_.queries);
            const Index done = segments.first == 0 ? 0 : 1, last = segments.count - 1;
            AllSums sums = segment_starts(segments);
            each(segments.count - done, [&](Scan<P> scan, Index pair, Index i) {
                const Index j = done + i;
                scan.outputs(segments.begin(j), segments.end(j), sums.at(pair, j));
                if (j == last) sums.write_state(pair, j, p_.new_kv, p_.new_k_sum);
            });
            return;
        }
        const AllSums sums = key_totals();
        for (Index pair = 0; pair < pairs_; ++pair) sums.write_state(pair, 0, p_.new_kv, p_.new_k_sum);
        const Segments segments = cut(p_.queries, 0);
        each(segments.count, [&](Scan<P> scan, Index pair, Index j) {
            scan.outputs(segments.begin(j), segments.end(j), sums.at(pair, 0));
        });
    }

    void backward() {
        expect(p_.grad_q, p_.heads * p_.queries * p_.dim);
        expect(p_.grad_k, p_.kv_heads * p_.keys * p_.dim);
        expect(p_.grad_v, p_.kv_heads * p_.keys * p_.value_dim);
        const Segments of_queries = cut(p_.queries, p_.causal ? EXTRA_PASS : 0);
        const AllSums starts = p_.causal ? segment_starts(of_queries) : key_totals();
        // Causal: dS and dz at each segment's end, to which the queries of the segments after it give.
        AllSums ends(p_, of_queries.count);
        each(of_queries.count, [&](Scan<P> scan, Index pair, Index j) {
            const Index receiver = p_.causal ? j - 1 : j;
            if (receiver < 0) {
                scan.query_gradients(of_queries.begin(j), of_queries.end(j), starts.at(pair, j), nullptr);
                return;
            }
            ends.clear(pair, receiver);
            const Sums from_queries = ends.at(pair, receiver);
            scan.query_gradients(
                of_queries.begin(j), of_queries.end(j), starts.at(pair, p_.causal ? j : 0), &from_queries);
        });
        if (p_.causal) {
            const Index last = of_queries.count - 1;
            for (Index pair = 0; pair < pairs_; ++pair) {
                ends.clear(pair, last);
                ends.add_state(pair, last, p_.grad_new_kv, p_.grad_new_k_sum);
                for (Index j = last; j-- > 0;) ends.add(pair, j, ends, j + 1);
            }
            each(of_queries.count, [&](Scan<P> scan, Index pair, Index j) {
                scan.key_gradients(of_queries.begin(j), of_queries.end(j), ends.at(pair, j));
                if (j == 0) ends.write_state(pair, 0, p_.grad_kv, p_.grad_k_sum);
            });
            return;
        }
        for (Index pair = 0; pair < pairs_; ++pair) {
            for (Index j = 1; j < of_queries.count; ++j) ends.add(pair, 0, ends, j);
            ends.add_state(pair, 0, p_.grad_new_kv, p_.grad_new_k_sum);
            ends.write_state(pair, 0, p_.grad_kv, p_.grad_k_sum);
        }
        const Segments of_keys = cut(p_.keys, 0);
        each(of_keys.count, [&](Scan<P> scan, Index pair, Index j) {
            scan.key_gradients(of_keys.begin(j), of_keys.end(j), ends.at(pair, 0));
        });
    }

  private:
    // The time of a pass that makes only the sums, as a share of that of the scan.
    static constexpr double EXTRA_PASS = 0.46;
    // How much longer a scan takes, as a share, if no pass has brought its keys and values into the cache before.
    static constexpr double UNREAD = 0.09;

    // A result, dense in memory, with so many elements a sequence of the batch.
    void expect(const Tensor& x, Index elements) const {
        expect_writes(x.data, p_.batch * elements * element_size(p_));
    }

    // So many segments a pair that the slowest thread is done soonest, `extra` being what it costs to have more than one.
    Segments cut(Index length, double extra) const {
        const Index chunks = (length + CHUNK - 1) / CHUNK;
        Index best = 1;
        double least = 0;
        for (Index s = 1; s == 1 || s <= std::min<Index>(chunks, 4 * p_.threads); ++s) {
            const auto rounds = [&](Index items) { return double((items + p_.threads - 1) / p_.threads) / s; };
            const double time = rounds(pairs_ * s) + extra * rounds(pairs_ * (s - 1));
            if (s == 1 || time < 0.98 * least) {
                best = s;
                least = time;
            }
        }
        const Index part = std::max<Index>((chunks + best - 1) / best, 1) * CHUNK;
        return {std::max<Index>((length + part - 1) / part, 1), part, length};
    }

    // The same for forward. Where there are fewer pairs than threads, the threads left over make the sums while the others scan
    // a first segment of each pair, which is so long that both take the same time. The last segment is shorter than those
    // whose sums were made, so that all are done at once.
    Segments cut_ahead(Index length) const {
        const Segments equal = cut(length, EXTRA_PASS);
        const Index others = p_.threads - pairs_;
        if (equal.count == 1 || others < 1) return equal;
        const double first = EXTRA_PASS * pairs_ * (equal.count - 1) / others;  // of a segment's length
        const Index chunks = (length + CHUNK - 1) / CHUNK, part = std::ceil(chunks / (equal.count + first - UNREAD));
        const Index ahead = std::lround(first * part), rest = chunks - ahead;
        if (ahead < 1 || rest < 1) return equal;
        return {1 + (rest + part - 1) / part, part * CHUNK, length, ahead * CHUNK};
    }

    // Calls body(scan, pair, j) for all pairs and j < count, on all threads.
    template <class Body>
    void each(Index count, Body body) {
        parallel(pairs_ * count, p_.threads, p_.poison, [&](Arena& arena, Index item) {
            const Tiles tiles(sizeof(P) == sizeof(bf16));
            body(Scan<P>(p_, arena, item / count), item / count, item % count);
        });
    }

    // What each segment starts with: the state that came in and the keys of the segments before. Each of these is cut
    // again, for all threads to have a part. A first segment of another length is scanned at once.
    AllSums segment_starts(const Segments& segments) {
        const Index done = segments.first == 0 ? 0 : 1, summed = segments.count - 1 - done;
        const Index items = std::max<Index>(pairs_ * summed, 1), others = p_.threads - done * pairs_;
        const Index wanted = (others + items - 1) / items, chunks = segments.length / CHUNK;
        const Index length = (chunks + wanted - 1) / wanted * CHUNK, parts = (segments.length + length - 1) / length;
        AllSums sums(p_, segments.count), of_parts(p_, summed * parts);
        for (Index pair = 0; pair < pairs_; ++pair) {
            sums.clear(pair, 0);
            sums.add_state(pair, 0, p_.kv, p_.k_sum);
        }
        each(done + summed * parts, [&](Scan<P> scan, Index pair, Index item) {
            if (item < done) return scan.outputs(0, segments.first, sums.at(pair, 0));
            const Index part = item - done, segment = done + part / parts;
            const Index begin = segments.begin(segment) + part % parts * length;
            of_parts.clear(pair, part);
            scan.add_keys(begin, std::min(begin + length, segments.end(segment)), of_parts.at(pair, part));
        });
        for (Index pair = 0; pair < pairs_; ++pair)
            for (Index j = 1; j < segments.count; ++j) {
                sums.clear(pair, j);
                sums.add(pair, j, sums, j - 1);
                const Index before = (j - 1 - done) * parts;  // negative: they are in the sums already
                for (Index part = 0; part < parts && before >= 0; ++part) sums.add(pair, j, of_parts, before + part);
            }
        return sums;
    }

    // In segment 0 of each pair, the state that came in and all keys.
    AllSums key_totals() {
        const Segments segments = cut(p_.keys, 0);
        AllSums sums(p_, segments.count);
        each(segments.count, [&](Scan<P> scan, Index pair, Index j) {
            sums.clear(pair, j);
            scan.add_keys(segments.begin(j), segments.end(j), sums.at(pair, j));
        });
        for (Index pair = 0; pair < pairs_; ++pair) {
            for (Index j = 1; j < segments.count; ++j) sums.add(pair, 0, sums, j);
            sums.add_state(pair, 0, p_.kv, p_.k_sum);
        }
        return sums;
    }

    const Problem& p_;
    const Index pairs_;
};

template <class P>
void forward(const Problem& p) {
    Passes<P>(p).forward();
}

template <class P>
void backward(const Problem& p) {
    Passes<P>(p).backward();
}

}  // namespace lin_attn
