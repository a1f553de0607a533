// Compares the attention of prompts with sums in f64, and with itself for other divisions of a prompt.
#include "paged_attention/prefill.cu"

#include "check.h"

using emulator::launch;
using std::vector;

PREFILL_KERNEL(f16, f16_to_128, 128, true)
PREFILL_KERNEL(bf16, bf16_to_128, 128, true)
PREFILL_KERNEL(f16, f16_to_256, 256, true)
PREFILL_KERNEL(bf16, bf16_to_512, 512, true)

namespace {

constexpr int BLOCK = 16;

// Rows of a sequence; `first` is its first row in the call.
struct Span {
    int first, rows, context, sequence;
};

// For a kernel that computes with heads of WIDTH values.
template <typename T, int D, int WIDTH> struct Attention {
    using Kernel = void (*)(const T *, const T *, const T *, T *, const Tile *, const uint32_t *, int, int, int,
                            float, int, int, float, const float *, int, int);
    static constexpr int KV_HEADS = 2;
    static constexpr float SCALE = 0.12f;
    Kernel kernel;
    Variant variant;
    int group, rows = 0, most_blocks = 0;
    vector<Span> spans;
    vector<T> q;
    vector<float> sinks;
    // For each sequence: [key, K/V head, value].
    vector<vector<T>> ks, vs;
    // All blocks of the pool, shuffled.
    vector<uint32_t> pool;

    int heads() const { return KV_HEADS * group; }

    void add(int rows, int context) {
        const int keys = context + rows;
        spans.push_back({this->rows, rows, context, (int)spans.size()});
        ks.push_back(noise<T>((size_t)keys * KV_HEADS * D));
        vs.push_back(noise<T>((size_t)keys * KV_HEADS * D));
        this->rows += rows;
        most_blocks = std::max(most_blocks, (keys + BLOCK - 1) / BLOCK);
    }

    void ready() {
        sinks = noise<float>(heads());
        q = noise<T>((size_t)rows * heads() * D);
        for (uint32_t i = 0; i < spans.size() * most_blocks; i++) {
            pool.push_back(i);
        }
        std::shuffle(pool.begin(), pool.end(), rng);
    }

    // Runs one call. The pool contains the rows of `spans` and their contexts, and nothing else.
    void run(const vector<Span> &spans, vector<T> &out, int stages = 1) const {
        const T nan = narrow<T>(NAN);
        vector<T> k(pool.size() * BLOCK * KV_HEADS * D, nan), v = k;
        vector<Tile> tiles;
        vector<uint32_t> blocks;
        for (const Span &span : spans) {
            const int table = blocks.size(), keys = span.context + span.rows;
            for (int i = 0; i * BLOCK < keys; i++) {
                blocks.push_back(pool[span.sequence * most_blocks + i]);
            }
            for (int key = 0; key < keys; key++) {
                constexpr int VALUES = KV_HEADS * D;
                const size_t slot = blocks[table + key / BLOCK] * BLOCK + key % BLOCK;
                std::copy_n(&ks[span.sequence][key * VALUES], VALUES, &k[slot * VALUES]);
                std::copy_n(&vs[span.sequence][key * VALUES], VALUES, &v[slot * VALUES]);
            }
            const int max_rows = prefill::MAX_QUERIES / group;
            for (int start = 0; start < span.rows; start += max_rows) {
                const int count = std::min(max_rows, span.rows - start), after = span.rows - start - count;
                tiles.push_back({span.first + start, count, span.context, start, table, -1, after, 0});
            }
        }
        const int depth = WIDTH / prefill::Shared<T, WIDTH>::VALUES;
        launch({(int)tiles.size(), KV_HEADS, depth}, prefill::THREADS,
               [&] {
                   kernel(q.data(), k.data(), v.data(), out.data(), tiles.data(), blocks.data(), heads(), KV_HEADS,
                          BLOCK, SCALE, variant.window, variant.ahead(), variant.cap,
                          variant.sinks ? sinks.data() : nullptr, D, stages);
               },
               prefill::Shared<T, WIDTH>::bytes(stages));
    }

    // The largest error of a span's rows.
    double worst(const Span &span, const vector<T> &out) const {
        auto wide = [](const vector<T> &values) {
            vector<double> wide;
            for (T value : values) {
                wide.push_back(widen(value));
            }
            return wide;
        };
        const vector<double> k = wide(ks[span.sequence]), v = wide(vs[span.sequence]);
        double worst = 0;
        for (int i = 0; i < span.rows * heads(); i++) {
            const int row = i / heads(), kv_head = i % heads() / group;
            const T *query = &q[((size_t)span.first * heads() + i) * D];
            double wide_query[D], want[D] = {}, sum = variant.sinks ? std::exp((double)sinks[i % heads()]) : 0;
            std::transform(query, query + D, wide_query, [](T x) { return widen(x); });
            const int position = span.context + row, after = std::min(variant.ahead(), span.rows - 1 - row);
            for (int key = std::max(0, position - variant.window + 1); key <= position + after; key++) {
                const size_t at = ((size_t)key * KV_HEADS + kv_head) * D;
                double score = 0;
                for (int j = 0; j < D; j++) {
                    score += wide_query[j] * k[at + j];
                }
                score *= SCALE;
                if (variant.cap > 0) {
                    score = variant.cap * std::tanh(score / variant.cap);
                }
                const double weight = std::exp(score);
                sum += weight;
                for (int j = 0; j < D; j++) {
                    want[j] += weight * v[at + j];
                }
            }
            for (int j = 0; j < D; j++) {
                const double by = off(widen(out[((size_t)span.first * heads() + i) * D + j]), want[j] / sum);
                // Also takes NaN as an error.
                worst = by <= worst ? worst : by;
            }
        }
        return worst;
    }
};

template <typename T, int D, int WIDTH = D>
void test(typename Attention<T, D, WIDTH>::Kernel kernel, int group, Variant variant = Variant()) {
    Attention<T, D, WIDTH> of{kernel, variant, group};
    for (int context : {0, 1, 63, 64, 100}) {
        for (int rows : {17, 64, 65, 130}) {
            of.add(rows, context);
        }
    }
    of.ready();
    vector<T> out((size_t)of.rows * of.heads() * D, narrow<T>(NAN)), cut = out;
    of.run(of.spans, out);
    if constexpr (prefill::LOADS_AHEAD<WIDTH, Numbers<T>>) {
        of.run(of.spans, cut, 2);
        CHECK(same(cut.data(), out.data(), out.size()), "two stages, heads of %d, groups of %d", D, group);
    }
    for (const Span &span : of.spans) {
        const double worst = of.worst(span, out);
        // Both the weights and the results are rounded.
        CHECK(worst < 2 * precision<T>(), "%d rows after %d, heads of %d, groups of %d, window %d, cap %g: off by %g",
              span.rows, span.context, D, group, variant.window, variant.cap, worst);
    }
    // One span and the last one, alone and, unless rows see later ones, in pieces.
    const vector<int> pieces = variant.bidirectional ? vector<int>{130} : vector<int>{17, 40, 1, 72};
    for (const Span &span : {of.spans[3], of.spans.back()}) {
        int done = 0;
        for (int rows : pieces) {
            of.run({{span.first + done, rows, span.context + done, span.sequence}}, cut);
            done += rows;
        }
        const size_t at = (size_t)span.first * of.heads() * D;
        CHECK(same(&cut[at], &out[at], (size_t)span.rows * of.heads() * D),
              "%d rows after %d in pieces, heads of %d, groups of %d", span.rows, span.context, D, group);
    }
}

} // namespace

void test_prefill() {
    for (const Variant &variant : VARIANTS) {
        test<f16, 64>(prefill_f16_64, 4, variant);
    }
    for (int group : {1, 8}) {
        test<f16, 64>(prefill_f16_64, group);
        test<bf16, 128>(prefill_bf16_128, group);
    }
    test<bf16, 80, 128>(prefill_bf16_to_128, 4, VARIANTS[4]);
    test<f16, 112, 128>(prefill_f16_to_128, 3);
    test<f16, 192, 256>(prefill_f16_to_256, 3, VARIANTS[4]);
    test<f16, 256, 256>(prefill_f16_to_256, 1);
    test<bf16, 320, 512>(prefill_bf16_to_512, 3, VARIANTS[4]);
    for (int group : {3, 4}) {
        test<f16, 128>(prefill_f16_128, group);
        test<bf16, 64>(prefill_bf16_64, group);
    }
}
