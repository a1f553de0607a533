// cuBLAS and cuRAND of the emulated GPU: the product that candle calls, and random numbers.
#include "cuda/common.cuh"
#include "gpu.h"
#include <random>

using namespace gpu;
using Lock = std::lock_guard<std::recursive_mutex>;

namespace {

// cuBLAS's status codes.
enum Status { SUCCESS = 0, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
constexpr int COMPUTE_32F = 68;

struct Handle {
    int device = current_device();
    void *stream = nullptr;
    int pointer_mode = 0;
};

struct Generator {
    void *stream = nullptr;
    std::mt19937_64 noise;
};

// A matrix in cuBLAS's layout, column by column.
struct Matrix {
    const char *at;
    Type type;
    size_t rows, columns, lead, stride;
    // Whether the operation uses its transpose.
    bool turned;

    size_t size() const { return type == F32 ? 4 : 2; }
    size_t bytes(int batch) const { return ((columns - 1) * lead + rows + (batch - 1) * stride) * size(); }

    // The values of the matrix, or of its transpose if `turned`, row by row.
    std::vector<float> read(int batch) const {
        std::vector<float> values(rows * columns);
        for (size_t c = 0; c < columns; c++) {
            for (size_t r = 0; r < rows; r++) {
                size_t i = batch * stride + c * lead + r;
                values[turned ? c * rows + r : r * columns + c] =
                    type == F32   ? reinterpret_cast<const float *>(at)[i]
                    : type == F16 ? widen(reinterpret_cast<const f16 *>(at)[i])
                                  : widen(reinterpret_cast<const bf16 *>(at)[i]);
            }
        }
        return values;
    }

    void write(int batch, size_t row, size_t column, float value) const {
        size_t i = batch * stride + column * lead + row;
        char *to = const_cast<char *>(at);
        switch (type) {
        case F32:
            reinterpret_cast<float *>(to)[i] = value;
            break;
        case F16:
            reinterpret_cast<f16 *>(to)[i] = narrow<f16>(value);
            break;
        case BF16:
            reinterpret_cast<bf16 *>(to)[i] = narrow<bf16>(value);
        }
    }
};

void multiply(const Matrix &a, const Matrix &b, const Matrix &c, int batch, size_t inner, float alpha) {
    auto left = a.read(batch), right = b.read(batch);
    std::vector<float> sums(c.columns);
    for (size_t row = 0; row < c.rows; row++) {
        std::fill(sums.begin(), sums.end(), 0.f);
        for (size_t i = 0; i < inner; i++) {
            const float factor = left[row * inner + i], *values = &right[i * c.columns];
            for (size_t column = 0; column < c.columns; column++) {
                sums[column] += factor * values[column];
            }
        }
        for (size_t column = 0; column < c.columns; column++) {
            c.write(batch, row, column, alpha * sums[column]);
        }
    }
}

} // namespace

API Status cublasCreate_v2(Handle **handle) {
    *handle = new Handle;
    return SUCCESS;
}
API Status cublasDestroy_v2(Handle *handle) {
    delete handle;
    return SUCCESS;
}
API Status cublasSetStream_v2(Handle *handle, void *stream) {
    handle->stream = stream;
    return SUCCESS;
}

API Status cublasGemmStridedBatchedEx(Handle *handle, int turn_a, int turn_b, int m, int n, int k, const float *alpha,
                                      const char *a, Type type_a, int lda, long long stride_a, const char *b,
                                      Type type_b, int ldb, long long stride_b, const float *beta, char *c,
                                      Type type_c, int ldc, long long stride_c, int batches, int compute, int) {
    Lock lock(mutex);
    if (handle->device != current_device()) {
        fault("cuBLAS of device %d is called while device %d is current", handle->device, current_device());
    }
    if (compute != COMPUTE_32F || *beta != 0 || turn_a > 1 || turn_b > 1 || m < 1 || n < 1 || k < 1) {
        fprintf(stderr, "emulated GPU: no such product of cuBLAS\n");
        return NOT_SUPPORTED;
    }
    auto matrix = [](const char *at, Type type, int rows, int columns, int lead, long long stride, int turn) {
        return turn ? Matrix{at, type, size_t(columns), size_t(rows), size_t(lead), size_t(stride), true}
                    : Matrix{at, type, size_t(rows), size_t(columns), size_t(lead), size_t(stride), false};
    };
    const Matrix left = matrix(a, type_a, m, k, lda, stride_a, turn_a);
    const Matrix right = matrix(b, type_b, k, n, ldb, stride_b, turn_b);
    const Matrix out = matrix(c, type_c, m, n, ldc, stride_c, 0);
    CUresult result = submit(handle->stream, [=, alpha = *alpha](Stream &on) {
        doing = "cublasGemmStridedBatchedEx";
        use(on, left.at, left.bytes(batches), false);
        use(on, right.at, right.bytes(batches), false);
        use(on, out.at, out.bytes(batches), true);
        for (int batch = 0; batch < batches; batch++) {
            multiply(left, right, out, batch, k, alpha);
        }
        return CUDA_SUCCESS;
    });
    return result == CUDA_SUCCESS ? SUCCESS : EXECUTION_FAILED;
}

API int curandCreateGenerator(Generator **generator, int) {
    *generator = new Generator;
    return 0;
}
API int curandDestroyGenerator(Generator *generator) {
    delete generator;
    return 0;
}
API int curandSetStream(Generator *generator, void *stream) {
    generator->stream = stream;
    return 0;
}
API int curandSetPseudoRandomGeneratorSeed(Generator *generator, unsigned long long seed) {
    generator->noise.seed(seed);
    return 0;
}

template <typename D> static int generate(Generator *generator, float *to, size_t count, D distribution) {
    Lock lock(mutex);
    return submit(generator->stream, [=](Stream &on) mutable {
        doing = "cuRAND";
        use(on, to, count * sizeof(float), true);
        std::generate_n(to, count, [&] { return distribution(generator->noise); });
        return CUDA_SUCCESS;
    });
}
API int curandGenerateUniform(Generator *generator, float *to, size_t count) {
    return generate(generator, to, count, std::uniform_real_distribution<float>());
}
API int curandGenerateNormal(Generator *generator, float *to, size_t count, float mean, float deviation) {
    return generate(generator, to, count, std::normal_distribution<float>(mean, deviation));
}

// Needed for linking only, as at the end of driver.cpp.
API Status cublasDgemmStridedBatched() { return NOT_SUPPORTED; }
API int curandGenerateNormalDouble() { return EXECUTION_FAILED; }
