// What the tests of kernels share.
#pragma once
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

// In a file of its own.
void test_sample();
