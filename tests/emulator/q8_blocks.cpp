// Compares pools in blocks with plain rounding, and attention over them with attention over the values that they hold: the
// bits are the same.
#include "paged_attention/q8_0.cuh"

#include "check.h"
#include <numeric>

using emulator::launch;
using std::vector;

namespace {

constexpr int BLOCK = Q8Blocks::BLOCK, SLOTS_OF_BLOCK = 16, KV_HEADS = 2;

// Of `values` values, whose blocks are zeros.
struct Pool {
    vector<int8_t> bytes;
    vector<f16> scales;

    explicit Pool(size_t values) : bytes(values), scales(values / BLOCK) {}
    Blocks read() const { return {{bytes.data(), scales.data()}}; }

    // The values, each rounded once.
    template <typename T> vector<T> values() const {
        vector<T> all;
        for (size_t i = 0; i < bytes.size(); i++) {
            all.push_back(narrow<T>(bytes[i] * widen(scales[i / BLOCK])));
        }
        return all;
    }
};

// Rounds all of `from` from value `at` of the pool on, by a warp.
void round_to(const vector<float> &from, Pool &pool, size_t at) {
    launch({1, 1, 1}, 32, [&] { quantize(from.data(), from.size(), {pool.bytes.data(), pool.scales.data()}, at); });
}

void test_rounding() {
    for (int blocks : {1, 2, 3, 5, 16}) {
        const int count = blocks * BLOCK;
        vector<float> x = noise<float>(count);
        for (int i = 0; i < count; i++) {
            // Of many sizes; scales of the smallest have few bits.
            x[i] = std::ldexp(x[i], i / BLOCK * 2 - 24);
        }
        Pool pool(count + 2 * BLOCK);
        round_to(x, pool, BLOCK);
        for (int i = 0; i < count; i++) {
            float largest = 0;
            for (int j = 0; j < BLOCK; j++) {
                largest = std::max(largest, std::fabs(x[i / BLOCK * BLOCK + j]));
            }
            const f16 scale = narrow<f16>(largest / 127);
            const float by = widen(scale) > 0 ? 1 / widen(scale) : 0;
            const int want = (int)std::nearbyint(std::min(127.f, std::max(-127.f, x[i] * by)));
            CHECK(pool.scales[1 + i / BLOCK].bits == scale.bits, "the scale of value %d is %g", i, widen(scale));
            CHECK(pool.bytes[BLOCK + i] == want, "value %d is %d, not %d", i, pool.bytes[BLOCK + i], want);
        }
        const bool others = pool.scales.front().bits == 0 && pool.scales.back().bits == 0 && pool.bytes[0] == 0 &&
                            pool.bytes[BLOCK - 1] == 0 && pool.bytes.back() == 0;
        CHECK(others, "blocks beside are written");
    }
    for (float wrong : {NAN, INFINITY, -INFINITY, 9e6f}) {
        vector<float> x(3 * BLOCK, 1.f);
        x[BLOCK + 7] = wrong;
        Pool pool(3 * BLOCK);
        round_to(x, pool, 0);
        CHECK(pool.scales[1].bits == 0x7e00 && pool.bytes[BLOCK] == 0, "a block with %g is no number", wrong);
        CHECK(pool.bytes[0] == 127 && pool.bytes[2 * BLOCK] == 127, "blocks beside %g are 127 times their scale", wrong);
    }
}

// Heads of D values by kernels of WIDTH: `rows` rows after `context` tokens, whose other slots hold NaN.
template <typename T, int D, int WIDTH> struct Attention {
    static constexpr bool PADDED = D != WIDTH;
    const int group, rows, context, keys = context + rows, heads = KV_HEADS * group;
    const Variant variant;
    vector<uint32_t> blocks = vector<uint32_t>(keys / SLOTS_OF_BLOCK + 2);
    const vector<float> sinks = noise<float>(heads);
    const vector<T> q = noise<T>((size_t)rows * heads * D);
    Pool k = Pool(blocks.size() * SLOTS_OF_BLOCK * KV_HEADS * D), v = k;

    Attention(int group, int rows, int context, Variant variant)
        : group(group), rows(rows), context(context), variant(variant) {
        std::iota(blocks.begin(), blocks.end(), 0);
        std::shuffle(blocks.begin(), blocks.end(), rng);
        for (Pool *pool : {&k, &v}) {
            std::fill(pool->scales.begin(), pool->scales.end(), f16{0x7e00});
            for (int key = 0; key < keys; key++) {
                const size_t slot = blocks[key / SLOTS_OF_BLOCK] * SLOTS_OF_BLOCK + key % SLOTS_OF_BLOCK;
                round_to(noise<float>(KV_HEADS * D), *pool, slot * KV_HEADS * D);
            }
        }
    }

    vector<Tile> tiles(int queries) const {
        vector<Tile> tiles;
        for (int start = 0; start < rows; start += queries / group) {
            const int count = std::min(queries / group, rows - start);
            tiles.push_back({start, count, context, start, 0, -1, rows - start - count, start});
        }
        return tiles;
    }

    Scores scores() const {
        return {.12f, variant.window, variant.cap, variant.sinks ? sinks.data() : nullptr, variant.ahead()};
    }

    template <bool SPLIT, typename Form> vector<T> attend(const Form &k, const Form &v) const {
        const vector<Tile> tiles = this->tiles(MAX_QUERIES);
        const int chunks = (keys + CHUNK - 1) / CHUNK;
        vector<float> partials((size_t)rows * heads * chunks * (D + 2), NAN);
        vector<T> out(q.size());
        const Args args{tiles.data(), blocks.data(), nullptr, partials.data(), heads, KV_HEADS, SLOTS_OF_BLOCK,
                        chunks, scores(), D};
        launch(
            {(int)tiles.size(), KV_HEADS, SPLIT ? chunks : 1}, THREADS,
            [&] { attend_by_blocks<T, WIDTH, SPLIT, PADDED>(q.data(), k, v, out.data(), args); }, sizeof(Shared<T, WIDTH>));
        return out;
    }

    template <typename Form> vector<T> read_prompt(const Form &k, const Form &v) const {
        const vector<Tile> tiles = this->tiles(prefill::MAX_QUERIES);
        vector<T> out(q.size());
        const prefill::Args args{tiles.data(), blocks.data(), heads, KV_HEADS, SLOTS_OF_BLOCK, scores(), D, 1};
        const int depth = WIDTH / prefill::Shared<T, WIDTH>::VALUES;
        launch(
            {(int)tiles.size(), KV_HEADS, depth}, prefill::THREADS,
            [&] { prefill::attend<T, WIDTH, PADDED>(q.data(), k, v, out.data(), args); },
            sizeof(prefill::Shared<T, WIDTH>));
        return out;
    }
};

template <typename T, int D, int WIDTH = D> void test_attention(int group, int rows, int context, Variant variant = {}) {
    Attention<T, D, WIDTH> of(group, rows, context, variant);
    const vector<T> k = of.k.template values<T>(), v = of.v.template values<T>();
    const Numbers<T> keys{k.data()}, values{v.data()};
    const Blocks in_k = of.k.read(), in_v = of.v.read();
    auto check = [&](const vector<T> &got, const vector<T> &want, const char *kernel) {
        bool finite = true;
        for (T x : want) {
            finite &= std::isfinite(widen(x));
        }
        CHECK(finite && same(got.data(), want.data(), want.size()), "%s, heads of %d, %d rows after %d, groups of %d", kernel,
              D, rows, context, group);
    };
    check(of.template attend<false>(in_k, in_v), of.template attend<false>(keys, values), "whole");
    check(of.template attend<true>(in_k, in_v), of.template attend<true>(keys, values), "split");
    if constexpr (sizeof(T) == 2) {
        check(of.read_prompt(in_k, in_v), of.read_prompt(keys, values), "prompt");
    }
}

} // namespace

void test_q8_blocks() {
    test_rounding();
    for (const Variant &variant : VARIANTS) {
        test_attention<f16, 64>(3, 5, 130, variant);
    }
    test_attention<float, 64>(4, 3, 70);
    test_attention<bf16, 128>(2, 70, 30);
    test_attention<f16, 96, 128>(3, 1, 200, VARIANTS[4]);
    test_attention<bf16, 160, 256>(1, 65, 3);
    test_attention<float, 256>(2, 2, 64);
    test_attention<bf16, 320, 512>(3, 30, 60, VARIANTS[4]);
    test_attention<f16, 512>(1, 9, 0);
}
