// The layout of quantized weights on a GPU, and how tensor cores get them. device_tiles.rs writes it.
//
// A unit has 16 outputs by 64 inputs. Its quants lie in the order in which the threads of a warp hold the
// four fragments of mma.m16n8k16 (16 outputs by 16 inputs each): thread 4 g + p has outputs g and g + 8 and,
// of each 16 inputs, 4 p .. 4 p + 4. So every thread reads its part of a unit with one or two loads of 16
// bytes. A fragment's register j has two inputs, 4 p + j / 2 * 2 and the next one, of output g + j % 2 * 8.
//
// Units hold, in this order:
// - the low 4 bits of quants: 16 bytes per thread, 4 per fragment. Bits 4 j of the lower and of the upper
//   half word belong to register j. Or, with 8 bits, 16 bytes per thread and two fragments; those may be floats.
// - the fifth bit: 4 bytes per thread, bit 4 m + j of each half word for register j of fragment m; or bits 5
//   and 6: 8 bytes per thread, 4 per two fragments.
// - scales, 8 or 16 bytes per g: see the kinds of scales below.
// Units of one strip of 16 outputs follow each other, then the next strip. After all of them come the
// parts that four units of 256 inputs share.
#pragma once
#include "../../cuda/tensor.cuh"

constexpr int OUTPUTS = 16;
constexpr int UNIT_INPUTS = 64;
constexpr int FRAGMENTS = 4;

// A unit and what it shares with others, in shared and in global memory.
struct SharedUnit {
    SharedAddress at, super;

    __device__ __forceinline__ uint4 load_16(int i) const { return load_shared_16(at + i); }
    __device__ __forceinline__ uint2 load_8(int i) const { return load_shared_8(at + i); }
    __device__ __forceinline__ uint32_t load_4(int i) const { return load_shared_4(at + i); }
    __device__ __forceinline__ uint2 load_super_8(int i) const { return load_shared_8(super + i); }
    __device__ __forceinline__ uint32_t load_super_4(int i) const { return load_shared_4(super + i); }
};
struct GlobalUnit {
    const unsigned char *at, *super;

    __device__ __forceinline__ uint4 load_16(int i) const { return *reinterpret_cast<const uint4 *>(at + i); }
    __device__ __forceinline__ uint2 load_8(int i) const { return *reinterpret_cast<const uint2 *>(at + i); }
    __device__ __forceinline__ uint32_t load_4(int i) const { return *reinterpret_cast<const uint32_t *>(at + i); }
    __device__ __forceinline__ uint2 load_super_8(int i) const { return *reinterpret_cast<const uint2 *>(super + i); }
    __device__ __forceinline__ uint32_t load_super_4(int i) const {
        return *reinterpret_cast<const uint32_t *>(super + i);
    }
};

// What the two outputs of a thread have in a unit, for each 16 inputs.
struct Scales {
    float scale[2][FRAGMENTS], offset[2][FRAGMENTS];

    __device__ __forceinline__ void set_blocks(int output, float first, float second) {
        scale[output][0] = scale[output][1] = first;
        scale[output][2] = scale[output][3] = second;
    }
    __device__ __forceinline__ void set_offsets(int output, float first, float second) {
        offset[output][0] = offset[output][1] = first;
        offset[output][2] = offset[output][3] = second;
    }
};

__device__ __forceinline__ float low_half(uint32_t halves) {
    f16 half;
    memcpy(&half, &halves, sizeof half);
    return widen(half);
}
__device__ __forceinline__ float high_half(uint32_t halves) { return low_half(halves >> 16); }

// A factor, and byte I of a word times it. With the byte, 2^23 is multiplied and then subtracted: a float from there on
// has the byte as its last bits, and units that convert integers are slow. Exact for factors of up to 16 bits.
struct Factor {
    float by, minus;

    __device__ __forceinline__ explicit Factor(float by) : by(by), minus(__fmul_rn(by, -8388608.f)) {}
    template <int I> __device__ __forceinline__ float times_byte(uint32_t bytes) const {
        return fmaf(by, __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 | I)), minus);
    }
};

// Halves for blocks of 32: those of output g, then of output g + 8.
struct BlockScales {
    static constexpr int BYTES = 8, SUPER = 0;
    static constexpr bool OFFSET = false, HALF_BLOCKS = false;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint2 halves = unit.load_8(at + BYTES * g);
        Scales scales;
        scales.set_blocks(0, low_half(halves.x), high_half(halves.x));
        scales.set_blocks(1, low_half(halves.y), high_half(halves.y));
        return scales;
    }
};

// The same, then offsets.
struct BlockOffsets {
    static constexpr int BYTES = 16, SUPER = 0;
    static constexpr bool OFFSET = true, HALF_BLOCKS = false;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint4 halves = unit.load_16(at + BYTES * g);
        Scales scales;
        scales.set_blocks(0, low_half(halves.x), high_half(halves.x));
        scales.set_blocks(1, low_half(halves.y), high_half(halves.y));
        scales.set_offsets(0, low_half(halves.z), high_half(halves.z));
        scales.set_offsets(1, low_half(halves.w), high_half(halves.w));
        return scales;
    }
};

// Two factors for the scale, two for the offset, a byte each, for output g, then g + 8; 256 inputs share
// the halves that they are multiplied with, which lie in the same order.
struct SuperOffsets {
    static constexpr int BYTES = 8, SUPER = 8;
    static constexpr bool OFFSET = true, HALF_BLOCKS = false;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint2 factors = unit.load_8(at + BYTES * g);
        const uint2 shared = unit.load_super_8(SUPER * g);
        Scales scales;
        set(scales, 0, factors.x, shared.x);
        set(scales, 1, factors.y, shared.y);
        return scales;
    }
    // Products of 11 and 6 bits are exact.
    __device__ static __forceinline__ void set(Scales &scales, int o, uint32_t factors, uint32_t shared) {
        const Factor d(low_half(shared)), m(-high_half(shared));
        scales.set_blocks(o, d.times_byte<0>(factors), d.times_byte<1>(factors));
        scales.set_offsets(o, m.times_byte<2>(factors), m.times_byte<3>(factors));
    }
};

// A signed byte for each 16 inputs of output g, then of g + 8; 256 inputs share the half that it is
// multiplied with.
struct HalfBlockScales {
    static constexpr int BYTES = 8, SUPER = 4;
    static constexpr bool OFFSET = false, HALF_BLOCKS = true;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint2 factors = unit.load_8(at + BYTES * g);
        const uint32_t shared = unit.load_super_4(SUPER * g);
        Scales scales;
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            scales.scale[0][m] = __fmul_rn(low_half(shared), (float)(signed char)(factors.x >> 8 * m & 255));
            scales.scale[1][m] = __fmul_rn(high_half(shared), (float)(signed char)(factors.y >> 8 * m & 255));
        }
        return scales;
    }
};

// A float for each 64 inputs: that of output g, then of output g + 8.
struct UnitScales {
    static constexpr int BYTES = 8, SUPER = 0;
    static constexpr bool OFFSET = false, HALF_BLOCKS = false;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint2 floats = unit.load_8(at + BYTES * g);
        Scales scales;
        scales.set_blocks(0, __uint_as_float(floats.x), __uint_as_float(floats.x));
        scales.set_blocks(1, __uint_as_float(floats.y), __uint_as_float(floats.y));
        return scales;
    }
};

// A format: quants of BITS bits, from which BIAS is subtracted; or floats of 8 bits with 4 of an exponent (E4M3).
template <int BITS_, int BIAS_, typename Kind_, bool FLOATS_ = false> struct Format {
    using Kind = Kind_;
    static constexpr int BITS = BITS_, BIAS = BIAS_;
    static constexpr bool FLOATS = FLOATS_;
    static constexpr int HIGH = BITS == 8 ? 1024 : 512;
    static constexpr int SCALES = HIGH + (BITS == 5 ? 128 : BITS == 6 ? 256 : 0);
    // Bytes of a unit, and of what four units share.
    static constexpr int UNIT = SCALES + 8 * Kind::BYTES;
    static constexpr int SUPER = 8 * Kind::SUPER;
};

// Where the parts of a weight are.
template <typename F> struct Units {
    const unsigned char *units, *supers;
    int count;

    __device__ __forceinline__ Units(const unsigned char *w, int outputs, int inputs, int strip) {
        count = (inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
        const size_t strips = (outputs + OUTPUTS - 1) / OUTPUTS;
        units = w + (size_t)strip * count * F::UNIT;
        supers = w + strips * count * F::UNIT + (size_t)strip * (count / 4) * F::SUPER;
    }
    // Goes to the next strip.
    __device__ __forceinline__ void advance() {
        units += count * F::UNIT;
        supers += count / 4 * F::SUPER;
    }
    __device__ __forceinline__ const unsigned char *unit(int i) const { return units + (size_t)i * F::UNIT; }
    __device__ __forceinline__ const unsigned char *super(int i) const { return supers + (size_t)(i >> 2) * F::SUPER; }
};

// Numbers are unpacked as values of T, exactly, in pairs: a word has one in each half word. In bf16, numbers of fewer
// than 8 bits stay in their base: they are 128 more than they are, and nothing is subtracted from them. What the sums
// of products then have too much is a multiple of the sums of activations, as an offset is.
template <typename F, typename T> constexpr bool IN_BASE = std::is_same_v<T, bf16> && F::BITS < 8;
// Whether sums of activations are needed.
template <typename F, typename T> constexpr bool HAS_OFFSET = F::Kind::OFFSET || IN_BASE<F, T>;

// (a & b) | c
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDACC__
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return (a & b) | c;
#endif
}
// Numbers become values when they are put into the lowest bits of these words: in f16, 1024 + n for n < 1024
// has the bits of 1024 and n; in bf16, 128 + n for n < 128.
template <typename T> struct Base;
// The values of numbers in a base, minus BIAS.
template <typename T, int BIAS> __device__ __forceinline__ uint32_t integers(uint32_t in_base);
// The same for numbers that are four bits higher, which bf16 has no room for.
template <typename T, int BIAS> __device__ __forceinline__ uint32_t integers_of_16ths(uint32_t in_base);
// The values of the two lower or of the two upper bytes of a word, minus BIAS.
template <typename T, int BIAS> __device__ __forceinline__ uint32_t integers_of_bytes(uint32_t word, bool upper);

#ifdef __CUDACC__
template <> struct Base<f16> {
    static constexpr uint32_t BITS = 0x64006400;
    static __device__ __forceinline__ uint32_t minus(uint32_t numbers, uint32_t base) {
        uint32_t difference;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(numbers), "r"(base));
        return difference;
    }
};
template <> struct Base<bf16> {
    static constexpr uint32_t BITS = 0x43004300;
    // 1 * n - base: before compute capability 9.0 there is no subtraction.
    static __device__ __forceinline__ uint32_t minus(uint32_t numbers, uint32_t base) {
        uint32_t difference;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(difference)
            : "r"(numbers), "r"(0x3f803f80u), "r"(base ^ 0x80008000u));
        return difference;
    }
};
template <typename T, int BIAS> __device__ __forceinline__ uint32_t integers(uint32_t in_base) {
    return Base<T>::minus(in_base, Base<T>::BITS | BIAS | BIAS << 16);
}
template <typename T, int BIAS> __device__ __forceinline__ uint32_t integers_of_16ths(uint32_t in_base) {
    static_assert(std::is_same_v<T, f16>, "no room");
    // (1024 + 16 n) / 16 - (64 + BIAS): 0x2c00 is 1/16, and 0xd400 is -64, whose last bit is worth 1/16.
    constexpr uint32_t MINUS = 0xd400 + 16 * BIAS;
    uint32_t difference;
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(difference)
        : "r"(in_base), "r"(0x2c002c00u), "r"(MINUS | MINUS << 16));
    return difference;
}
template <typename T, int BIAS> __device__ __forceinline__ uint32_t integers_of_bytes(uint32_t word, bool upper) {
    if constexpr (std::is_same_v<T, f16>) {
        const uint32_t numbers = __byte_perm(word, 0x64, upper ? 0x4342 : 0x4140);
        return Base<f16>::minus(numbers, Base<f16>::BITS | BIAS | BIAS << 16);
    } else {
        // As the last bits of floats from 2^23 on, because bf16 has no room for them.
        const uint32_t first = __byte_perm(word, 0x4b000000, upper ? 0x7552 : 0x7550);
        const uint32_t second = __byte_perm(word, 0x4b000000, upper ? 0x7553 : 0x7551);
        constexpr float BASE = 8388608.f + BIAS;
        return narrow_pair<T>(__fsub_rn(__uint_as_float(first), BASE), __fsub_rn(__uint_as_float(second), BASE));
    }
}
#else
template <typename T> struct Base {
    static constexpr uint32_t BITS = 0;
};
template <typename T, int BIAS> uint32_t integers(uint32_t in_base) {
    return narrow_pair<T>(float(int(in_base & 0xffff) - BIAS), float(int(in_base >> 16) - BIAS));
}
template <typename T, int BIAS> uint32_t integers_of_16ths(uint32_t in_base) { return integers<T, BIAS>(in_base >> 4); }
template <typename T, int BIAS> uint32_t integers_of_bytes(uint32_t word, bool upper) {
    word >>= upper ? 16 : 0;
    return narrow_pair<T>(float(int(word & 255) - BIAS), float(int(word >> 8 & 255) - BIAS));
}
#endif

// What the floats of a unit are multiplied with besides their scale.
template <typename T> constexpr float FLOATS_BY = std::is_same_v<T, f16> ? 256.f : 1.f;

// The values of the two lower or of the two upper bytes of a word, which are finite floats (E4M3), over FLOATS_BY. Their bits
// without the sign, as those of an f16 or bf16, are a power of two times the value, also below the smallest exponent. That
// of f16 is left to the scales. That of bf16 is so small that products would lose bits in f32.
template <typename T> __device__ __forceinline__ uint32_t values_of_floats(uint32_t word, bool upper) {
    // The upper bytes of half words.
    const uint32_t floats = __byte_perm(word, 0, upper ? 0x3424 : 0x1404);
    const uint32_t signs = floats & 0x80008000;
    if constexpr (std::is_same_v<T, f16>) {
        return and_or(floats >> 1, 0x3f803f80, signs);
    } else {
        const uint32_t small = and_or(floats >> 4, 0x07f007f0, signs);
#ifdef __CUDACC__
        // 2^120 * x - 0, which keeps the signs of zeros.
        uint32_t values;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(small), "r"(0x7b807b80u), "r"(0x80008000u));
        return values;
#else
        auto value = [](uint32_t half) { return __uint_as_float(half << 16) * 0x1p120f; };
        return narrow_pair<T>(value(small & 0xffff), value(small >> 16));
#endif
    }
}

// x shifted to the right, or to the left by -places.
__device__ __forceinline__ constexpr uint32_t shifted(uint32_t x, int places) {
    return places >= 0 ? x >> places : x << -places;
}

// The quants of a unit as a thread's fragments.
template <typename F, typename T, typename Unit>
__device__ __forceinline__ void unpack(uint32_t (&a)[FRAGMENTS][4], const Unit &unit, int lane) {
    if constexpr (F::BITS == 8) {
#pragma unroll
        for (int two = 0; two < FRAGMENTS / 2; two++) {
            const uint4 bytes = unit.load_16(512 * two + 16 * lane);
            const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if constexpr (F::FLOATS) {
                    a[2 * two + i / 4][i % 4] = values_of_floats<T>(words[i / 2], i % 2);
                } else {
                    a[2 * two + i / 4][i % 4] = integers_of_bytes<T, F::BIAS>(words[i / 2], i % 2);
                }
            }
        }
    } else {
        const uint4 low = unit.load_16(16 * lane);
        const uint32_t words[FRAGMENTS] = {low.x, low.y, low.z, low.w};
        uint2 high = make_uint2(0, 0);
        if constexpr (F::BITS == 5) {
            high.x = unit.load_4(F::HIGH + 4 * lane);
        } else if constexpr (F::BITS == 6) {
            high = unit.load_8(F::HIGH + 8 * lane);
        }
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                constexpr uint32_t BASE = IN_BASE<F, T> ? 0x43004300 : Base<T>::BITS;
                const uint32_t numbers = words[m] >> 8 * (j / 2);
                if (F::BITS == 4 && std::is_same_v<T, f16> && j % 2 == 1) {
                    a[m][j] = integers_of_16ths<f16, F::BIAS>(and_or(numbers, 0x00f000f0, BASE));
                    continue;
                }
                uint32_t in_base = and_or(j % 2 ? numbers >> 4 : numbers, 0x000f000f, BASE);
                if constexpr (F::BITS == 5) {
                    in_base = and_or(shifted(high.x, 4 * m + j - 4), 0x00100010, in_base);
                } else if constexpr (F::BITS == 6) {
                    const int places = 2 * (m % 2 * 4 + j) - 4;
                    in_base = and_or(shifted(m < 2 ? high.x : high.y, places), 0x00300030, in_base);
                }
                if constexpr (IN_BASE<F, T>) {
                    a[m][j] = in_base;
                } else {
                    a[m][j] = integers<T, F::BIAS>(in_base);
                }
            }
        }
    }
}

// The scales for what `unpack` returns.
template <typename F, typename T, typename Unit> __device__ __forceinline__ Scales read_scales(const Unit &unit, int g) {
    Scales scales = F::Kind::read(unit, F::SCALES, g);
    if constexpr (F::FLOATS) {
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            scales.scale[0][m] = __fmul_rn(scales.scale[0][m], FLOATS_BY<T>);
            scales.scale[1][m] = __fmul_rn(scales.scale[1][m], FLOATS_BY<T>);
        }
    }
    if constexpr (IN_BASE<F, T>) {
        constexpr float TOO_MUCH = 128 + F::BIAS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int m = 0; m < FRAGMENTS; m++) {
                scales.offset[i][m] = fmaf(-TOO_MUCH, scales.scale[i][m], F::Kind::OFFSET ? scales.offset[i][m] : 0.f);
            }
        }
    }
    return scales;
}
