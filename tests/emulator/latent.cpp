// Compares what latent attention computes beside attention with sums in f64, and rows alone with those among others.
#include "latent/head_products.cu"
#include "latent/latent_rows.cu"

#include "check.h"

using emulator::launch;
using std::vector;

namespace {

constexpr int HEADS = 3;

// Kernels for up to 8, 16 and any number of rows; the last one alone for what tensor cores do not take.
template <typename T, typename Kernel>
void test_products(const char *name, int outputs, int inputs, Kernel one, Kernel two, Kernel many, int of_warp) {
    // Heads are parts of wider ones.
    const int rows = 77, x_head = inputs + 8, x_row = HEADS * x_head + 16, y_head = outputs + 3, y_row = HEADS * y_head + 5;
    const auto w = noise<T>((size_t)HEADS * outputs * inputs), x = noise<T>((size_t)rows * x_row);
    const T untouched = narrow<T>(7.f);
    auto run = [&](Kernel kernel, int first, int rows, int rows_of_block) {
        vector<T> y((size_t)rows * y_row, untouched);
        const int of_block = kernel == many ? 4 * of_warp : of_warp;
        launch({(rows + rows_of_block - 1) / rows_of_block, (outputs + of_block - 1) / of_block, HEADS}, 128, [&] {
            kernel(w.data(), x.data() + (size_t)first * x_row, y.data(), outputs, inputs, rows, x_head, x_row, y_head, y_row);
        });
        return y;
    };
    const int rows_of_many = of_warp == 1 ? 8 : 64;
    const vector<T> all = run(many, 0, rows, rows_of_many);
    double worst = 0;
    bool is_whole = true;
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < y_row; i++) {
            const T got = all[(size_t)row * y_row + i];
            const int head = i / y_head, output = i % y_head;
            if (head >= HEADS || output >= outputs) {
                is_whole &= same(&got, &untouched, 1);
                continue;
            }
            double want = 0;
            for (int j = 0; j < inputs; j++) {
                want += (double)widen(w[((size_t)head * outputs + output) * inputs + j]) *
                        widen(x[(size_t)row * x_row + head * x_head + j]);
            }
            worst = std::max(worst, off(widen(got), want));
        }
    }
    CHECK(worst < precision<T>(), "%s of heads, %d x %d, is off by %g", name, outputs, inputs, worst);
    CHECK(is_whole, "%s of heads, %d x %d, writes between heads", name, outputs, inputs);
    for (auto [kernel, most] : {std::pair{one, 8}, {two, 16}, {many, 66}}) {
        for (auto [first, count] : {std::pair{0, 1}, {70, 7}, {3, most}}) {
            const vector<T> part = run(kernel, first, count, kernel == many ? rows_of_many : most);
            CHECK(same(part.data(), all.data() + (size_t)first * y_row, part.size()), "%s: %d rows of heads from %d on", name,
                  count, first);
        }
    }
}

template <typename T, typename Norm, typename Write> void test_rows(const char *name, Norm norm, Write write) {
    const int rows = 3, heads = 6, rank = 40, nope = 24, half = 12, key = nope + 2 * half, kept = rank + 2 * half;
    const int slots = 5, q_row = heads * key + 8, first = q_row, stride = q_row + kept + 16;
    const float eps = 1e-3f;
    const auto products = noise<T>(rows * stride), weight = noise<T>(rank), cos = noise<T>(rows * half), sin = noise<T>(rows * half);
    const vector<uint32_t> places = {4, NO_SLOT, 1};
    const T untouched = narrow<T>(7.f);
    vector<T> pool(slots * kept, untouched), queries(rows * heads * kept, untouched);
    // Two blocks of queries, so that a warp has one head; one block, so that it has two.
    for (int blocks : {3, 2}) {
        std::fill(pool.begin(), pool.end(), untouched);
        std::fill(queries.begin(), queries.end(), untouched);
        launch({rows, blocks, 1}, 128, [&] {
            write(products.data(), products.data(), cos.data(), sin.data(), weight.data(), places.data(), pool.data(),
                  queries.data(), stride, first, stride, heads, rank, nope, half, eps);
        });
        double worst = 0;
        bool is_whole = true;
        auto test_rotated = [&](const T *got, const T *x, int row) {
            for (int i = 0; i < half; i++) {
                const double a = widen(x[i]), b = widen(x[i + half]), c = widen(cos[row * half + i]), s = widen(sin[row * half + i]);
                worst = std::max(worst, off(widen(got[i]), a * c - b * s));
                worst = std::max(worst, off(widen(got[i + half]), a * s + b * c));
            }
        };
        vector<bool> written(slots);
        for (int row = 0; row < rows; row++) {
            for (int head = 0; head < heads; head++) {
                const T *to = &queries[(row * heads + head) * kept];
                test_rotated(to + rank, &products[row * stride + head * key + nope], row);
                is_whole &= std::all_of(to, to + rank, [&](T value) { return same(&value, &untouched, 1); });
            }
            if (places[row] == NO_SLOT) {
                continue;
            }
            written[places[row]] = true;
            const T *x = &products[row * stride + first], *to = &pool[places[row] * kept];
            double square = 0;
            for (int i = 0; i < rank; i++) {
                square += (double)widen(x[i]) * widen(x[i]);
            }
            for (int i = 0; i < rank; i++) {
                worst = std::max(worst, off(widen(to[i]), widen(x[i]) / std::sqrt(square / rank + eps) * widen(weight[i])));
            }
            test_rotated(to + rank, x + rank, row);
        }
        for (int i = 0; i < slots * kept; i++) {
            is_whole &= written[i / kept] || same(&pool[i], &untouched, 1);
        }
        CHECK(worst < precision<T>(), "%s: latent rows are off by %g", name, worst);
        CHECK(is_whole, "%s: other slots or values are written", name);
    }
    vector<T> normed(rows * rank);
    launch({rows, 1, 1}, 64, [&] { norm(products.data(), weight.data(), normed.data(), stride, first, rank, eps); });
    bool is_same = true;
    for (int row : {0, 2}) {
        // The norm of as many threads has the bits of the one that is written.
        vector<T> alone(rank);
        launch({1, 1, 1}, 128, [&] {
            norm(products.data() + row * stride, weight.data(), alone.data(), stride, first, rank, eps);
        });
        is_same &= same(alone.data(), &pool[places[row] * kept], rank);
        for (int i = 0; i < rank; i++) {
            is_same &= off(widen(normed[row * rank + i]), widen(alone[i])) < precision<T>();
        }
    }
    CHECK(is_same, "%s: norms of parts of rows differ", name);
}

} // namespace

void test_latent() {
    for (auto [outputs, inputs] : {std::pair{72, 64}, {16, 160}, {3, 32}}) {
        test_products<f16>("f16", outputs, inputs, head_products_1_f16, head_products_2_f16, head_products_many_f16, 16);
        test_products<bf16>("bf16", outputs, inputs, head_products_1_bf16, head_products_2_bf16, head_products_many_bf16, 16);
    }
    test_products<float>("f32", 10, 30, head_products_any_f32, head_products_any_f32, head_products_any_f32, 1);
    test_products<bf16>("bf16", 6, 8, head_products_any_bf16, head_products_any_bf16, head_products_any_bf16, 1);
    test_rows<float>("f32", norm_part_f32, latent_write_f32);
    test_rows<bf16>("bf16", norm_part_bf16, latent_write_bf16);
}
