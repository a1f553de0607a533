// The candle kernels that our forwards need, with candle's names and parameters. A tensor that is not
// contiguous is described by `info`: its dimensions, then its strides.
#include "cuda/common.cuh"
#include "gpu.h"
#include <cmath>
#include <type_traits>

namespace {

template <typename T> constexpr bool is_short = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;

// Converts values to types that C++ computes with, and back.
template <typename T> auto number(T x) {
    if constexpr (is_short<T>) {
        return widen(x);
    } else {
        return x;
    }
}
template <typename T, typename V> T value(V x) {
    if constexpr (is_short<T>) {
        return narrow<T>(float(x));
    } else {
        return T(x);
    }
}

template <typename F> void for_each(size_t count, F work) {
    const size_t threads = (size_t)blockDim.x * gridDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
        work(i);
    }
}

// The index in memory of element i, counted in the order of the dimensions.
size_t place(size_t i, size_t dims, const size_t *sizes, const size_t *strides) {
    size_t at = 0;
    for (size_t d = dims; d-- > 0; i /= sizes[d]) {
        at += i % sizes[d] * strides[d];
    }
    return at;
}
size_t place(size_t i, size_t dims, const size_t *info) { return info ? place(i, dims, info, info + dims) : i; }

template <typename From, typename To>
void cast(size_t count, size_t dims, const size_t *info, const From *from, To *to) {
    for_each(count, [&](size_t i) { to[i] = value<To>(number(from[place(i, dims, info)])); });
}

template <typename T> void const_set(size_t count, size_t dims, const size_t *info, T value, T *to) {
    for_each(count, [&](size_t i) { to[place(i, dims, info)] = value; });
}

template <typename T>
void copy2d(const T *from, T *to, uint32_t rows, uint32_t width, uint32_t from_stride, uint32_t to_stride) {
    for_each((size_t)rows * width, [&](size_t i) {
        size_t row = i / width, column = i % width;
        to[row * to_stride + column] = from[row * from_stride + column];
    });
}

template <typename T>
void affine(size_t count, size_t dims, const size_t *info, const T *from, T *to, T factor, T summand) {
    for_each(count, [&](size_t i) {
        T product = value<T>(number(from[place(i, dims, info)]) * number(factor));
        to[i] = value<T>(number(product) + number(summand));
    });
}

template <typename T, typename Op, typename To = T>
void binary(size_t count, size_t dims, const size_t *info, const T *a, const T *b, To *to) {
    for_each(count, [&](size_t i) {
        size_t at_a = info ? place(i, dims, info, info + dims) : i;
        size_t at_b = info ? place(i, dims, info, info + 2 * dims) : i;
        to[i] = value<To>(Op()(number(a[at_a]), number(b[at_b])));
    });
}

struct Minimum {
    template <typename N> N operator()(N a, N b) { return a < b ? a : b; }
};

template <typename T, typename Op> void unary(size_t count, size_t dims, const size_t *info, const T *from, T *to) {
    for_each(count, [&](size_t i) { to[i] = value<T>(Op()(number(from[place(i, dims, info)]))); });
}

// What activations and soft caps consist of.
struct Tanh {
    float operator()(float x) { return std::tanh(x); }
};
struct Exp {
    float operator()(float x) { return std::exp(x); }
};
struct Sqr {
    float operator()(float x) { return x * x; }
};

template <typename T>
void where(size_t count, size_t dims, const size_t *info, const uint8_t *condition, const T *yes, const T *no,
           T *to) {
    for_each(count, [&](size_t i) {
        const bool is = condition[place(i, dims, info, info + dims)];
        to[i] = is ? yes[place(i, dims, info, info + 2 * dims)] : no[place(i, dims, info, info + 3 * dims)];
    });
}

uint32_t checked(uint32_t id, size_t size, const char *kernel) {
    if (id >= size) {
        gpu::fault("%s: id %u of %zu", kernel, id, size);
    }
    return id;
}

// Selects by ids from the middle one of three dimensions; ids are contiguous.
template <typename T>
void index_select(size_t count, size_t, const size_t *, const uint32_t *ids, const T *from, T *to, size_t,
                  size_t size, size_t chosen, size_t right) {
    for_each(count, [&](size_t i) {
        uint32_t id = checked(ids[i / right % chosen], size, "index_select");
        to[i] = from[(i / (chosen * right) * size + id) * right + i % right];
    });
}

template <typename T>
void scatter(const uint32_t *ids, const T *from, T *to, size_t left, size_t chosen, size_t size, size_t right) {
    for_each(left * right, [&](size_t i) {
        for (size_t j = 0; j < chosen; j++) {
            size_t at = (i / right * chosen + j) * right + i % right;
            uint32_t id = checked(ids[at], size, "scatter");
            to[(i / right * size + id) * right + i % right] = from[at];
        }
    });
}

template <typename T> void add_for(const std::string &type) {
    gpu::add("ucopy_" + type, cast<T, T>);
    gpu::add("cast_" + type + "_f32", cast<T, float>);
    gpu::add("cast_" + type + "_f16", cast<T, f16>);
    gpu::add("cast_" + type + "_bf16", cast<T, bf16>);
    gpu::add("cast_" + type + "_f64", cast<T, double>);
    gpu::add("cast_" + type + "_u32", cast<T, uint32_t>);
    gpu::add("const_set_" + type, const_set<T>);
    gpu::add("copy2d_" + type, copy2d<T>);
    gpu::add("affine_" + type, affine<T>);
    gpu::add("badd_" + type, binary<T, std::plus<>>);
    gpu::add("bsub_" + type, binary<T, std::minus<>>);
    gpu::add("bmul_" + type, binary<T, std::multiplies<>>);
    gpu::add("bdiv_" + type, binary<T, std::divides<>>);
    gpu::add("is_u32_" + type, index_select<T>);
    gpu::add("s_u32_" + type, scatter<T>);
}

template <typename T> void add_floats(const std::string &type) {
    gpu::add("utanh_" + type, unary<T, Tanh>);
    gpu::add("uexp_" + type, unary<T, Exp>);
    gpu::add("usqr_" + type, unary<T, Sqr>);
    gpu::add("bminimum_" + type, binary<T, Minimum>);
    gpu::add("gt_" + type, binary<T, std::greater<>, uint8_t>);
    gpu::add("where_u8_" + type, where<T>);
}

[[maybe_unused]] const bool added = [] {
    add_floats<float>("f32");
    add_floats<f16>("f16");
    add_floats<bf16>("bf16");
    add_for<float>("f32");
    add_for<f16>("f16");
    add_for<bf16>("bf16");
    add_for<uint32_t>("u32");
    return true;
}();

} // namespace
