// Compares what adapters add to products with sums in f64, and rows alone with those among rows of other adapters.
#include "lora/lora.cu"

#include "check.h"

using emulator::launch;
using std::vector;

namespace {

// The outputs of the weights that are side by side in a layer, and the largest sum of their ranks.
constexpr int OUTPUTS[] = {37, 20, 24}, PARTS = 3, ALL = 37 + 20 + 24, WIDTH = 16;

// The weights of an adapter: A, and B transposed, for each part; and its table, which has another layer before this one.
template <typename T> struct Adapter {
    vector<T> down[PARTS], up[PARTS];
    vector<lora::Part> table;

    Adapter(std::initializer_list<int> ranks, int inputs) : table(1) {
        int start = 0, first = 0;
        for (int i = 0; i < PARTS; i++) {
            const int rank = ranks.begin()[i];
            down[i] = noise<T>((size_t)rank * inputs);
            up[i] = noise<T>((size_t)rank * OUTPUTS[i]);
            table.push_back({reinterpret_cast<uint64_t>(down[i].data()), reinterpret_cast<uint64_t>(up[i].data()), rank, start,
                             first, OUTPUTS[i], .5f / inputs, 0});
            start += rank;
            first += OUTPUTS[i];
        }
    }
};

template <typename T, typename Shrink, typename Expand>
void test(const char *name, int inputs, Shrink shrink, Expand expand) {
    // One changes all weights, one of larger ranks only the last two, one only the second.
    const Adapter<T> adapters[] = {{{4, 2, 3}, inputs}, {{0, 8, 8}, inputs}, {{0, 1, 0}, inputs}};
    // Runs that end with a block's rows and within, and of single rows; -1 = none.
    const vector<int> of = {0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, 2, -1, 0, 0, 2, 1, 0, -1, -1, 2, 2, 2, 2};
    const int rows = of.size();
    const auto noisy = noise<T>(rows * inputs + 1), before = noise<T>((size_t)rows * ALL);
    auto add = [&](const T *x, int first, int count) {
        vector<uint64_t> addresses;
        for (int row = first; row < first + count; row++) {
            addresses.push_back(of[row] < 0 ? 0 : reinterpret_cast<uint64_t>(adapters[of[row]].table.data()));
        }
        vector<float> narrow(count * WIDTH, NAN);
        vector<T> y(before.begin() + (size_t)first * ALL, before.begin() + (size_t)(first + count) * ALL);
        x += (size_t)first * inputs;
        const int blocks = (count + lora::ROWS - 1) / lora::ROWS;
        launch({blocks, WIDTH / 2, 1}, 64, [&] { shrink(addresses.data(), x, narrow.data(), count, inputs, WIDTH, 1, PARTS); });
        launch({blocks, (ALL + 31) / 32, 1}, 32,
               [&] { expand(addresses.data(), narrow.data(), y.data(), count, ALL, WIDTH, 1, PARTS); });
        return y;
    };
    for (int shift : {0, 1}) {
        const T *x = noisy.data() + shift;
        const vector<T> all = add(x, 0, rows);
        double worst = 0;
        bool is_whole = true;
        for (int row = 0; row < rows; row++) {
            for (int output = 0; output < ALL; output++) {
                const size_t at = (size_t)row * ALL + output;
                const int part = output < OUTPUTS[0] ? 0 : output < OUTPUTS[0] + OUTPUTS[1] ? 1 : 2;
                const auto *own = of[row] < 0 ? nullptr : &adapters[of[row]].table[1 + part];
                if (!own || own->rank == 0) {
                    is_whole &= same(&all[at], &before[at], 1);
                    continue;
                }
                double want = 0;
                for (int r = 0; r < own->rank; r++) {
                    double sum = 0;
                    for (int i = 0; i < inputs; i++) {
                        sum += (double)widen(adapters[of[row]].down[part][(size_t)r * inputs + i]) *
                               widen(x[(size_t)row * inputs + i]);
                    }
                    want += own->scale * sum *
                            widen(adapters[of[row]].up[part][(size_t)r * OUTPUTS[part] + output - own->first]);
                }
                worst = std::max(worst, off(widen(all[at]), widen(before[at]) + want));
            }
        }
        CHECK(worst < precision<T>(), "%s: adapters of %d inputs are off by %g", name, inputs, worst);
        CHECK(is_whole, "%s: outputs without adapters are not as before", name);
        for (auto [first, count] : {std::pair{0, 1}, {3, 1}, {7, 3}, {12, 4}, {18, 1}, {1, 20}, {22, 4}}) {
            const vector<T> part = add(x, first, count);
            CHECK(same(part.data(), all.data() + (size_t)first * ALL, part.size()), "%s: %d rows with adapters from %d on", name,
                  count, first);
        }
    }
    const vector<T> moved(noisy.begin() + 1, noisy.end());
    CHECK(same(add(moved.data(), 0, rows).data(), add(noisy.data() + 1, 0, rows).data(), before.size()),
          "%s: the place of rows changes their bits", name);
}

} // namespace

void test_lora() {
    for (int inputs : {64, 520, 30}) {
        test<float>("f32", inputs, lora_shrink_f32, lora_expand_f32);
        test<f16>("f16", inputs, lora_shrink_f16, lora_expand_f16);
        test<bf16>("bf16", inputs, lora_shrink_bf16, lora_expand_bf16);
    }
}
