// Quants as values for tensor cores: exactly, in pairs, of which a word has one in each half word.
#pragma once
#include "../../cuda/tensor.cuh"

// What quants are: integers, floats with a sign and an exponent of 4 bits of 8 (E4M3) or of 2 bits of 4 (E2M1), or places
// in a table of integers.
struct Integers {};
struct Floats {};
struct Iq4Values {
    __device__ static constexpr int at(int place) {
        constexpr int VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return VALUES[place];
    }
};

// Magnitudes, then their negatives.
template <int... MAGNITUDES> struct SignedValues {
    __device__ static constexpr int at(int place) {
        constexpr int VALUES[8] = {MAGNITUDES...};
        return place < 8 ? VALUES[place] : -VALUES[place - 8];
    }
};

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

// Floats are finite. Their bits without the sign, as the last bits of the exponent and the first bits of the fraction of an
// f16 or bf16, are a power of two times the value, also below the smallest exponent. The power of f16 is left to the
// scales (FLOATS_BY). That of bf16, BY, is so small that products would lose bits in f32.
template <uint32_t BY> __device__ __forceinline__ uint32_t times(uint32_t pair) {
#ifdef __CUDACC__
    // BY * x - 0, which keeps the signs of zeros.
    uint32_t values;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(pair), "r"(BY | BY << 16), "r"(0x80008000u));
    return values;
#else
    auto value = [](uint32_t half) { return __uint_as_float(half << 16) * __uint_as_float(BY << 16); };
    return narrow_pair<bf16>(value(pair & 0xffff), value(pair >> 16));
#endif
}

// The values of the two lower or of the two upper bytes of a word, over FLOATS_BY.
template <typename T> __device__ __forceinline__ uint32_t values_of_floats(uint32_t word, bool upper) {
    // The upper bytes of half words.
    const uint32_t floats = __byte_perm(word, 0, upper ? 0x3424 : 0x1404);
    const uint32_t signs = floats & 0x80008000;
    if constexpr (std::is_same_v<T, f16>) {
        return and_or(floats >> 1, 0x3f803f80, signs);
    } else {
        // 2^120
        return times<0x7b80>(and_or(floats >> 4, 0x07f007f0, signs));
    }
}
// The same of the upper four bits of half words.
template <typename T> __device__ __forceinline__ uint32_t values_of_small_floats(uint32_t floats) {
    if constexpr (std::is_same_v<T, f16>) {
        return and_or(floats, 0x80008000, floats >> 3 & 0x0e000e00);
    } else {
        // 2^126
        return times<0x7e80>(and_or(floats, 0x80008000, floats >> 6 & 0x01c001c0));
    }
}

// An integer as T, of which FRACTION bits are a fraction, if it has no more bits than that.
template <typename T> __device__ constexpr uint32_t bits_of(int value) {
    constexpr int FRACTION = std::is_same_v<T, f16> ? 10 : 7, EXPONENT_OF_1 = std::is_same_v<T, f16> ? 15 : 127;
    const uint32_t size = value < 0 ? -value : value;
    int exponent = 0;
    while (size >> exponent > 1) {
        exponent++;
    }
    const uint32_t bits = ((exponent + EXPONENT_OF_1 - 1) << FRACTION) + (size << (FRACTION - exponent));
    return (value < 0 ? 0x8000 : 0) | (size == 0 ? 0 : bits);
}
// Byte BYTE of four values of a table, as T.
template <typename Table, typename T, int BYTE> __device__ constexpr uint32_t bytes_of_four(int first) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++) {
        bytes |= (bits_of<T>(Table::at(first + i)) >> 8 * BYTE & 255) << 8 * i;
    }
    return bytes;
}
// Byte BYTE of the values at four places, whose lower three bits are `places` in 4 bits each; `halves` selects, for each, a
// byte of the first or of the second of two words by the fourth bit.
template <typename Table, typename T, int BYTE>
__device__ __forceinline__ uint32_t bytes_at(uint32_t places, uint32_t halves) {
    constexpr uint32_t FIRST = bytes_of_four<Table, T, BYTE>(0), SECOND = bytes_of_four<Table, T, BYTE>(4);
    constexpr uint32_t THIRD = bytes_of_four<Table, T, BYTE>(8), FOURTH = bytes_of_four<Table, T, BYTE>(12);
    return __byte_perm(__byte_perm(FIRST, SECOND, places), __byte_perm(THIRD, FOURTH, places), halves);
}
// The values at the places of a word.
template <typename Table, typename T> __device__ __forceinline__ void look_up(uint32_t (&values)[4], uint32_t word) {
    const uint32_t places = word & 0x77777777, halves = and_or(word >> 1, 0x44444444, 0x32103210);
#pragma unroll
    for (int two = 0; two < 2; two++) {
        const uint32_t low = bytes_at<Table, T, 0>(places >> 16 * two, halves >> 16 * two);
        const uint32_t high = bytes_at<Table, T, 1>(places >> 16 * two, halves >> 16 * two);
        values[2 * two] = __byte_perm(low, high, 0x5140);
        values[2 * two + 1] = __byte_perm(low, high, 0x7362);
    }
}
