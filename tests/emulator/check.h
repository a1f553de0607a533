// Helpers that the tests of kernels share.
#pragma once
#include "cuda/common.cuh"
#include <climits>
#include <cstdio>
#include <random>
#include <vector>

inline std::mt19937 rng(1);
inline int failures = 0;

#define CHECK(condition, ...)                                                                      \
    if (!(condition)) {                                                                            \
        failures++;                                                                                \
        printf("%s: ", #condition);                                                                \
        printf(__VA_ARGS__);                                                                       \
        printf("\n");                                                                              \
    }

template <typename T> std::vector<T> noise(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<T> values(count);
    for (T &value : values) {
        value = narrow<T>(normal(rng));
    }
    return values;
}

template <typename T> bool same(const T *a, const T *b, size_t count) {
    return memcmp(a, b, count * sizeof(T)) == 0;
}

// Half a unit in the last place of 1, plus the error of f32 sums.
template <typename T> double precision();
template <> inline double precision<float>() { return 2e-6; }
template <> inline double precision<f16>() { return 6e-4; }
template <> inline double precision<bf16>() { return 5e-3; }

inline double off(double value, double want) {
    return std::fabs(value - want) / std::max(1., std::fabs(want));
}

// What attention does besides. Windows within a chunk, within a tree and over some chunks; a small cap, so that it
// matters; rows of causal spans that see later rows.
struct Variant {
    int window = INT_MAX;
    float cap = 0;
    bool sinks = false, bidirectional = false;

    int ahead() const { return bidirectional ? window - 1 : 0; }
};
constexpr Variant VARIANTS[] = {{}, {.window = 3}, {.window = 70}, {.cap = .7f}, {29, .9f, true}, {.bidirectional = true},
                                {3, .9f, true, true}};

// Defined in separate files.
void test_float8();
void test_latent();
void test_lora();
void test_prefill();
void test_q8_blocks();
void test_quantized_products();
void test_recurrent();
void test_sample();
