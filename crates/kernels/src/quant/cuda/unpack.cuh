// The layout of quantized weights on a GPU, and how tensor cores get them. device_tiles.rs writes it.
//
// A unit has 16 outputs by 64 inputs. Its quants lie in the order in which the threads of a warp hold the
// four fragments of mma.m16n8k16 (16 outputs by 16 inputs each): thread 4 g + p has outputs g and g + 8 and,
// of each 16 inputs, 4 p .. 4 p + 4. So every thread reads its part of a unit with one or two loads of 16
// bytes. A fragment's register j has two inputs, 4 p + j / 2 * 2 and the next one, of output g + j % 2 * 8.
//
// Units hold, in this order:
// - the low 4 bits of quants: 16 bytes per thread, 4 per fragment. Bits 4 j of the lower and of the upper
//   half word belong to register j. If quants are places in a table, byte j belongs to it. Or, with 8 bits, 16 bytes per
//   thread and two fragments. Quants of 4 and of 8 bits may be floats.
//   With 2 bits, as bits 5 and 6 below.
// - the fifth bit: 4 bytes per thread, bit 4 m + j of each half word for register j of fragment m; or bits 5
//   and 6: 8 bytes per thread, 4 per two fragments.
// - scales, 4, 8, 10 or 16 bytes per g: see the kinds of scales below.
// Units of one strip of 16 outputs follow each other, then the next strip. After all of them come the
// parts that four units of 256 inputs share.
#pragma once
#include "values.cuh"

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

// Powers of two for blocks of 32, as exponents plus 127 of a byte each: those of output g, then of output g + 8.
struct BlockExponents {
    static constexpr int BYTES = 4, SUPER = 0;
    static constexpr bool OFFSET = false, HALF_BLOCKS = false;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint32_t exponents = unit.load_4(at + BYTES * g);
        Scales scales;
        scales.set_blocks(0, power(exponents << 23), power(exponents << 15));
        scales.set_blocks(1, power(exponents << 7), power(exponents >> 1));
        return scales;
    }
    // The power whose exponent is where a float has it. 2^-127 has no exponent of its own.
    __device__ static __forceinline__ float power(uint32_t bits) {
        const uint32_t exponent = bits & 0x7f800000;
        return __uint_as_float(exponent == 0 ? 0x00400000 : exponent);
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

// A factor plus 32 for each block of 32, a byte each, of output g, then of output g + 8; 256 inputs share the half that it
// is multiplied with.
struct SuperScales {
    static constexpr int BYTES = 4, SUPER = 4;
    static constexpr bool OFFSET = false, HALF_BLOCKS = false;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint32_t factors = unit.load_4(at + BYTES * g), shared = unit.load_super_4(SUPER * g);
        Scales scales;
        scales.set_blocks(0, scale<0>(factors, low_half(shared)), scale<1>(factors, low_half(shared)));
        scales.set_blocks(1, scale<2>(factors, high_half(shared)), scale<3>(factors, high_half(shared)));
        return scales;
    }
    // As the last bits of a float from 2^23 on; see Factor. Products of 11 and 6 bits are exact.
    template <int I> __device__ static __forceinline__ float scale(uint32_t factors, float by) {
        const uint32_t factor = __byte_perm(factors, 0x4b000000, 0x7440 | I);
        return __fmul_rn(__fsub_rn(__uint_as_float(factor), 8388608.f + 32), by);
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

// Eighths of other scales, which have no offsets.
template <typename Whole> struct Eighths : Whole {
    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        Scales scales = Whole::read(unit, at, g);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            scales.scale[0][m] = __fmul_rn(scales.scale[0][m], 0.125f);
            scales.scale[1][m] = __fmul_rn(scales.scale[1][m], 0.125f);
        }
        return scales;
    }
};

// A byte for each 16 inputs of output g, then of g + 8, with a factor for the scale in its lower and one for the offset in its
// upper half; 256 inputs share the halves that they are multiplied with, as in SuperOffsets.
struct HalfBlockOffsets {
    static constexpr int BYTES = 8, SUPER = 8;
    static constexpr bool OFFSET = true, HALF_BLOCKS = true;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint2 factors = unit.load_8(at + BYTES * g);
        const uint2 shared = unit.load_super_8(SUPER * g);
        Scales scales;
        set(scales.scale[0], factors.x, low_half(shared.x));
        set(scales.scale[1], factors.y, low_half(shared.y));
        set(scales.offset[0], factors.x >> 4, -high_half(shared.x));
        set(scales.offset[1], factors.y >> 4, -high_half(shared.y));
        return scales;
    }
    // Products of 11 and 4 bits are exact.
    __device__ static __forceinline__ void set(float (&to)[FRAGMENTS], uint32_t factors, float half) {
        const Factor by(half);
        factors &= 0x0f0f0f0f;
        to[0] = by.times_byte<0>(factors);
        to[1] = by.times_byte<1>(factors);
        to[2] = by.times_byte<2>(factors);
        to[3] = by.times_byte<3>(factors);
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

// Floats of 8 bits (E4M3), which have no sign, for each 16 inputs of output g, then of output g + 8. After those of all
// outputs, 16 bytes begin with a float: 2^120 times the factor of all scales.
struct GroupScales {
    static constexpr int BYTES = 8 + 2, SUPER = 0;
    static constexpr bool OFFSET = false, HALF_BLOCKS = true;

    template <typename Unit> __device__ static __forceinline__ Scales read(const Unit &unit, int at, int g) {
        const uint2 floats = unit.load_8(at + 8 * g);
        const float factor = __uint_as_float(unit.load_4(at + 8 * 8));
        Scales scales;
        set<0>(scales.scale[0], floats.x, factor);
        set<0>(scales.scale[1], floats.y, factor);
        return scales;
    }
    // As bits of an f32, those of a float are 2^-120 times it, also below the smallest exponent.
    template <int M> __device__ static __forceinline__ void set(float (&scale)[FRAGMENTS], uint32_t floats, float factor) {
        constexpr int RIGHT = 8 * M - 20;
        const uint32_t bits = (RIGHT > 0 ? floats >> RIGHT : floats << -RIGHT) & 0x07f00000;
        scale[M] = __fmul_rn(__uint_as_float(bits), factor);
        if constexpr (M + 1 < FRAGMENTS) {
            set<M + 1>(scale, floats, factor);
        }
    }
};

// A format: quants of BITS bits, from which BIAS is subtracted if they are integers.
template <int BITS_, int BIAS_, typename Kind_, typename Values_ = Integers> struct Format {
    using Kind = Kind_;
    using Values = Values_;
    static constexpr int BITS = BITS_, BIAS = BIAS_;
    static constexpr bool FLOATS = std::is_same_v<Values, Floats>;
    static constexpr bool TABLE = !FLOATS && !std::is_same_v<Values, Integers>;
    static constexpr int HIGH = BITS == 8 ? 1024 : BITS == 2 ? 0 : 512;
    static constexpr int SCALES = HIGH + (BITS == 5 ? 128 : BITS == 6 || BITS == 2 ? 256 : 0);
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

// In bf16, integers of fewer than 8 bits stay in their base: they are 128 more than they are, and nothing is subtracted
// from them. What the sums of products then have too much is a multiple of the sums of activations, as an offset is.
template <typename F, typename T>
constexpr bool IN_BASE = std::is_same_v<T, bf16> && std::is_same_v<typename F::Values, Integers> && F::BITS < 8;
// Whether sums of activations are needed.
template <typename F, typename T> constexpr bool HAS_OFFSET = F::Kind::OFFSET || IN_BASE<F, T>;

// What the values of a unit are multiplied with besides their scale.
template <typename F, typename T>
constexpr float FLOATS_BY = !F::FLOATS || std::is_same_v<T, bf16> ? 1.f : F::BITS == 8 ? 256.f : 16384.f;

// x shifted to the right, or to the left by -places.
__device__ __forceinline__ constexpr uint32_t shifted(uint32_t x, int places) {
    return places >= 0 ? x >> places : x << -places;
}

// The two integers of register j of fragment m, whose low bits are in `low`. `high` has the bits above.
template <typename F, typename T>
__device__ __forceinline__ uint32_t integers_of_word(uint32_t low, uint32_t high, int m, int j) {
    constexpr uint32_t BASE = IN_BASE<F, T> ? 0x43004300 : Base<T>::BITS;
    if constexpr (F::BITS == 2) {
        const uint32_t in_base = and_or(high >> 2 * (m % 2 * 4 + j), 0x00030003, BASE);
        if constexpr (IN_BASE<F, T>) {
            return in_base;
        } else {
            return integers<T, F::BIAS>(in_base);
        }
    }
    const uint32_t numbers = low >> 8 * (j / 2);
    if constexpr (F::BITS == 4 && std::is_same_v<T, f16>) {
        if (j % 2 == 1) {
            return integers_of_16ths<f16, F::BIAS>(and_or(numbers, 0x00f000f0, BASE));
        }
    }
    uint32_t in_base = and_or(j % 2 ? numbers >> 4 : numbers, 0x000f000f, BASE);
    if constexpr (F::BITS == 5) {
        in_base = and_or(shifted(high, 4 * m + j - 4), 0x00100010, in_base);
    } else if constexpr (F::BITS == 6) {
        in_base = and_or(shifted(high, 2 * (m % 2 * 4 + j) - 4), 0x00300030, in_base);
    }
    if constexpr (IN_BASE<F, T>) {
        return in_base;
    } else {
        return integers<T, F::BIAS>(in_base);
    }
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
        uint4 low = make_uint4(0, 0, 0, 0);
        if constexpr (F::BITS > 2) {
            low = unit.load_16(16 * lane);
        }
        const uint32_t words[FRAGMENTS] = {low.x, low.y, low.z, low.w};
        uint2 high = make_uint2(0, 0);
        if constexpr (F::BITS == 5) {
            high.x = high.y = unit.load_4(F::HIGH + 4 * lane);
        } else if constexpr (F::BITS == 6 || F::BITS == 2) {
            high = unit.load_8(F::HIGH + 8 * lane);
        }
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            if constexpr (F::TABLE) {
                look_up<typename F::Values, T>(a[m], words[m]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    a[m][j] = F::FLOATS ? values_of_small_floats<T>(words[m] << (12 - 4 * j))
                                        : integers_of_word<F, T>(words[m], m < 2 ? high.x : high.y, m, j);
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
            scales.scale[0][m] = __fmul_rn(scales.scale[0][m], FLOATS_BY<F, T>);
            scales.scale[1][m] = __fmul_rn(scales.scale[1][m], FLOATS_BY<F, T>);
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
