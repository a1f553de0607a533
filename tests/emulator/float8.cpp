// Weights of FP8: what each byte becomes for tensor cores, and products.
#include "quant/cuda/kernels.cuh"

#include "weight.h"

using emulator::launch;
using std::vector;

namespace {

// From the definition: 3 bits of a fraction, an exponent with a bias of 7, and numbers below the smallest power.
float defined(unsigned char byte) {
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    return byte & 128 ? -size : size;
}

bool is_nan(unsigned char byte) { return (byte & 127) == 127; }

// Where input k of an output is in a unit.
int place(int output, int k) {
    const int lane = output % 8 * 4 + k % 16 / 4, j = k % 4 / 2 * 2 + output / 8;
    return k / 32 * 512 + 16 * lane + k / 16 % 2 * 8 + 2 * j + k % 2;
}

// Each byte at each place of a word, with its sign also if it is zero.
template <typename T> void test_values() {
    alignas(16) unsigned char bytes[F8E4M3::UNIT] = {};
    for (int shift = 0; shift < 4; shift++) {
        for (int i = 0; i < F8E4M3::SCALES; i++) {
            bytes[i] = i + i / 256 + shift;
        }
        for (int lane = 0; lane < 32; lane++) {
            uint32_t a[FRAGMENTS][4];
            unpack<F8E4M3, T>(a, GlobalUnit{bytes, nullptr}, lane);
            for (int i = 0; i < FRAGMENTS * 8; i++) {
                const int m = i / 8, j = i / 2 % 4, half = i % 2;
                const int output = lane / 4 + j % 2 * 8, input = 16 * m + lane % 4 * 4 + j / 2 * 2 + half;
                const unsigned char byte = bytes[place(output, input)];
                const float value = widen(emulator::cast<T>(uint16_t(a[m][j] >> 16 * half))) * FLOATS_BY<F8E4M3, T>;
                const float want = defined(byte);
                CHECK(is_nan(byte) || (value == want && std::signbit(value) == std::signbit(want)),
                      "byte %d is %g, not %g", byte, value, want);
            }
        }
    }
}

// Compared with f64: products of 16 rows, and the values that are dequantized.
template <typename T> void test_product(int outputs, int inputs) {
    Weight w = weight(256, 16, outputs, inputs, false);
    for (auto &byte : w.bytes) {
        // Scales have other last bits then.
        byte -= is_nan(byte);
    }
    const int rows = 16, count = (inputs + 63) / 64;
    const auto x = noise<T>(rows * inputs);
    vector<T> y(rows * outputs);
    launch({1, (outputs + 15) / 16, 1}, 16 * 32,
           [&] { product<F8E4M3, T, 2, 16>({{w.bytes.data()}, {outputs}}, x.data(), y.data(), inputs, rows, outputs, 0); });
    vector<float> values((size_t)outputs * inputs);
    launch({(outputs + 15) / 16, (count + 7) / 8, 1}, 8 * 32, [&] {
        dequantize<F8E4M3, float>(w.bytes.data(), nullptr, values.data(), outputs, inputs, 0, outputs);
    });
    // Narrower values have other places in words, and may begin where none is aligned.
    for (int first : {0, 1}) {
        vector<T> narrowed(values.size() + 2);
        launch({(outputs + 15) / 16, (count + 7) / 8, 1}, 8 * 32, [&] {
            dequantize<F8E4M3, T>(w.bytes.data(), nullptr, narrowed.data() + first, outputs, inputs, 0, outputs);
        });
        size_t others = 0;
        for (size_t i = 0; i < values.size(); i++) {
            others += narrowed[first + i].bits != narrow<T>(values[i]).bits;
        }
        CHECK(others == 0, "%zu weights of %d x %d from place %d are other ones", others, outputs, inputs, first);
        CHECK(narrowed[first ? 0 : values.size()].bits == 0, "weights from place %d are outside", first);
    }
    double worst = 0;
    for (int output = 0; output < outputs; output++) {
        vector<double> sums(rows), sizes(rows);
        for (int k = 0; k < inputs; k++) {
            const unsigned char *unit = &w.bytes[((size_t)output / 16 * count + k / 64) * F8E4M3::UNIT];
            float scale;
            memcpy(&scale, unit + F8E4M3::SCALES + output % 8 * 8 + output % 16 / 8 * 4, 4);
            const float want = scale * defined(unit[place(output % 16, k % 64)]);
            CHECK(values[(size_t)output * inputs + k] == want, "weight %d, %d is %g, not %g", output, k,
                  values[(size_t)output * inputs + k], want);
            for (int row = 0; row < rows; row++) {
                const double term = (double)want * widen(x[row * inputs + k]);
                sums[row] += term;
                sizes[row] += term * term;
            }
        }
        for (int row = 0; row < rows; row++) {
            const double size = std::max(std::sqrt(sizes[row]), std::fabs(sums[row]));
            worst = std::max(worst, std::fabs(widen(y[row * outputs + output]) - sums[row]) / size);
        }
    }
    CHECK(worst < precision<T>(), "FP8 of %d x %d is off by %g", outputs, inputs, worst);
}

} // namespace

void test_float8() {
    test_values<f16>();
    test_values<bf16>();
    for (auto [outputs, inputs] : {std::pair{48, 64}, {37, 288}, {3, 32}, {16, 2048}}) {
        test_product<f16>(outputs, inputs);
        test_product<bf16>(outputs, inputs);
    }
}
