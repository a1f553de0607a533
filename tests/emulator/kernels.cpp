// Compares the CUDA kernels with sums in f64, and with themselves: a row has the same bits alone and in
// any batch. Prints failures, and exits with their number.
#include "dense/gemv.cu"
#include "dense/tiles.cu"
#include "experts/experts.cu"
#include "glu.cu"
#include "kv_move.cu"
#include "norm.cu"
#include "paged_attention/paged_attention.cu"
#include "rope_kv_write.cu"
#include "widen.cu"

#include "check.h"
#include <numeric>

using emulator::launch;
using std::vector;

ATTEND_KERNELS(float, f32_to_128, 128, true)
ATTEND_KERNELS(bf16, bf16_to_128, 128, true)
ATTEND_KERNELS(float, f32_to_256, 256, true)
ATTEND_KERNELS(f16, f16_to_256, 256, true)
ATTEND_KERNELS(bf16, bf16_to_512, 512, true)
ATTEND_KERNELS(float, f32_latent, LATENT_KEY, true)
ATTEND_KERNELS(f16, f16_latent, LATENT_KEY, true)
ATTEND_KERNELS(bf16, bf16_latent, LATENT_KEY, true)

namespace {

// Kernels for 8, 16 and any number of rows, the last ones with blocks of three shapes.
template <typename T, typename Few, typename Some, typename Many>
void test_products(int warps, Few few, Some some, Many small, Many wide, Many large) {
    const std::pair<int, int> shapes[] = {{48, 64}, {37, 576}, {16, 4096}, {130, 288}, {3, 32}};
    for (auto shape : shapes) {
        const int outputs = shape.first, inputs = shape.second;
        const int rows = 16;
        auto w = noise<T>((size_t)outputs * inputs), x = noise<T>(rows * inputs);
        vector<T> y(rows * outputs), part(8 * outputs);
        auto run = [&](auto kernel, int first, int rows, vector<T> &y) {
            launch({1, (outputs + 15) / 16, 1}, warps * 32, [&] {
                kernel(w.data(), x.data() + first * inputs, y.data(), outputs, inputs, rows);
            });
        };
        run(some, 0, rows, y);
        double worst = 0;
        for (int row = 0; row < rows; row++) {
            for (int o = 0; o < outputs; o++) {
                double want = 0;
                for (int i = 0; i < inputs; i++) {
                    want += (double)widen(w[(size_t)o * inputs + i]) * widen(x[row * inputs + i]);
                }
                // The error of the sum is relative to the size of its terms.
                worst = std::max(worst, off(widen(y[row * outputs + o]), want));
            }
        }
        CHECK(worst < precision<T>(), "gemv %d x %d is off by %g", outputs, inputs, worst);
        for (auto part_of : {std::pair{0, 1}, {7, 1}, {11, 1}, {0, 5}, {3, 8}}) {
            const int first = part_of.first, rows = part_of.second;
            run(few, first, rows, part);
            CHECK(same(part.data(), y.data() + first * outputs, rows * outputs),
                  "gemv of %d rows from %d", rows, first);
        }
        // The rows have the same bits after `before` others, and before some. A block computes all chains, or a cluster.
        auto test_many = [&](auto shape, auto kernel, std::initializer_list<std::pair<int, int>> places) {
            using Shape = decltype(shape);
            for (auto [before, all] : places) {
                auto more = noise<T>(all * inputs);
                std::copy(x.begin(), x.end(), more.begin() + before * inputs);
                auto blocks = [](int count, int size) { return (count + size - 1) / size; };
                for (int cluster = 1; cluster <= warps / Shape::CHAINS; cluster *= 2) {
                    vector<T> out(all * outputs);
                    launch({blocks(all, Shape::ROWS), blocks(outputs, Shape::OUTPUTS) * cluster, 1}, Shape::THREADS,
                           [&] { kernel(w.data(), more.data(), out.data(), outputs, inputs, all, warps); },
                           Shape::SHARED, cluster);
                    CHECK(same(out.data() + before * outputs, y.data(), rows * outputs),
                          "product of %d x %d, %d rows, %d chains in clusters of %d", outputs, inputs, all, warps, cluster);
                }
            }
        };
        test_many(tiles::Small(), small, {{1, 17}, {50, 77}});
        test_many(tiles::Wide(), wide, {{1, 18}, {20, 37}, {48, 64}, {60, 100}});
        test_many(tiles::Large(), large, {{3, 40}, {120, 200}});
    }
}

struct Sequence {
    int rows, context;
    bool tree;
    // Of a tree: each row sees all rows.
    bool whole = false;
};

// The rows of some sequences, in the form that the Rust side sends.
struct Call {
    static constexpr int BLOCK = 16;
    int rows = 0, keys = 0, used = 0;
    // Whether rows of sequences without a tree see the later ones, too.
    bool bidirectional = false;
    vector<Tile> tiles;
    vector<uint32_t> blocks;
    vector<uint64_t> trees;
    // For each row: its sequence, its number in it, and where its blocks and its tree begin.
    struct Row {
        Sequence sequence;
        int number, blocks, tree;
    };
    vector<Row> all;

    void add(const vector<uint32_t> &pool, Sequence s, int group) {
        int table = blocks.size(), tree = s.tree ? (int)trees.size() : -1;
        for (int i = 0; i < s.rows; i++) {
            if (s.tree) {
                // The parent of row i is row (i - 1) / 2.
                uint64_t mask = s.whole ? (1ull << s.rows) - 1 : 1;
                for (int node = i; node > 0; node = (node - 1) / 2) {
                    mask |= 1ull << node;
                }
                trees.push_back(mask);
            }
            all.push_back({s, i, table, tree});
        }
        for (int i = 0; i * BLOCK < s.context + s.rows; i++) {
            blocks.push_back(pool[used++]);
        }
        for (int start = 0; start < s.rows; start += MAX_QUERIES / group) {
            int count = std::min(MAX_QUERIES / group, s.rows - start);
            tiles.push_back({rows + start, count, s.context, start, table, tree, s.rows - start - count, rows + start});
        }
        rows += s.rows;
        keys = std::max(keys, s.context + s.rows);
    }

    bool sees(const Row &row, int place) const {
        int key = place - row.sequence.context;
        return key < 0 || (row.tree < 0 ? bidirectional || key <= row.number : trees[row.tree + row.number] >> key & 1);
    }

    // Whether the key is also within the window, which hides none of the later keys of a tree. It has the position of a row
    // that sees what it sees up to itself.
    bool sees(const Row &row, int place, int window) const {
        auto position = [&](int place) {
            int seen = -1;
            for (int other = 0; other <= place; other++) {
                seen += sees(row, other);
            }
            return seen;
        };
        const int before = position(row.sequence.context + row.number) - position(place);
        return sees(row, place) && (row.tree < 0 ? std::abs(before) : before) < window;
    }
};

// LATENT > 0: the first values of the keys, of which the pool has one for all heads, are the values.
template <typename T, int D, int LATENT = 0, typename Kernel>
void test_attention(Kernel whole, Kernel split, Variant variant) {
    constexpr int SUMS = LATENT > 0 ? LATENT : D;
    for (int group : {4, 3}) {
        const int kv_heads = 2, heads = kv_heads * group, stored = LATENT > 0 ? 1 : kv_heads;
        vector<uint32_t> pool(144);
        std::iota(pool.begin(), pool.end(), 0);
        std::shuffle(pool.begin(), pool.end(), rng);
        Call call;
        call.bidirectional = variant.bidirectional;
        for (Sequence s : {Sequence{1, 37, false}, {6, 60, false}, {1, 0, false}, {20, 130, false}, {5, 64, true}, {13, 60, true}, {9, 3, true}, {16, 50, true, true}}) {
            call.add(pool, s, group);
        }
        const vector<float> sinks = noise<float>(heads);
        const size_t values = pool.size() * Call::BLOCK * stored * D;
        auto k = noise<T>(values), v = LATENT > 0 ? k : noise<T>(values);
        auto q = noise<T>((size_t)call.rows * heads * D);
        const float scale = 1 / std::sqrt((float)D);
        // Runs one of the kernels for the tiles of a call, with room for more chunks.
        auto run = [&](Kernel kernel, const Call &call, const T *q, const T *k, const T *v, T *out, int room = 0) {
            const int chunks = (call.keys + CHUNK - 1) / CHUNK + room;
            vector<float> partials((size_t)call.rows * heads * chunks * (SUMS + 2), NAN);
            launch({(int)call.tiles.size(), kv_heads, kernel == split ? chunks : 1}, THREADS, [&] {
                kernel(q, k, LATENT > 0 ? nullptr : v, out, call.tiles.data(), call.blocks.data(), call.trees.data(), partials.data(),
                       heads, kv_heads, Call::BLOCK, chunks, scale, variant.window, variant.ahead(), variant.cap,
                       variant.sinks ? sinks.data() : nullptr, D, LATENT);
            });
        };
        vector<T> out((size_t)call.rows * heads * SUMS);
        run(whole, call, q.data(), k.data(), v.data(), out.data());
        auto test_split = [&](const Call &call, const T *want, int room) {
            vector<T> parted((size_t)call.rows * heads * SUMS);
            run(split, call, q.data(), k.data(), v.data(), parted.data(), room);
            CHECK(same(want, parted.data(), parted.size()), "in one block or in many, heads of %d, %d rows", D, call.rows);
            for (uint32_t count : arrived) {
                CHECK(count == 0, "a counter of chunks is left at %u", count);
            }
        };
        test_split(call, out.data(), 0);
        // The tables of graphs have room for more tiles and chunks than there are.
        Call roomy = call;
        roomy.tiles.resize(call.tiles.size() + 2);
        test_split(roomy, out.data(), 3);
        // More chunks than a warp has threads.
        Call many;
        many.add(pool, {3, 2170, false}, group);
        vector<T> of_many((size_t)many.rows * heads * SUMS);
        run(whole, many, q.data(), k.data(), v.data(), of_many.data());
        test_split(many, of_many.data(), 1);

        double worst = 0;
        for (int row = 0; row < call.rows; row++) {
            const Call::Row &of = call.all[row];
            for (int head = 0; head < heads; head++) {
                const size_t at = ((size_t)row * heads + head) * D, to = ((size_t)row * heads + head) * SUMS;
                double want[SUMS] = {}, sum = variant.sinks ? std::exp((double)sinks[head]) : 0;
                for (int place = 0; place < of.sequence.context + of.sequence.rows; place++) {
                    if (!call.sees(of, place, variant.window)) {
                        continue;
                    }
                    size_t slot = call.blocks[of.blocks + place / Call::BLOCK] * Call::BLOCK + place % Call::BLOCK;
                    const size_t key = (slot * stored + head / group % stored) * D;
                    double score = 0;
                    for (int i = 0; i < D; i++) {
                        score += (double)widen(q[at + i]) * widen(k[key + i]);
                    }
                    score *= scale;
                    if (variant.cap > 0) {
                        score = variant.cap * std::tanh(score / variant.cap);
                    }
                    double weight = std::exp(score);
                    sum += weight;
                    for (int i = 0; i < SUMS; i++) {
                        want[i] += weight * widen(v[key + i]);
                    }
                }
                for (int i = 0; i < SUMS; i++) {
                    worst = std::max(worst, off(widen(out[to + i]), want[i] / sum));
                }
            }
        }
        // Tensor cores take rounded weights.
        CHECK(worst < (sizeof(T) == 2 ? 2 : 1) * precision<T>(), "attention of heads of %d is off by %g, window %d, cap %g", D, worst,
              variant.window, variant.cap);

        // The rows of the second sequence as plain decoding would compute them, where they see no later ones.
        for (int i = 0; i < 6 && !variant.bidirectional; i++) {
            Call alone;
            alone.used = 3;
            alone.add(pool, {1, 60 + i, false}, group);
            vector<T> one((size_t)heads * SUMS);
            const size_t row = (size_t)(1 + i) * heads;
            run(whole, alone, q.data() + row * D, k.data(), v.data(), one.data());
            CHECK(same(one.data(), out.data() + row * SUMS, one.size()), "row %d alone, heads of %d", i, D);
        }
        // The rows of trees as plain decoding would compute them, after a copy of the keys that they see.
        for (int row = 0; row < call.rows; row++) {
            const Call::Row &of = call.all[row];
            // A row that sees later rows has another position than the last row of a sequence.
            if (of.tree < 0 || (of.sequence.whole && variant.window != INT_MAX)) {
                continue;
            }
            vector<int> seen(of.sequence.context + of.sequence.rows);
            std::iota(seen.begin(), seen.end(), 0);
            std::erase_if(seen, [&](int place) { return !call.sees(of, place); });
            Call alone;
            alone.used = call.used;
            alone.add(pool, {1, (int)seen.size() - 1, false}, group);
            auto copied_k = k, copied_v = v;
            for (size_t place = 0; place < seen.size(); place++) {
                auto slot = [&](const uint32_t *blocks, int place) {
                    return (size_t)(blocks[place / Call::BLOCK] * Call::BLOCK + place % Call::BLOCK) * stored * D;
                };
                size_t from = slot(&call.blocks[of.blocks], seen[place]), to = slot(alone.blocks.data(), place);
                std::copy_n(&k[from], stored * D, &copied_k[to]);
                std::copy_n(&v[from], stored * D, &copied_v[to]);
            }
            vector<T> one((size_t)heads * SUMS);
            const size_t at = (size_t)row * heads;
            run(whole, alone, q.data() + at * D, copied_k.data(), copied_v.data(), one.data());
            CHECK(same(one.data(), out.data() + at * SUMS, one.size()), "row %d of a tree after %d, heads of %d",
                  of.number, of.sequence.context, D);
        }
    }
}

enum class NormKind { RMS, LAYER, LAYER_WITH_BIAS };

// Widths of whole packs, of incomplete ones, and of more than the threads keep.
void test_norm(NormKind kind) {
    const int rows = 3;
    for (int width : {75, 64, 300, 1024}) {
        auto x = noise<float>(rows * width), delta = noise<float>(rows * width), weight = noise<float>(width);
        auto bias = noise<float>(width);
        // The mean is not 0.
        for (float &value : x) {
            value += 1.5f;
        }
        const bool centers = kind != NormKind::RMS, has_bias = kind == NormKind::LAYER_WITH_BIAS;
        auto run = [&](int first, int rows, const float *more, vector<float> &out) {
            const float *from = x.data() + first * width;
            const float *plus = has_bias ? bias.data() : nullptr;
            launch({rows, 1, 1}, 96, [&] {
                if (centers) {
                    add_layer_norm_f32(from, more, weight.data(), plus, out.data(), width, 1e-5f);
                } else {
                    add_norm_f32(from, more, weight.data(), out.data(), width, 1e-5f);
                }
            });
        };
        vector<float> out(2 * rows * width), alone(2 * width);
        run(0, rows, delta.data(), out);
        for (int row = 0; row < rows; row++) {
            double mean = 0, square = 0, worst = 0;
            auto sum = [&](int i) { return (double)x[row * width + i] + delta[row * width + i]; };
            for (int i = 0; i < width && centers; i++) {
                mean += sum(i) / width;
            }
            for (int i = 0; i < width; i++) {
                square += (sum(i) - mean) * (sum(i) - mean);
            }
            for (int i = 0; i < width; i++) {
                worst = std::max(worst, off(out[row * width + i], sum(i)));
                double want = (sum(i) - mean) / std::sqrt(square / width + 1e-5) * weight[i] + (has_bias ? bias[i] : 0);
                worst = std::max(worst, off(out[(rows + row) * width + i], want));
            }
            CHECK(worst < precision<float>(), "norm %d of %d is off by %g", (int)kind, width, worst);
            run(row, 1, delta.data() + row * width, alone);
            CHECK(same(&alone[width], &out[(rows + row) * width], width), "norm %d of row %d alone", (int)kind, row);
        }
        // Nothing to add is zeros, and there are no sums then.
        x[1] = -0.f;
        const vector<float> zeros(rows * width);
        vector<float> without(2 * rows * width, 7.f);
        run(0, rows, zeros.data(), out);
        run(0, rows, nullptr, without);
        CHECK(same(&without[0], &out[rows * width], rows * width), "norm %d of %d without a delta", (int)kind, width);
        CHECK(without[rows * width] == 7.f, "norm %d of %d writes sums of nothing", (int)kind, width);
    }
}

void test_kv_move() {
    const int slots = 8;
    // Bytes of a slot of each plane, and of the units that are moved.
    const int planes[][2] = {{800, 4}, {800, 16}, {6, 2}, {4096, 16}};
    vector<vector<uint4>> before, pools;
    // The second and the third move read unchanged slots; the last reads what the first has written.
    vector<uint32_t> words = {3, 2, 5, 3, 6, 4, 2, 0};
    for (auto [bytes, unit] : planes) {
        vector<uint4> pool(slots * bytes / 16);
        for (uint4 &word : pool) {
            word = make_uint4(rng(), rng(), rng(), rng());
        }
        before.push_back(pool);
        pools.push_back(std::move(pool));
        const auto at = reinterpret_cast<uint64_t>(pools.back().data());
        words.insert(words.end(), {uint32_t(at), uint32_t(at >> 32), uint32_t(bytes / unit), uint32_t(unit)});
    }
    launch({2, (int)pools.size(), 1}, 128, [&] { kv_move(words.data(), 4); });
    const int from[slots] = {3, 1, 3, 5, 6, 5, 6, 7};
    for (size_t plane = 0; plane < pools.size(); plane++) {
        const int bytes = planes[plane][0];
        auto slot_of = [&](vector<uint4> &pool, int slot) { return (unsigned char *)pool.data() + slot * bytes; };
        for (int slot = 0; slot < slots; slot++) {
            CHECK(same(slot_of(pools[plane], slot), slot_of(before[plane], from[slot]), bytes),
                  "slot %d of plane %zu after moves", slot, plane);
        }
    }
}

template <typename T, typename Kernel> void test_widen(Kernel kernel) {
    const int blocks = 2, threads = 64, values = 8, most = blocks * threads * values;
    const auto x = noise<T>(most + 1);
    // Aligned or not; the last values of a thread are missing, or all of some threads.
    for (int first : {0, 1}) {
        for (int count : {most, most - 3, most - 30, 5}) {
            vector<float> out(most + 1, 7.f);
            launch({blocks, 1, 1}, threads, [&] { kernel(x.data() + first, out.data(), count); });
            bool fits = true;
            for (int i = 0; i <= most; i++) {
                fits &= out[i] == (i < count ? widen(x[first + i]) : 7.f);
            }
            CHECK(fits, "%d values from %d on in f32", count, first);
        }
    }
}

// The heads of keys and values besides plain ones: norms after the rotation, values that are keys, norms of values.
struct HeadKind {
    bool rotated = false, keys = false, values = false;
};

// All of a head's values are rotated, a part, or none; each head has a norm, or all have one.
void test_rope_kv_write(int half, bool normed, bool whole, HeadKind kind = HeadKind()) {
    const int rows = 3, heads = 4, kv_heads = 2, d = 16, all = heads + 2 * kv_heads, num_slots = 5;
    const int stored = kind.keys ? all - kv_heads : all;
    // Something else is after the heads of a row.
    const int stride = stored * d + 6;
    auto qkv = noise<float>(rows * stride), cos = noise<float>(rows * half), sin = noise<float>(rows * half);
    auto q_norm = noise<float>(heads * d), k_norm = noise<float>(kv_heads * d);
    const uint32_t slots[rows] = {4, 1, 2};
    vector<float> q(rows * heads * d), k(num_slots * kv_heads * d), v = k;
    launch({(rows * all + 3) / 4, 1, 1}, 128, [&] {
        rope_kv_write_f32(qkv.data(), half > 0 ? cos.data() : nullptr, half > 0 ? sin.data() : nullptr,
                          normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr, slots, q.data(),
                          k.data(), v.data(), rows, heads, all, d, half, whole, 1e-5f, kind.rotated, kind.keys,
                          kind.values, 1e-2f, stride);
    });
    double worst = 0;
    for (int i = 0; i < rows * all; i++) {
        const int row = i / all, head = i % all, kv_head = (head - heads) % kv_heads;
        const bool value = head >= heads + kv_heads;
        const auto of_row = qkv.begin() + row * stride, own = of_row + (value && kind.keys ? head - kv_heads : head) * d;
        vector<double> want(own, own + d);
        float *pool = head < heads + kv_heads ? k.data() : v.data();
        float *got = head < heads ? &q[(row * heads + head) * d] : pool + (slots[row] * kv_heads + kv_head) * d;
        if (head < heads + kv_heads) {
            const bool key = head >= heads;
            const int number = key ? kv_head : head, together = whole ? (key ? kv_heads : heads) : 1;
            const auto from = whole ? of_row + (key ? heads : 0) * d : own;
            auto norm = [&](double square) {
                for (int i = 0; i < d && normed; i++) {
                    want[i] *= (key ? k_norm : q_norm)[(whole ? number * d : 0) + i];
                    want[i] /= std::sqrt(square / (together * d) + 1e-5);
                }
            };
            if (!kind.rotated) {
                norm(std::inner_product(from, from + together * d, from, 0.));
            }
            for (int i = 0; i < half; i++) {
                double a = want[i], b = want[i + half], c = cos[row * half + i], s = sin[row * half + i];
                want[i] = a * c - b * s;
                want[i + half] = a * s + b * c;
            }
            if (kind.rotated) {
                norm(std::inner_product(want.begin(), want.end(), want.begin(), 0.));
            }
        } else if (kind.values) {
            const double square = std::inner_product(want.begin(), want.end(), want.begin(), 0.);
            for (double &value : want) {
                value /= std::sqrt(square / d + 1e-2);
            }
        }
        for (int i = 0; i < d; i++) {
            worst = std::max(worst, off(got[i], want[i]));
        }
        if (head >= heads) {
            std::fill_n(got, d, 0.f);
        }
    }
    CHECK(worst < precision<float>(), "rope of %d pairs is off by %g", half, worst);
    CHECK(k == vector<float>(k.size()) && v == k, "other slots are written");
}

template <typename Kernel> void test_glu(const char *name, Kernel kernel, double (*activation)(double)) {
    const int rows = 3;
    for (int width : {33, 34}) {
        auto both = noise<float>(rows * 2 * width);
        vector<float> out(rows * width);
        launch({1, 1, 1}, 256, [&] {
            kernel(both.data(), both.data() + width, out.data(), width, 2 * width, 2 * width, rows * width);
        });
        for (int i = 0; i < rows * width; i++) {
            const float *of = &both[i / width * 2 * width + i % width];
            double want = activation(of[0]) * of[width];
            CHECK(off(out[i], want) < precision<float>(), "%s gives %g for %g", name, out[i], want);
        }
    }
}

void test_glu() {
    test_glu("sigmoid", glu_sigmoid_f32, [](double x) { return 1 / (1 + std::exp(-x)); });
    test_glu("silu", glu_silu_f32, [](double x) { return x / (1 + std::exp(-x)); });
    test_glu("relu2", glu_relu2_f32, [](double x) { return x > 0 ? x * x : 0; });
    test_glu("gelu", glu_gelu_f32, [](double x) { return x * std::erfc(-x / std::sqrt(2.)) / 2; });
    test_glu("gelu_tanh", glu_gelu_tanh_f32, [](double x) {
        return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    });
}

// NaN of a gate, or of what it multiplies, stays NaN in all activations, also in those of experts. What is infinite does not
// become NaN where a function has an upper limit, or the square of the positive part.
void test_activations_of_nan() {
    const int rows = 3, width = 2;
    const float gates[rows][width] = {{NAN, 1.f}, {2.f, NAN}, {INFINITY, -INFINITY}};
    const float ups[rows][width] = {{1.f, NAN}, {NAN, 2.f}, {2.f, 2.f}};
    const int uses[rows] = {0, 1, 2}, ids[rows] = {0, 0, 0};
    auto is_nan = [](const char *name, const vector<float> &y) {
        for (int i = 0; i < 2 * width; i++) {
            CHECK(std::isnan(y[i]), "%s gives %g for NaN", name, y[i]);
        }
    };
    vector<float> y(rows * width);
    launch({1, 1, 1}, 32, [&] { glu_relu2_f32(gates[0], ups[0], y.data(), width, width, width, rows * width); });
    is_nan("relu2", y);
    CHECK(y[4] == INFINITY && y[5] == 0.f, "relu2 gives %g and %g", y[4], y[5]);
    for (int activation = experts::SILU; activation <= experts::CLAMPED_SWISH; activation++) {
        launch({rows, 1, 1}, 32, [&] {
            activate_experts_f32(gates[0], ups[0], nullptr, uses, ids, y.data(), width, width, activation);
        });
        is_nan("an activation of experts", y);
        if (activation == experts::CLAMPED_SWISH) {
            CHECK(std::fabs(y[4] - 21.f) < 1e-3, "a clamped gate gives %g", y[4]);
        }
    }
}

// The emulator's own f16.
void test_halves() {
    for (uint32_t bits = 0; bits < 0x7c00; bits++) {
        f16 half{(uint16_t)bits}, next{(uint16_t)(bits + 1)};
        CHECK(narrow<f16>(widen(half)).bits == bits, "f16 %x", bits);
        if (bits < 0x7bff) {
            float middle = (widen(half) + widen(next)) / 2;
            CHECK(narrow<f16>(middle).bits == (bits + (bits & 1)), "f16 between %x and its neighbour", bits);
        }
    }
}

} // namespace

int main() {
    test_halves();
    test_products<f16>(8, gemv1_8_f16, gemv2_8_f16, tiles_small_f16, tiles_wide_f16, tiles_large_f16);
    test_products<bf16>(8, gemv1_8_bf16, gemv2_8_bf16, tiles_small_bf16, tiles_wide_bf16, tiles_large_bf16);
    test_products<f16>(16, gemv1_16_f16, gemv2_16_f16, tiles_small_f16, tiles_wide_f16, tiles_large_f16);
    test_products<bf16>(16, gemv1_16_bf16, gemv2_16_bf16, tiles_small_bf16, tiles_wide_bf16, tiles_large_bf16);
    for (const Variant &variant : VARIANTS) {
        test_attention<float, 64>(attend_whole_f32_64, attend_split_f32_64, variant);
        test_attention<f16, 64>(attend_whole_f16_64, attend_split_f16_64, variant);
    }
    test_attention<bf16, 128>(attend_whole_bf16_128, attend_split_bf16_128, {});
    const Variant &all_at_once = VARIANTS[4];
    test_attention<bf16, 80>(attend_whole_bf16_to_128, attend_split_bf16_to_128, all_at_once);
    test_attention<float, 112>(attend_whole_f32_to_128, attend_split_f32_to_128, {});
    test_attention<float, 192>(attend_whole_f32_to_256, attend_split_f32_to_256, all_at_once);
    test_attention<f16, 256>(attend_whole_f16_to_256, attend_split_f16_to_256, {});
    test_attention<bf16, 320>(attend_whole_bf16_to_512, attend_split_bf16_to_512, all_at_once);
    test_attention<bf16, 576, 512>(attend_whole_bf16_latent, attend_split_bf16_latent, {});
    test_attention<f16, 104, 24>(attend_whole_f16_latent, attend_split_f16_latent, all_at_once);
    test_attention<float, 328, 264>(attend_whole_f32_latent, attend_split_f32_latent, {});
    test_float8();
    test_latent();
    test_lora();
    for (NormKind kind : {NormKind::RMS, NormKind::LAYER, NormKind::LAYER_WITH_BIAS}) {
        test_norm(kind);
    }
    test_kv_move();
    test_widen<float>(widen_f32);
    test_widen<f16>(widen_f16);
    test_widen<bf16>(widen_bf16);
    for (int half : {8, 3, 0}) {
        test_rope_kv_write(half, false, false);
        test_rope_kv_write(half, true, false);
        test_rope_kv_write(half, true, true);
        test_rope_kv_write(half, true, false, {.rotated = true});
        test_rope_kv_write(half, true, false, {.values = true});
        test_rope_kv_write(half, true, false, {.keys = true, .values = true});
        test_rope_kv_write(half, false, false, {.keys = true});
    }
    test_glu();
    test_activations_of_nan();
    test_prefill();
    test_q8_blocks();
    test_quantized_products();
    test_recurrent();
    test_sample();
    printf("%d failures\n", failures);
    return std::min(failures, 255);
}
