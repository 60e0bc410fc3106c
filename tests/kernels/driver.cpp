// Random problems for the kernel, under a sanitizer: every buffer is a heap allocation of its own with not an element to
// spare, results and scratch memory start as NaN, and what comes out is compared with plain loops in double.
//
//     driver SEED PROBLEMS        prints what it did; exit status 1 at the first result that is wrong
//
// Letters: B batch, H heads of q, K heads of k and v, N length, D head dim, M value head dim.

#include "bfloat16.cpp"
#include "float32.cpp"
#include "linear_attention.cpp"

#include <cstdio>
#include <numeric>
#include <random>
#include <string>

using namespace lin_attn;

namespace {

std::mt19937_64 random_bits;

Index between(Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random_bits); }
bool coin() { return between(0, 1); }
double normal() { return std::normal_distribution<double>()(random_bits); }

constexpr float NONE = std::numeric_limits<float>::quiet_NaN();

// A tensor of four axes in memory of its own: axes in any order, gaps between entries or not, entries of the first
// `shared` axes one and the same.
template <class T>
struct Strided {
    Index shape[4], stride[4];
    std::vector<double> dense;  // what was put in, in order
    std::unique_ptr<T[]> memory;
    Index size;

    Strided(Index a, Index b, Index c, Index d, int shared = 0) : shape{a, b, c, d} {
        int order[4] = {3, 2, 1, 0};  // innermost first
        if (coin()) std::shuffle(order, order + 4, random_bits);
        Index next = coin() ? 1 : between(1, 3);
        for (int axis : order) {
            stride[axis] = axis < shared ? 0 : next;
            if (stride[axis] != 0) next = next * std::max<Index>(shape[axis], 1) + (coin() ? 0 : between(0, 5));
        }
        size = 1;
        for (int axis = 0; axis < 4; ++axis) size += std::max<Index>(shape[axis] - 1, 0) * stride[axis];
        if (count() == 0) size = 0;
        memory.reset(new T[size]);
        for (Index i = 0; i < size; ++i) put(&memory[i], NONE);
        dense.assign(count(), 0.0);
    }

    Index count() const { return shape[0] * shape[1] * shape[2] * shape[3]; }

    T& at(Index i) const {
        Index place = 0;
        for (int axis = 3; axis >= 0; i /= shape[axis--]) place += i % shape[axis] * stride[axis];
        return memory[place];
    }

    void fill() {
        for (Index i = 0; i < count(); ++i) put(&at(i), float(normal()));
        for (Index i = 0; i < count(); ++i) dense[i] = widen(at(i));
    }

    double operator()(Index b, Index h, Index n, Index d) const {
        return dense[((b * shape[1] + h) * shape[2] + n) * shape[3] + d];
    }

    std::vector<double> result() const {
        std::vector<double> x(count());
        for (Index i = 0; i < count(); ++i) x[i] = widen(at(i));
        return x;
    }

    // Whether all that lies between the entries is as it was.
    bool gaps_untouched() const {
        std::vector<bool> entry(size, false);
        for (Index i = 0; i < count(); ++i) entry[&at(i) - memory.get()] = true;
        for (Index i = 0; i < size; ++i)
            if (!entry[i] && !std::isnan(widen(memory[i]))) return false;
        return true;
    }

    Tensor view() const {
        Tensor x{memory.get(), {}};
        std::copy(stride, stride + 4, x.stride);
        return x;
    }
};

using Floats = std::unique_ptr<float[]>;

Floats floats(Index n, bool random) {
    Floats x(new float[n]);
    for (Index i = 0; i < n; ++i) x[i] = random ? float(normal()) : NONE;
    return x;
}

std::vector<double> as_double(const Floats& x, Index n) { return std::vector<double>(x.get(), x.get() + n); }

double phi(Phi map, double x) {
    switch (map) {
        case Phi::identity: return x;
        case Phi::relu: return std::max(x, 0.0);
        case Phi::squared_relu: return std::max(x, 0.0) * std::max(x, 0.0);
        default: return x > 0 ? x + 1 : std::exp(x);
    }
}

double phi_slope(Phi map, double x) {
    switch (map) {
        case Phi::identity: return 1;
        case Phi::relu: return x > 0;
        case Phi::squared_relu: return 2 * std::max(x, 0.0);
        default: return x > 0 ? 1 : std::exp(x);
    }
}

using Row = std::vector<double>;

double dot(const Row& x, const Row& y) { return std::inner_product(x.begin(), x.end(), y.begin(), 0.0); }

// x += a y
void add(Row& x, double a, const Row& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += a * y[i];
}

struct Case {
    Index B, K, G, N, keys, D, M;
    Phi map;
    Rope rope;
    bool causal, normalize, masked, no_state_gradient, bf16_tensors, bf16_products;
    int threads, poison;
    Index H() const { return K * G; }
};

double angle(Index position, Index pair, Index D) { return position * std::pow(10000.0, -2.0 * pair / D); }

// R of a position, or R⁻¹ with sign −1.
Row rotated(const Row& x, Index position, double sign) {
    Row y(x.size());
    for (size_t i = 0; i < x.size() / 2; ++i) {
        const double a = angle(position, i, x.size()), c = std::cos(a), s = sign * std::sin(a);
        y[2 * i] = c * x[2 * i] - s * x[2 * i + 1];
        y[2 * i + 1] = s * x[2 * i] + c * x[2 * i + 1];
    }
    return y;
}

// A row's features, and what their gradients make of its own.
struct Feature {
    Row mapped_from, numerator, denominator, d_numerator, d_denominator;
    Index position;

    Feature(const Case& c, const Row& x, Index position) : position(position) {
        mapped_from = c.rope == Rope::before ? rotated(x, position, 1) : x;
        for (double e : mapped_from) denominator.push_back(phi(c.map, e));
        numerator = c.rope == Rope::after ? rotated(denominator, position, 1) : denominator;
        d_numerator.assign(c.D, 0.0);
        d_denominator.assign(c.D, 0.0);
    }

    // The gradient, and in `size` the magnitudes of what was added up to it.
    Row gradient(const Case& c, Row& size) const {
        Row g = c.rope == Rope::after ? rotated(d_numerator, position, -1) : d_numerator;
        size.resize(g.size());
        for (size_t i = 0; i < g.size(); ++i) {
            const double slope = phi_slope(c.map, mapped_from[i]);
            size[i] = (std::fabs(g[i]) + std::fabs(d_denominator[i])) * slope;
            g[i] = (g[i] + d_denominator[i]) * slope;
        }
        return c.rope == Rope::before ? rotated(g, position, -1) : g;
    }
};

// Results by name, with the magnitude that errors are measured against.
struct Wanted {
    std::vector<double> value, size;
    void push(double x, double of) { value.push_back(x), size.push_back(of); }
    void push(const Row& x, const Row& of) {
        for (size_t i = 0; i < x.size(); ++i) push(x[i], of[i]);
    }
    void push(const Row& x) { push(x, x); }
};

[[noreturn]] void fail(const Case& c, const std::string& what) {
    std::printf(
        "WRONG: %s\n  B %d K %d G %d N %d keys %d D %d M %d phi %d rope %d causal %d normalize %d masked %d bf16 %d/%d threads %d\n",
        what.c_str(), int(c.B), int(c.K), int(c.G), int(c.N), int(c.keys), int(c.D), int(c.M), int(c.map), int(c.rope), c.causal,
        c.normalize, c.masked, c.bf16_tensors, c.bf16_products, c.threads);
    std::exit(1);
}

double worst = 0;  // relative error, as a share of what is allowed

void compare(const Case& c, const char* name, const std::vector<double>& got, const Wanted& wanted) {
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - wanted.value[i]) * (got[i] - wanted.value[i]);
        size += wanted.size[i] * wanted.size[i];
    }
    const double relative = std::sqrt(error) / std::max(std::sqrt(size), 1e-30);
    const double allowed = c.bf16_products ? 2e-2 : c.bf16_tensors ? 5e-3 : 1e-5;
    if (got.size() != wanted.value.size() || !(relative <= allowed))
        fail(c, std::string(name) + " is off by " + std::to_string(relative));
    worst = std::max(worst, relative / allowed);
}

template <class T>
void check(const Case& c) {
    const int shared = between(0, 3) == 0 ? 2 : 0, of_values = between(0, 3) == 0 ? 3 : shared;
    Strided<T> q(c.B, c.H(), c.N, c.D), k(c.B, c.K, c.keys, c.D, shared), v(c.B, c.K, c.keys, c.M, of_values);
    Strided<T> grad_out(c.B, c.H(), c.N, c.M, shared), out(c.B, c.H(), c.N, c.M);
    Strided<T> grad_q(c.B, c.H(), c.N, c.D), grad_k(c.B, c.K, c.keys, c.D), grad_v(c.B, c.K, c.keys, c.M);
    for (Strided<T>* x : {&q, &k, &v, &grad_out}) x->fill();
    const Index states = c.B * c.K * c.D * c.M, sums = c.B * c.K * c.D, rows = c.B * c.H() * c.N;
    const Floats kv = floats(states, true), k_sum = floats(sums, true), grad_new_kv = floats(states, true);
    const Floats grad_new_k_sum = floats(sums, true);
    if (c.no_state_gradient) {
        std::fill(grad_new_kv.get(), grad_new_kv.get() + states, 0.0f);
        std::fill(grad_new_k_sum.get(), grad_new_k_sum.get() + sums, 0.0f);
    }
    const Floats new_kv = floats(states, false), new_k_sum = floats(sums, false);
    const Floats grad_kv = floats(states, false), grad_k_sum = floats(sums, false);
    const Floats denominators = floats(rows, false), slopes = floats(rows, false);
    for (Index i = 0; i < sums; ++i) k_sum[i] = std::fabs(k_sum[i]) + 0.5f;  // as positive features leave it
    const Index positions = std::max(c.N, c.keys), half = c.D / 2;
    const Floats cos = floats(positions * half, false), sin = floats(positions * half, false);
    for (Index n = 0; n < positions; ++n)
        for (Index i = 0; i < half; ++i) {
            cos[n * half + i] = float(std::cos(angle(n, i, c.D)));
            sin[n * half + i] = float(std::sin(angle(n, i, c.D)));
        }
    const Index mask_step = between(1, 2);
    std::unique_ptr<uint8_t[]> mask(new uint8_t[std::max<Index>(c.B * c.keys * mask_step - mask_step + 1, 0)]);
    const auto real = [&](Index b, Index n) { return mask[(b * c.keys + n) * mask_step] != 0; };
    for (Index i = 0; i < c.B * c.keys; ++i) mask[i * mask_step] = !c.masked || between(0, 3) > 0;

    Problem p{};
    p.batch = c.B, p.heads = c.H(), p.kv_heads = c.K, p.queries = c.N, p.keys = c.keys, p.dim = c.D, p.value_dim = c.M;
    p.q = q.view(), p.k = k.view(), p.v = v.view(), p.out = out.view(), p.grad_out = grad_out.view();
    p.grad_q = grad_q.view(), p.grad_k = grad_k.view(), p.grad_v = grad_v.view();
    if (c.masked) p.key_mask = mask.get(), p.key_mask_stride[0] = c.keys * mask_step, p.key_mask_stride[1] = mask_step;
    if (c.rope != Rope::none) p.cos = cos.get(), p.sin = sin.get();
    p.kv = kv.get(), p.k_sum = k_sum.get(), p.new_kv = new_kv.get(), p.new_k_sum = new_k_sum.get();
    if (!c.no_state_gradient) p.grad_new_kv = grad_new_kv.get(), p.grad_new_k_sum = grad_new_k_sum.get();
    p.grad_kv = grad_kv.get(), p.grad_k_sum = grad_k_sum.get();
    if (c.normalize) p.denominators = denominators.get(), p.slopes = slopes.get();
    p.eps = 1e-12f;
    p.feature_map = int(c.map), p.rope = int(c.rope), p.causal = c.causal;
    p.bf16_tensors = c.bf16_tensors, p.bf16_products = c.bf16_products, p.threads = c.threads, p.poison = c.poison;

    // The same, one query and one key at a time.
    const auto row = [](const Strided<T>& x, Index b, Index h, Index n) {
        Row r;
        for (Index i = 0; i < x.shape[3]; ++i) r.push_back(x(b, h, n, i));
        return r;
    };
    Wanted w_out, w_kv, w_k_sum, w_q, w_k, w_v, w_grad_kv, w_grad_k_sum;
    for (Index b = 0; b < c.B; ++b)
        for (Index h = 0; h < c.K; ++h) {
            const Index pair = b * c.K + h;
            std::vector<Row> s, after, ds, gs;  // S, S after, ∂S, ∂(S after), as D rows
            for (Index i = 0; i < c.D; ++i) {
                const float *from = kv.get() + (pair * c.D + i) * c.M, *grad = grad_new_kv.get() + (pair * c.D + i) * c.M;
                s.emplace_back(from, from + c.M);
                gs.emplace_back(grad, grad + c.M);
            }
            after = s, ds = gs;
            const float *z0 = k_sum.get() + pair * c.D, *gz0 = grad_new_k_sum.get() + pair * c.D;
            const Row z(z0, z0 + c.D), gz(gz0, gz0 + c.D);
            Row z_after = z, dz = gz;
            std::vector<Feature> keys;
            std::vector<Row> values, d_values;
            for (Index n = 0; n < c.keys; ++n) {
                keys.emplace_back(c, row(k, b, h, n), n);
                values.push_back(row(v, b, h, n));
                d_values.emplace_back(c.M, 0.0);
                if (!real(b, n)) continue;
                for (Index i = 0; i < c.D; ++i) {
                    add(after[i], keys[n].numerator[i], values[n]);
                    keys[n].d_numerator[i] = dot(gs[i], values[n]);
                    add(d_values[n], keys[n].numerator[i], gs[i]);
                }
                add(z_after, 1, keys[n].denominator);
                keys[n].d_denominator = gz;
            }
            for (Index head = h * c.G; head < (h + 1) * c.G; ++head)
                for (Index m = 0; m < c.N; ++m) {
                    Feature query(c, row(q, b, head, m), m);
                    const Index seen = c.causal ? m + 1 : c.keys;
                    Row total(c.M, 0.0), size;
                    double d = dot(query.denominator, z);
                    for (Index i = 0; i < c.D; ++i) add(total, query.numerator[i], s[i]);
                    for (Index n = 0; n < seen; ++n) {
                        if (!real(b, n)) continue;
                        add(total, dot(query.numerator, keys[n].numerator), values[n]);
                        d += dot(query.denominator, keys[n].denominator);
                    }
                    const bool held = std::fabs(d) < p.eps;
                    if (held) d = d < 0 ? -p.eps : p.eps;
                    if (!c.normalize) d = 1;
                    Row g = row(grad_out, b, head, m);
                    const double slope = c.normalize && !held ? -dot(total, g) / (d * d) : 0;
                    for (double& x : g) x /= d;
                    for (double& x : total) x /= d;
                    for (Index i = 0; i < c.D; ++i) {
                        query.d_numerator[i] += dot(s[i], g);
                        add(ds[i], query.numerator[i], g);
                    }
                    add(query.d_denominator, slope, z);
                    add(dz, slope, query.denominator);
                    for (Index n = 0; n < seen; ++n) {
                        if (!real(b, n)) continue;
                        const double weight = dot(g, values[n]);
                        add(query.d_numerator, weight, keys[n].numerator);
                        add(keys[n].d_numerator, weight, query.numerator);
                        add(d_values[n], dot(query.numerator, keys[n].numerator), g);
                        add(query.d_denominator, slope, keys[n].denominator);
                        add(keys[n].d_denominator, slope, query.denominator);
                    }
                    w_out.push(total);
                    const Row gradient = query.gradient(c, size);
                    w_q.push(gradient, size);
                }
            for (Index n = 0; n < c.keys; ++n) {
                Row size, gradient = keys[n].gradient(c, size);
                w_k.push(gradient, size);
                w_v.push(d_values[n]);
            }
            for (Index i = 0; i < c.D; ++i) w_kv.push(after[i]), w_grad_kv.push(ds[i]);
            w_k_sum.push(z_after), w_grad_k_sum.push(dz);
        }

    const auto same_forward = [&](const char* kind) {
        compare(c, (std::string(kind) + " out").c_str(), out.result(), w_out);
        compare(c, (std::string(kind) + " kv").c_str(), as_double(new_kv, states), w_kv);
        compare(c, (std::string(kind) + " k_sum").c_str(), as_double(new_k_sum, sums), w_k_sum);
    };
    if (lin_attn_forward(&p) != 0) fail(c, "forward ran out of memory");
    same_forward("forward");
    if (lin_attn_backward(&p) != 0) fail(c, "backward ran out of memory");
    compare(c, "grad of q", grad_q.result(), w_q);
    compare(c, "grad of k", grad_k.result(), w_k);
    compare(c, "grad of v", grad_v.result(), w_v);
    compare(c, "grad of kv", as_double(grad_kv, states), w_grad_kv);
    compare(c, "grad of k_sum", as_double(grad_k_sum, sums), w_grad_k_sum);
    if (c.causal && c.N == 1) {
        for (Index i = 0; i < out.count(); ++i) put(&out.at(i), NONE);
        std::fill(new_kv.get(), new_kv.get() + states, NONE);
        std::fill(new_k_sum.get(), new_k_sum.get() + sums, NONE);
        if (lin_attn_step(&p) != 0) fail(c, "step ran out of memory");
        same_forward("step");
    }
    for (const Strided<T>* x : {&out, &grad_q, &grad_k, &grad_v})
        if (!x->gaps_untouched()) fail(c, "something was written between the rows of a result");
}

// Small enough for plain loops, of every kind; every fourth long and alone in its batch, so that it is cut into segments.
Case draw(Index i) {
    Case c{};
    const bool segments = i % 4 == 0, step = i % 4 == 1;
    c.B = segments ? 1 : between(0, 8) ? between(1, 2) : 0;
    c.K = segments ? 1 : between(1, 2);
    c.G = between(1, segments ? 2 : 3);
    const Index lengths[] = {0, 2, 15, 16, 17, 63, 64, 65, 100};
    c.causal = step || coin();
    c.N = step ? 1 : segments ? between(130, 420) : lengths[between(0, 8)];
    c.keys = c.causal ? c.N : segments ? between(130, 300) : lengths[between(0, 8)];
    const auto dim = [] { return coin() ? between(1, 40) : 16 * between(1, 4); };
    c.D = between(0, 15) ? dim() : MAX_DIM;
    c.M = between(0, 15) ? dim() : MAX_DIM;
    if (segments) c.D = std::min<Index>(c.D, 32), c.M = std::min<Index>(c.M, 32);
    c.rope = c.D % 2 ? Rope::none : static_cast<Rope>(between(0, 2));
    c.map = static_cast<Phi>(between(0, 3));
    // Sums of weights of either sign may come out near 0, where nothing can be compared; so may those of a few relus.
    c.normalize = coin() && (c.map == Phi::elu1 || (c.map != Phi::identity && c.D >= 8));
    c.masked = coin();
    c.bf16_tensors = coin();
    c.bf16_products = c.bf16_tensors && coin();
    c.threads = coin() ? 1 : between(2, 7);
    c.poison = coin();  // else memory of earlier calls is used again
    c.no_state_gradient = coin();
    return c;
}

}  // namespace

// n numbers in memory of their own.
template <class T>
std::unique_ptr<T[]> filled(Index n, double scale = 1) {
    std::unique_ptr<T[]> x(new T[n]);
    for (Index i = 0; i < n; ++i) put(&x[i], float(scale * normal()));
    return x;
}

// Projections of random size.
template <class T>
void check_projection() {
    const Index tokens = between(1, 4), in = between(1, 90), count = between(1, 3);
    const auto x = filled<T>(tokens * in);
    const bool gelu = coin();
    std::vector<std::unique_ptr<T[]>> weights, biases, ys;
    std::vector<Layer> layers;
    for (Index l = 0; l < count; ++l) {
        const Index out = between(1, 90);
        weights.push_back(filled<T>(out * in));
        biases.push_back(coin() ? filled<T>(out) : nullptr);
        ys.emplace_back(new T[tokens * out]);
        layers.push_back({weights[l].get(), biases[l].get(), ys[l].get(), out, gelu});
    }
    lin_attn_project(x.get(), layers.data(), count, tokens, in, sizeof(T) == 2, between(1, 4));
    for (Index l = 0; l < count; ++l)
        for (Index i = 0; i < tokens * layers[l].out; ++i) {
            const Index token = i / layers[l].out, output = i % layers[l].out;
            double wanted = biases[l] ? widen(biases[l][output]) : 0, size = std::abs(wanted);
            for (Index j = 0; j < in; ++j) {
                const double term = double(widen(x[token * in + j])) * widen(weights[l][output * in + j]);
                wanted += term;
                size += std::abs(term);
            }
            if (gelu) wanted *= std::erfc(-wanted / std::sqrt(2.0)) / 2;
            if (!(std::abs(widen(ys[l][i]) - wanted) <= (sizeof(T) == 2 ? 2e-2 : 2e-5) * size)) {
                std::printf("a projection of %d tokens, %d to %d, is wrong\n", int(tokens), int(in), int(layers[l].out));
                std::exit(1);
            }
        }
}

// A layer of attention for one token, of random size: the same as its parts, called one by one, to the last bit.
template <class T>
void check_attend() {
    Problem p{};
    p.batch = between(1, 3), p.kv_heads = between(1, 3), p.heads = p.kv_heads * between(1, 2);
    p.queries = p.keys = 1, p.dim = p.value_dim = 2 * between(1, 25);
    const Index in = between(1, 70), out = between(1, 70), state = p.batch * p.kv_heads * p.dim;
    p.eps = 1e-12f, p.feature_map = int(Phi::elu1), p.causal = 1, p.bf16_tensors = sizeof(T) == 2;
    p.threads = between(1, 3), p.poison = coin();
    const auto cos = filled<float>(p.dim / 2), sin = filled<float>(p.dim / 2);
    const auto kv = filled<float>(state * p.dim), k_sum = filled<float>(state);
    std::unique_ptr<float[]> new_kv[2], new_k_sum[2];
    p.rope = between(0, 2), p.cos = p.rope ? cos.get() : nullptr, p.sin = p.rope ? sin.get() : nullptr;
    p.kv = kv.get(), p.k_sum = k_sum.get();
    for (Index i = 0; i < state; ++i) k_sum[i] = 10 + std::abs(k_sum[i]);

    const auto x = filled<T>(p.batch * in);
    const Index inputs[4] = {in, in, in, p.heads * p.dim};
    const Index outputs[4] = {p.heads * p.dim, p.kv_heads * p.dim, p.kv_heads * p.dim, out};
    std::unique_ptr<T[]> weights[4], biases[4], ys[4], attended;
    Layer layers[4];
    for (Index l = 0; l < 4; ++l) {
        weights[l] = filled<T>(outputs[l] * inputs[l], 1 / std::sqrt(double(inputs[l])));
        if (coin()) biases[l] = filled<T>(outputs[l]);
        ys[l].reset(new T[p.batch * outputs[l]]);
        layers[l] = {weights[l].get(), biases[l].get(), l == 3 ? ys[l].get() : nullptr, outputs[l], 0};
    }
    const bool normalize = coin();
    const auto state_into = [&](Index i) {
        new_kv[i].reset(new float[state * p.dim]), new_k_sum[i].reset(new float[state]);
        p.new_kv = new_kv[i].get(), p.new_k_sum = new_k_sum[i].get();
    };
    state_into(0);
    if (lin_attn_attend(&p, x.get(), in, layers, normalize, between(1, 3)) != 0) std::exit(1);
    const std::vector<T> got(ys[3].get(), ys[3].get() + p.batch * out);

    state_into(1);
    for (Index l = 0; l < 3; ++l) layers[l].y = ys[l].get();
    lin_attn_project(x.get(), layers, 3, p.batch, in, p.bf16_tensors, 1);
    attended.reset(new T[p.batch * outputs[0]]);
    const auto view = [&](T* data, Index heads) { return Tensor{data, {heads * p.dim, p.dim, p.dim, 1}}; };
    p.q = view(ys[0].get(), p.heads), p.k = view(ys[1].get(), p.kv_heads), p.v = view(ys[2].get(), p.kv_heads);
    p.out = view(attended.get(), p.heads);
    const auto denominators = filled<float>(p.batch * p.heads);
    p.denominators = normalize ? denominators.get() : nullptr;
    if (lin_attn_step(&p) != 0) std::exit(1);
    lin_attn_project(attended.get(), layers + 3, 1, p.batch, inputs[3], p.bf16_tensors, 1);
    if (std::memcmp(got.data(), ys[3].get(), got.size() * sizeof(T)) != 0 ||
        std::memcmp(new_kv[0].get(), new_kv[1].get(), state * p.dim * sizeof(float)) != 0 ||
        std::memcmp(new_k_sum[0].get(), new_k_sum[1].get(), state * sizeof(float)) != 0) {
        std::printf("a layer of attention for one token is not what its parts are\n");
        std::exit(1);
    }
}

int main(int, char** arguments) {
    random_bits.seed(std::stoul(arguments[1]));
    const Index problems = std::stol(arguments[2]);
    Index backward_rows = 0, segmented = 0, steps = 0;
    for (Index i = 0; i < problems; ++i) {
        const Case c = draw(i);
        if (c.bf16_tensors) check<bf16>(c);
        else check<float>(c);
        backward_rows += c.B * c.H() * c.N;
        segmented += c.threads > 1 && c.B * c.K < c.threads && std::max(c.N, c.keys) > CHUNK;
        steps += c.causal && c.N == 1;
        coin() ? check_projection<bf16>() : check_projection<float>();
        coin() ? check_attend<bf16>() : check_attend<float>();
    }
    std::printf(
        "%d problems, vectors of %d floats: %d rows of queries, %d times more threads than heads, %d steps; "
        "worst error %.2f of what is allowed\n",
        int(problems), int(W), int(backward_rows), int(segmented), int(steps), worst);
}
