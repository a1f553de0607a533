// A forward in one launch: its phases give every value the bits that the kernels of the single ops give it, for 1 to
// 16 rows, in each format, with strips that are not whole, several sequences and trees.
#include "forward/forward.cuh"
#include "glu.cu"
#include "norm.cu"
#include "paged_attention/paged_attention.cu"
#include "rope_kv_write.cu"
namespace dense {
#include "dense/gemv.cu"
}

#include "weight.h"
#include <numeric>

using emulator::launch;
using std::vector;

namespace {

constexpr int BLOCK = 16, BLOCKS = 40, SLOTS = BLOCK * BLOCKS;

// A quantized or a dense weight.
Weight weight_of(int format, int warps, int outputs, int inputs, bool bias) {
    if (format != DENSE) {
        return weight(format, warps, outputs, inputs, bias);
    }
    Weight w{format, warps, outputs, inputs, {}, vector<uint16_t>(bias ? outputs : 0), 0, 0, 0};
    for (auto value : noise<bf16>(outputs * inputs)) {
        value = narrow<bf16>(widen(value) / std::sqrt((float)inputs));
        w.bytes.insert(w.bytes.end(), {(unsigned char)value.bits, (unsigned char)(value.bits >> 8)});
    }
    w.supers = w.bytes.size();
    return w;
}

template <typename F, typename T> void multiply_by(const Weight &w, const T *x, T *y, int rows, int width, int column) {
    launch({1, (w.outputs + 15) / 16, 1}, w.warps * 32, [&] {
        auto kernel = w.warps == 8 ? product<F, T, 2, 8> : product<F, T, 2, 16>;
        kernel({{w.bytes.data()}, {w.outputs}}, x, y, w.inputs, rows, width, column);
    });
}

// The product as its own kernel computes it, and the bias after it.
template <typename T> void multiply_by(const Weight &w, const T *x, T *y, int rows, int width, int column) {
    switch (w.format) {
    case DENSE: {
        vector<T> alone((size_t)rows * w.outputs);
        launch({1, (w.outputs + 15) / 16, 1}, w.warps * 32, [&] {
            auto kernel = w.warps == 8 ? dense::gemv<T, 2, 8> : dense::gemv<T, 2, 16>;
            kernel(reinterpret_cast<const T *>(w.bytes.data()), x, alone.data(), w.outputs, w.inputs, rows, 0);
        });
        for (int row = 0; row < rows; row++) {
            std::copy_n(&alone[(size_t)row * w.outputs], w.outputs, y + (size_t)row * width + column);
        }
        break;
    }
#define CASE(F, NUMBER)                                                                            \
    case NUMBER:                                                                                   \
        multiply_by<F>(w, x, y, rows, width, column);                                              \
        break;
        FOR_FORMATS(CASE)
#undef CASE
    }
    for (int i = 0; i < rows * w.outputs && !w.bias.empty(); i++) {
        T &value = y[(size_t)(i / w.outputs) * width + column + i % w.outputs];
        value = narrow<T>(widen(value) + widen(T{w.bias[i % w.outputs]}));
    }
}

template <typename T> struct Layer {
    vector<Weight> qkv, gate_up;
    Weight out, down;
    vector<T> norm, mlp_norm, q_norm, k_norm, k, v;
    vector<float> sinks;
    int half, window, activation;
};

struct Shape {
    int hidden, heads, kv_heads, d, inner, vocab;
    // Formats of q, k, v, of the output of attention, of gate, up and down, and of the output layer.
    int formats[8];
    // Warps of q, of gate and up, and of the output layer.
    int warps[3];
    bool biases, head_norms, variants;
};

struct Spans {
    // Rows, context, whether it is a tree, and whether the span before it is part of its context.
    struct Span {
        int rows, context;
        bool tree, goes_on = false;
    };
    vector<Span> spans;
};

// The tables of a call: as in kernels.cpp, with room for more tiles and chunks.
struct Tables {
    vector<Tile> tiles;
    vector<uint32_t> blocks, slots;
    vector<uint64_t> trees{0};
    int rows = 0, chunks = 0;

    Tables(const Spans &spans, int group) {
        vector<uint32_t> pool(BLOCKS);
        std::iota(pool.begin(), pool.end(), 0);
        std::shuffle(pool.begin(), pool.end(), rng);
        trees.clear();
        int table = 0;
        for (auto &span : spans.spans) {
            const int tree = span.tree ? (int)trees.size() : -1;
            vector<uint32_t> before(blocks.begin() + table, span.goes_on ? blocks.end() : blocks.begin() + table);
            table = blocks.size();
            blocks.insert(blocks.end(), before.begin(), before.end());
            for (int i = before.size(); i * BLOCK < span.context + span.rows; i++) {
                blocks.push_back(pool.back());
                pool.pop_back();
            }
            for (int i = 0; i < span.rows; i++) {
                uint64_t mask = 1;
                for (int node = i; node > 0; node = (node - 1) / 2) {
                    mask |= 1ull << node;
                }
                if (span.tree) {
                    trees.push_back(mask);
                }
                const int place = span.context + i;
                slots.push_back(blocks[table + place / BLOCK] * BLOCK + place % BLOCK);
            }
            for (int start = 0; start < span.rows; start += MAX_QUERIES / group) {
                const int count = std::min(MAX_QUERIES / group, span.rows - start);
                tiles.push_back({rows + start, count, span.context, start, table, tree, span.rows - start - count, rows + start});
            }
            rows += span.rows;
            chunks = std::max(chunks, (span.context + span.rows + CHUNK - 1) / CHUNK);
        }
        trees.push_back(0);
    }
};

template <typename T> class Model {
    Shape shape;
    vector<Layer<T>> layers;
    vector<T> norm;
    Weight head;
    vector<T> cos, sin;

    int all() const { return shape.heads + 2 * shape.kv_heads; }

    vector<T> sums_and_norms(const vector<T> &x, const vector<T> &delta, const vector<T> &weight) {
        const int rows = x.size() / shape.hidden, packs = (shape.hidden + 7) / 8;
        vector<T> both(2 * x.size());
        launch({rows, 1, 1}, std::clamp((packs + 31) / 32 * 32, 32, 1024),
               [&] { add_norm<false, T>(x.data(), delta.data(), weight.data(), nullptr, both.data(), shape.hidden, 1e-5f); });
        return both;
    }

    template <int D> vector<T> attended(Layer<T> &layer, const vector<T> &q, const Tables &tables) {
        vector<T> out(q.size());
        vector<float> partials(tables.rows * shape.heads * tables.chunks * (D + 2));
        const Args args{tables.tiles.data(), tables.blocks.data(), tables.trees.data(), partials.data(), shape.heads,
                        shape.kv_heads, BLOCK, tables.chunks,
                        Scores{.125f, layer.window, 0.f, layer.sinks.empty() ? nullptr : layer.sinks.data()}};
        launch({(int)tables.tiles.size(), shape.kv_heads, 1}, THREADS, [&] {
            const Numbers<T> k{layer.k.data()}, v{layer.v.data()};
            attend_by_blocks<T, D, false>(q.data(), k, v, out.data(), args);
        });
        return out;
    }

  public:
    explicit Model(const Shape &shape) : shape(shape) {
        const int q = shape.heads * shape.d, kv = shape.kv_heads * shape.d;
        auto noisy = [&](Weight w) {
            for (auto &value : w.bias) {
                value = noise<T>(1)[0].bits;
            }
            return w;
        };
        const int *formats = shape.formats, *warps = shape.warps;
        for (int i = 0; i < 2; i++) {
            Layer<T> layer{
                {noisy(weight_of(formats[0], warps[0], q, shape.hidden, shape.biases)),
                 noisy(weight_of(formats[1], 16, kv, shape.hidden, shape.biases)),
                 noisy(weight_of(formats[2], 16, kv, shape.hidden, shape.biases))},
                {weight_of(formats[4], warps[1], shape.inner, shape.hidden, false),
                 weight_of(formats[5], warps[1], shape.inner, shape.hidden, false)},
                noisy(weight_of(formats[3], 16, shape.hidden, q, shape.biases)),
                weight_of(formats[6], 16, shape.hidden, shape.inner, false),
                noise<T>(shape.hidden),
                noise<T>(shape.hidden),
                noise<T>(shape.head_norms ? shape.d : 0),
                noise<T>(shape.head_norms ? shape.d : 0),
                noise<T>(SLOTS * kv),
                noise<T>(SLOTS * kv),
                noise<float>(shape.variants ? shape.heads : 0),
                shape.variants && i == 1 ? 0 : shape.d / 2 - (shape.variants ? 8 : 0),
                shape.variants && i == 0 ? 70 : INT_MAX,
                i + shape.variants};
            layers.push_back(layer);
        }
        norm = noise<T>(shape.hidden);
        head = weight_of(formats[7], warps[2], shape.vocab, shape.hidden, false);
    }

    struct Output {
        vector<T> x;
        vector<float> logits;
    };

    // By the kernels of the single ops.
    Output by_ops(vector<T> x, const Tables &tables, const vector<uint32_t> &wanted, const vector<T> &cos, const vector<T> &sin) {
        const int rows = tables.rows, hidden = shape.hidden, width = all() * shape.d;
        vector<T> delta(x.size(), narrow<T>(0.f));
        for (auto &layer : layers) {
            auto both = sums_and_norms(x, delta, layer.norm);
            x.assign(both.begin(), both.begin() + x.size());
            vector<T> qkv(rows * width), q(rows * shape.heads * shape.d);
            int column = 0;
            for (auto &w : layer.qkv) {
                multiply_by(w, &both[x.size()], qkv.data(), rows, width, column);
                column += w.outputs;
            }
            launch({(rows * all() + 3) / 4, 1, 1}, 128, [&] {
                const Heads<T> heads{qkv.data(), cos.data(), sin.data(), layer.q_norm.empty() ? nullptr : layer.q_norm.data(),
                                     layer.k_norm.empty() ? nullptr : layer.k_norm.data(), shape.heads, all(), shape.d,
                                     layer.half, 0, 1e-6f};
                rope_kv_write(heads, tables.slots.data(), q.data(), layer.k.data(), layer.v.data(), rows);
            });
            auto out = shape.d == 64 ? attended<64>(layer, q, tables) : attended<128>(layer, q, tables);
            multiply_by(layer.out, out.data(), delta.data(), rows, hidden, 0);
            both = sums_and_norms(x, delta, layer.mlp_norm);
            x.assign(both.begin(), both.begin() + x.size());
            vector<T> wide(rows * 2 * shape.inner), gated(rows * shape.inner);
            multiply_by(layer.gate_up[0], &both[x.size()], wide.data(), rows, 2 * shape.inner, 0);
            multiply_by(layer.gate_up[1], &both[x.size()], wide.data(), rows, 2 * shape.inner, shape.inner);
            launch({(int)(gated.size() + 255) / 256, 1, 1}, 256, [&] {
                auto kernel = layer.activation == 0 ? glu<silu, T> : layer.activation == 1 ? glu<gelu, T> : glu<gelu_tanh, T>;
                kernel(wide.data(), &wide[shape.inner], gated.data(), shape.inner, 2 * shape.inner, 2 * shape.inner, gated.size());
            });
            multiply_by(layer.down, gated.data(), delta.data(), rows, hidden, 0);
        }
        Output output{sums_and_norms(x, delta, norm), {}};
        vector<T> chosen, logits(wanted.size() * shape.vocab);
        for (uint32_t row : wanted) {
            auto from = output.x.begin() + x.size() + row * hidden;
            chosen.insert(chosen.end(), from, from + hidden);
        }
        output.x.resize(x.size());
        multiply_by(head, chosen.data(), logits.data(), wanted.size(), shape.vocab, 0);
        for (T value : logits) {
            output.logits.push_back(widen(value));
        }
        return output;
    }

    // In one launch of `blocks` blocks.
    Output in_one(vector<T> x, const Tables &tables, const vector<uint32_t> &wanted, const vector<T> &cos, const vector<T> &sin,
                  int blocks) {
        const int rows = tables.rows, hidden = shape.hidden, width = all() * shape.d;
        vector<Phase> phases;
        int half_bytes = 0;
        auto part = [&](const Weight &w, int column) {
            half_bytes = std::max(half_bytes, w.format == DENSE ? OUTPUTS * DENSE_ROW
                                                                : HALF_UNITS * w.unit_bytes + HALF_UNITS / 4 * w.super_bytes);
            return Part{w.bytes.data(), w.bytes.data() + w.supers, w.bias.empty() ? nullptr : w.bias.data(), w.format, w.warps,
                        w.unit_bytes, w.super_bytes, 0, (w.outputs + 15) / 16, w.outputs, column};
        };
        auto add = [&](int kind, int inputs, int width, const vector<T> *norm, vector<const Weight *> weights) -> Phase & {
            Phase phase{};
            phase.kind = kind;
            phase.inputs = inputs;
            phase.width = width;
            phase.norm = norm ? norm->data() : nullptr;
            int column = 0;
            for (auto *w : weights) {
                phase.parts[phase.part_count++] = part(*w, kind == GATE_UP ? 0 : column);
                column += w->outputs;
            }
            phases.push_back(phase);
            return phases.back();
        };
        for (auto &layer : layers) {
            const bool is_first = &layer == &layers[0];
            add(QKV, hidden, width, &layer.norm, {&layer.qkv[0], &layer.qkv[1], &layer.qkv[2]}).is_first = is_first;
            Phase &attention = add(ATTENTION, 0, 0, nullptr, {});
            attention.k = layer.k.data();
            attention.v = layer.v.data();
            attention.q_norm = layer.q_norm.empty() ? nullptr : layer.q_norm.data();
            attention.k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
            attention.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
            attention.half = layer.half;
            attention.head_eps = 1e-6f;
            attention.scale = .125f;
            attention.window = layer.window;
            add(ATTENTION_OUT, shape.heads * shape.d, hidden, nullptr, {&layer.out}).is_first = is_first;
            add(GATE_UP, hidden, shape.inner, &layer.mlp_norm, {&layer.gate_up[0], &layer.gate_up[1]}).activation = layer.activation;
            add(DOWN, shape.inner, hidden, nullptr, {&layer.down});
        }
        add(LOGITS, hidden, shape.vocab, &norm, {&head});
        add(NORM, hidden, hidden, &norm, {});
        const int tiles = tables.tiles.size() + 1, chunks = tables.chunks + 1;
        auto all_tiles = tables.tiles;
        all_tiles.resize(tiles);
        vector<T> qkv(rows * width), attended(rows * shape.heads * shape.d), wide(rows * shape.inner), normed(wanted.size() * hidden);
        vector<float> partials(rows * shape.heads * chunks * (shape.d + 2)), logits(wanted.size() * shape.vocab);
        vector<unsigned> arrived(tiles * shape.kv_heads), ended(phases.size());
        const Plan plan{phases.data(), ended.data(), arrived.data(), qkv.data(), attended.data(), wide.data(), (int)phases.size(),
                        hidden, shape.heads, shape.kv_heads, shape.d, BLOCK, 1e-5f, half_bytes};
        const Rows<T> all_rows{x.data(), cos.data(), sin.data(), tables.slots.data(), all_tiles.data(), tables.blocks.data(),
                               tables.trees.data(), partials.data(), wanted.data(), logits.data(), normed.data(), rows,
                               (int)wanted.size(), tiles, chunks};
        const size_t of_products = sizeof(ProductMemory<2>) + rows * (hidden + ROW_PADDING) * sizeof(T);
        const size_t of_attention = TEAMS * (shape.d == 64 ? sizeof(TeamMemory<T, 64>) : sizeof(TeamMemory<T, 128>));
        const int ring_at = (BARRIER_BYTES + NOW_BYTES + std::max(of_products, of_attention) + 127) / 128 * 128;
        for (emulator::phase = 0; emulator::phase < (int)phases.size(); emulator::phase++) {
            launch({blocks, 1, 1}, FORWARD_THREADS, [&] {
                if (rows <= 8) {
                    forward<T, 1>(plan, all_rows, ring_at, 3);
                } else {
                    forward<T, 2>(plan, all_rows, ring_at, 3);
                }
            }, ring_at + 3 * 2 * half_bytes);
        }
        for (unsigned count : arrived) {
            CHECK(count == 0, "a counter of chunks is left at %u", count);
        }
        // The norm without the output layer.
        vector<T> logits_of_normed(wanted.size() * shape.vocab);
        multiply_by(head, normed.data(), logits_of_normed.data(), wanted.size(), shape.vocab, 0);
        for (size_t i = 0; i < logits.size(); i++) {
            CHECK(widen(logits_of_normed[i]) == logits[i], "logit %zu of the norm alone", i);
        }
        return {x, logits};
    }

    vector<vector<T>> pools() const {
        vector<vector<T>> all;
        for (auto &layer : layers) {
            all.push_back(layer.k);
            all.push_back(layer.v);
        }
        return all;
    }
};

template <typename T> void test_forward(const char *name, const Shape &shape, const Spans &spans, int blocks) {
    const Tables tables(spans, shape.heads / shape.kv_heads);
    Model<T> model(shape);
    Model<T> other = model;
    auto x = noise<T>(tables.rows * shape.hidden), cos = noise<T>(tables.rows * shape.d / 2), sin = noise<T>(tables.rows * shape.d / 2);
    // A zero whose sign changes when another zero is added to it.
    x[3] = T{0x8000};
    vector<uint32_t> wanted;
    for (int row = 0; row < tables.rows; row++) {
        if (row % 3 != 1) {
            wanted.push_back(row);
        }
    }
    auto want = model.by_ops(x, tables, wanted, cos, sin), got = other.in_one(x, tables, wanted, cos, sin, blocks);
    double size = 0;
    for (float logit : want.logits) {
        size += std::fabs(logit) / want.logits.size();
    }
    CHECK(size > 1e-3 && size < 1e3, "%s: logits of %g test nothing", name, size);
    CHECK(same(want.x.data(), got.x.data(), want.x.size()), "%s, %d rows: the stream", name, tables.rows);
    CHECK(same(want.logits.data(), got.logits.data(), want.logits.size()), "%s, %d rows: logits", name, tables.rows);
    const auto pools = model.pools(), other_pools = other.pools();
    for (size_t i = 0; i < pools.size(); i++) {
        CHECK(same(pools[i].data(), other_pools[i].data(), pools[i].size()), "%s, %d rows: pool %zu", name, tables.rows, i);
    }
}

} // namespace

int main() {
    const Spans one{{{1, 70, false}}}, few{{{1, 0, false}, {4, 61, false}, {1, 130, false}}}, tree{{{7, 60, true}}};
    const Spans many{{{11, 120, false}, {1, 20, false}, {4, 63, true}}}, whole{{{16, 57, false}}}, last{{{13, 3, true}, {3, 63, false}}};
    // The start of a chain, then its last token with a tree.
    const Spans chain{{{4, 126, false}, {9, 130, true, true}, {1, 64, false}}};
    const Spans all[] = {one, few, tree, many, whole, last, chain};
    int i = 0;
#define TEST(F, NUMBER)                                                                            \
    {                                                                                              \
        /* Units that are not whole, where a format has them. */                                   \
        const int hidden = F::SUPER > 0 ? 256 : 288, inner = F::SUPER > 0 ? 512 : 416;             \
        const int f = NUMBER;                                                                      \
        const Shape shape{hidden, 4, 1, 64, inner, 200, {f, f, f, f, f, f, f, f}, {16, 16, 8}, i % 3 == 1, i % 3 == 2, i % 2 == 1}; \
        test_forward<bf16>(#F, shape, all[i % 7], 5);                                              \
        test_forward<bf16>(#F, shape, all[(i + 3) % 7], 40);                                       \
        i++;                                                                                       \
    }
    FOR_FORMATS(TEST)
#undef TEST
    // Three query heads for each K/V head, other formats for other weights, and eight warps where there are many strips;
    // outputs that are not whole strips, of an odd number of them.
    const Shape mixed{256, 6, 2, 128, 768, 325, {12, 8, 14, 2, 3, 12, 13, 14}, {8, 8, 8}, true, true, true};
    const Shape odd{320, 3, 1, 64, 168 * 2 - 16, 77, {8, 2, 7, 3, 8, 2, 8, 2}, {8, 16, 16}, false, false, false};
    // Dense weights, alone and beside others, with strips of several and of odd numbers of steps.
    const Shape dense{288, 4, 1, 64, 416, 200, {0, 0, 0, 0, 0, 0, 0, 0}, {16, 16, 8}, true, false, false};
    const Shape long_{1280, 4, 1, 64, 2304, 77, {0, 12, 14, 12, 13, 12, 0, 0}, {8, 8, 16}, true, true, false};
    const Shape longer{2304, 2, 1, 64, 1344, 39, {2, 8, 0, 0, 0, 0, 2, 12}, {16, 16, 8}, false, false, false};
    for (const Spans &spans : all) {
        test_forward<bf16>("mixed formats", mixed, spans, 7);
        test_forward<bf16>("odd sizes", odd, spans, 3);
        test_forward<bf16>("dense", dense, spans, 5);
    }
    test_forward<bf16>("long rows", long_, few, 7);
    test_forward<bf16>("long rows", long_, many, 5);
    test_forward<bf16>("longer rows", longer, one, 9);
    test_forward<bf16>("longer rows", longer, last, 9);
    printf("%d failures\n", failures);
    return std::min(failures, 255);
}
