// Products of more than 8 rows with quantized weights, by blocks of each shape: each row has the bits of `product`, in each format,
// with several weights, strips and units that are not whole, and fewer units than chains.
#include "quant/cuda/many.cuh"

#include "weight.h"

using emulator::launch;
using std::vector;

namespace {

int parts(int count, int size) { return (count + size - 1) / size; }

// The product with `weights`, whose outputs begin at `column`, by blocks of one shape.
template <typename F, typename T, typename S>
void by_blocks(const vector<Weight> &all, const vector<T> &x, vector<T> &y, int rows, int width, int column) {
    Weights weights{};
    int blocks = 0;
    for (size_t i = 0; i < all.size(); i++) {
        weights.units[i] = all[i].bytes.data();
        weights.outputs[i] = all[i].outputs;
        blocks += parts(all[i].outputs, OUTPUTS * S::STRIPS);
    }
    // As in quant/cuda.rs.
    const size_t unit = all[0].unit_bytes + all[0].super_bytes;
    const size_t group = std::max<size_t>(S::ROWS * 128 + S::STRIPS * unit, 2 * S::STRIPS * SUM_BYTES);
    const size_t shared = S::STAGES * S::GROUPS * group;
    CHECK(shared <= 99 << 10, "%zu bytes of shared memory", shared);
    auto run = [&] {
        many::product<F, T, S>(weights, x.data(), y.data(), all[0].inputs, rows, width, column, all[0].warps,
                               blockIdx.x * S::ROWS);
    };
    launch({parts(rows, S::ROWS), blocks, 1}, S::THREADS, run, shared);
}

template <typename F, typename T> void test_format(int format, int warps) {
    const bool whole = F::SUPER > 0;
    struct Case {
        int inputs, rows;
        vector<int> outputs;
    };
    const vector<Case> cases = {
        // More units than chains, which have different numbers of them.
        {whole ? 1280 : 19 * 64 + 32, 77, {37, 150}},
        // Chains without units.
        {whole ? 256 : 96, 40, {16, 1, 70}},
        {whole ? 768 : 32, 17, {130}},
        {whole ? 256 : 160, 11, {66}},
    };
    for (const Case &c : cases) {
        const int column = 3;
        int width = column + 2;
        vector<Weight> weights;
        for (int outputs : c.outputs) {
            weights.push_back(weight(format, warps, outputs, c.inputs, false));
            width += outputs;
        }
        const auto x = noise<T>((size_t)c.rows * c.inputs), before = noise<T>((size_t)c.rows * width);
        vector<T> want = before;
        for (int first = 0, at = column; const Weight &w : weights) {
            for (first = 0; first < c.rows; first += 16) {
                launch({1, parts(w.outputs, OUTPUTS), 1}, warps * 32, [&] {
                    auto few = warps == 8 ? product<F, T, 2, 8> : product<F, T, 2, 16>;
                    few({{w.bytes.data()}, {w.outputs}}, x.data() + (size_t)first * c.inputs,
                        want.data() + (size_t)first * width, c.inputs, min(16, c.rows - first), width, at);
                });
            }
            at += w.outputs;
        }
        auto check = [&](auto shape, const char *name) {
            vector<T> y = before;
            by_blocks<F, T, decltype(shape)>(weights, x, y, c.rows, width, column);
            CHECK(same(y.data(), want.data(), y.size()), "%s blocks of format %d, %d chains: %d rows of %d inputs", name,
                  format, warps, c.rows, c.inputs);
        };
        check(many::Low(), "low");
        check(many::Small(), "small");
        check(many::Medium(), "medium");
        check(many::Large(), "large");
    }
}

} // namespace

void test_quantized_products() {
    for (int warps : {8, 16}) {
#define TEST(F, NUMBER)                                                                            \
    test_format<F, f16>(NUMBER, warps);                                                            \
    test_format<F, bf16>(NUMBER, warps);
        FOR_FORMATS(TEST)
#undef TEST
    }
}
