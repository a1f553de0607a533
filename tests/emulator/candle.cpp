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
struct Sigmoid {
    float operator()(float x) { return 1.f / (1.f + std::exp(-x)); }
};
struct Tanh {
    float operator()(float x) { return std::tanh(x); }
};
struct Exp {
    float operator()(float x) { return std::exp(x); }
};
struct Sqr {
    float operator()(float x) { return x * x; }
};
struct Relu {
    float operator()(float x) { return std::max(x, 0.f); }
};
struct Gelu {
    float operator()(float x) { return 0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
};
struct GeluErf {
    float operator()(float x) { return x * std::erfc(-x * 0.70710678f) / 2; }
};

// What training needs besides.
struct Neg {
    float operator()(float x) { return -x; }
};
struct Recip {
    float operator()(float x) { return 1.f / x; }
};
struct Log {
    float operator()(float x) { return std::log(x); }
};
struct Sqrt {
    float operator()(float x) { return std::sqrt(x); }
};
struct Silu {
    float operator()(float x) { return x / (1.f + std::exp(-x)); }
};
struct Abs {
    float operator()(float x) { return std::fabs(x); }
};
struct Maximum {
    template <typename N> N operator()(N a, N b) { return a > b ? a : b; }
};

// Reduces `span` elements each, of `count` in all, to one. The last dimensions are reduced. The first thread of
// a block does its work.
template <typename T, typename Op>
void reduce(size_t count, size_t span, size_t dims, const size_t *info, const T *from, T *to) {
    if (threadIdx.x == 0 && (blockIdx.x + 1) * span <= count) {
        const size_t first = blockIdx.x * span;
        float all = number(from[place(first, dims, info)]);
        for (size_t i = first + 1; i < first + span; i++) {
            all = Op()(all, float(number(from[place(i, dims, info)])));
        }
        to[blockIdx.x] = value<T>(all);
    }
}

// The place of the largest element among those that are reduced.
template <typename T>
void argmax(size_t count, size_t span, size_t dims, const size_t *info, const T *from, uint32_t *to) {
    if (threadIdx.x == 0 && (blockIdx.x + 1) * span <= count) {
        size_t best = blockIdx.x * span;
        for (size_t i = best + 1; i < (blockIdx.x + 1) * span; i++) {
            best = number(from[place(i, dims, info)]) > number(from[place(best, dims, info)]) ? i : best;
        }
        to[blockIdx.x] = best - blockIdx.x * span;
    }
}

// The same sums of a few elements, one of `sums` a thread.
template <typename T>
void reduce_few(size_t sums, size_t span, size_t dims, const size_t *info, const T *from, T *to) {
    for_each(sums, [&](size_t sum) {
        float all = 0;
        for (size_t i = 0; i < span; i++) {
            all += number(from[place(sum * span + i, dims, info)]);
        }
        to[sum] = value<T>(all);
    });
}

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

// From the middle one of three dimensions, another element for each place; and the opposite, which adds. An id
// beyond all others stands for nothing.
template <typename T>
void gather(size_t count, const uint32_t *ids, const T *from, T *to, size_t, size_t size, size_t chosen, size_t right) {
    for_each(count, [&](size_t i) {
        const size_t left = i / (right * chosen);
        to[i] = ids[i] == UINT32_MAX ? value<T>(0)
                                     : from[(left * size + checked(ids[i], size, "gather")) * right + i % right];
    });
}
template <typename T>
void scatter_add(const uint32_t *ids, const T *from, T *to, size_t left, size_t chosen, size_t size, size_t right) {
    for_each(left * right, [&](size_t i) {
        for (size_t j = 0; j < chosen; j++) {
            const size_t at = (i / right * chosen + j) * right + i % right;
            if (ids[at] != UINT32_MAX) {
                T &sum = to[(i / right * size + checked(ids[at], size, "scatter_add")) * right + i % right];
                sum = value<T>(number(sum) + number(from[at]));
            }
        }
    });
}
// Adds whole rows.
template <typename T>
void index_add(const uint32_t *ids, size_t chosen, const T *from, T *to, size_t left, size_t, size_t size, size_t right) {
    for_each(left * right, [&](size_t i) {
        for (size_t j = 0; j < chosen; j++) {
            T &sum = to[(i / right * size + checked(ids[j], size, "index_add")) * right + i % right];
            sum = value<T>(number(sum) + number(from[(i / right * chosen + j) * right + i % right]));
        }
    });
}

template <typename T> void add_for_training(const std::string &type) {
    gpu::add("uneg_" + type, unary<T, Neg>);
    gpu::add("urecip_" + type, unary<T, Recip>);
    gpu::add("ulog_" + type, unary<T, Log>);
    gpu::add("usqrt_" + type, unary<T, Sqrt>);
    gpu::add("usilu_" + type, unary<T, Silu>);
    gpu::add("uabs_" + type, unary<T, Abs>);
    gpu::add("bmaximum_" + type, binary<T, Maximum>);
    gpu::add("fast_sum_" + type, reduce<T, std::plus<>>);
    gpu::add("fast_max_" + type, reduce<T, Maximum>);
    gpu::add("fast_argmax_" + type, argmax<T>);
    gpu::add("fast_sum_small_" + type, reduce_few<T>);
    gpu::add("gather_u32_" + type, gather<T>);
    gpu::add("sa_u32_" + type, scatter_add<T>);
    gpu::add("ia_u32_" + type, index_add<T>);
}

template <typename T> void add_comparisons(const std::string &type) {
    gpu::add("eq_" + type, binary<T, std::equal_to<>, uint8_t>);
    gpu::add("ne_" + type, binary<T, std::not_equal_to<>, uint8_t>);
    gpu::add("lt_" + type, binary<T, std::less<>, uint8_t>);
    gpu::add("le_" + type, binary<T, std::less_equal<>, uint8_t>);
    gpu::add("ge_" + type, binary<T, std::greater_equal<>, uint8_t>);
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
    gpu::add("usigmoid_" + type, unary<T, Sigmoid>);
    gpu::add("uexp_" + type, unary<T, Exp>);
    gpu::add("usqr_" + type, unary<T, Sqr>);
    gpu::add("urelu_" + type, unary<T, Relu>);
    gpu::add("ugelu_" + type, unary<T, Gelu>);
    gpu::add("ugelu_erf_" + type, unary<T, GeluErf>);
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
    add_for_training<float>("f32");
    add_comparisons<float>("f32");
    add_comparisons<uint32_t>("u32");
    gpu::add("cast_u8_f32", cast<uint8_t, float>);
    return true;
}();

} // namespace
