// Random quantized weights, for tests of kernels.
#pragma once
#include "check.h"
#include "quant/cuda/formats.cuh"

// A random weight, of which missing inputs have scales of zero, or floats of zero.
struct Weight {
    int format, warps, outputs, inputs;
    std::vector<unsigned char> bytes;
    std::vector<uint16_t> bias;
    // Where shared parts begin, and sizes.
    size_t supers;
    int unit_bytes, super_bytes;
};

inline uint16_t small(int inputs) {
    return narrow<f16>(std::uniform_real_distribution<float>(.5f, 1.5f)(rng) / inputs).bits;
}

// A unit of floats with scales of their outputs, or with exponents of their blocks, of which the second half of the inputs
// may be missing.
template <typename F> void fill_floats(unsigned char *unit, int inputs, bool is_half) {
    // Where the second half is: behind the first, or in the other half of each 16 bytes.
    for (int i = 0; i < F::SCALES && is_half; i++) {
        unit[i] = (F::BITS == 8 ? i < F::SCALES / 2 : i % 16 < 8) ? unit[i] : 0;
    }
    for (int i = 0; i < 4 * OUTPUTS && F::Kind::HALF_BLOCKS; i++) {
        // Floats of 8 bits of about 1, and their factor.
        unit[F::SCALES + i] = 0x34 + rng() % 8;
        const float factor = 0x1p120f / inputs;
        memcpy(unit + F::SCALES + 4 * OUTPUTS, &factor, 4);
    }
    for (int i = 0; i < OUTPUTS * 2 && !F::Kind::HALF_BLOCKS; i++) {
        const float scale = widen(f16{small(inputs)});
        if (F::Kind::BYTES == 4) {
            unit[F::SCALES + i] = __float_as_int(scale) >> 23;
        } else {
            memcpy(unit + F::SCALES + i / 2 * 4, &scale, 4);
        }
    }
}

template <typename F> void fill(Weight &w) {
    const int count = (w.inputs + 63) / 64, strips = (w.outputs + 15) / 16;
    w.unit_bytes = F::UNIT;
    w.super_bytes = F::SUPER;
    w.supers = (size_t)strips * count * F::UNIT;
    w.bytes.resize(w.supers + (size_t)strips * (count / 4) * F::SUPER);
    for (auto &byte : w.bytes) {
        byte = rng();
    }
    auto put = [&](size_t at, uint16_t half) { memcpy(&w.bytes[at], &half, 2); };
    for (size_t unit = 0; F::SUPER == 0 && unit < (size_t)strips * count; unit++) {
        const bool is_half = unit % count == size_t(count) - 1 && w.inputs % 64 > 0;
        if constexpr (F::FLOATS) {
            fill_floats<F>(&w.bytes[unit * F::UNIT], w.inputs, is_half);
            continue;
        }
        for (int i = 0; i < 4 * F::Kind::BYTES; i++) {
            put(unit * F::UNIT + F::SCALES + 2 * i, is_half && i % 2 == 1 ? 0 : small(w.inputs));
        }
    }
    for (size_t at = w.supers; at < w.bytes.size(); at += 2) {
        put(at, small(30 * w.inputs));
    }
}

inline Weight weight(int format, int warps, int outputs, int inputs, bool bias) {
    Weight w{format, warps, outputs, inputs, {}, {}, 0, 0, 0};
    switch (format) {
#define CASE(F, NUMBER)                                                                            \
    case NUMBER:                                                                                   \
        fill<F>(w);                                                                                \
        break;
        FOR_FORMATS(CASE)
#undef CASE
    }
    w.bias.resize(bias ? outputs : 0);
    return w;
}
