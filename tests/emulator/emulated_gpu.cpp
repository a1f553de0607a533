// Tests of the emulated GPU itself: graphs, and bugs of callers that it must detect.
#include "gpu.h"
#include <cstdio>
#include <cstdlib>
#include <future>
#include <sys/wait.h>
#include <unistd.h>

struct Module;
struct Function;
struct Exec;
API CUresult cuInit(unsigned);
API CUresult cuCtxSetCurrent(void *);
API CUresult cuDevicePrimaryCtxRetain(void **, int);
API CUresult cuDevicePrimaryCtxRelease_v2(int);
API CUresult cuMemAlloc_v2(uint64_t *, size_t);
API CUresult cuMemAllocAsync(uint64_t *, size_t, void *);
API CUresult cuMemFreeAsync(uint64_t, void *);
API CUresult cuMemcpyHtoDAsync_v2(uint64_t, const void *, size_t, void *);
API CUresult cuMemcpyDtoHAsync_v2(void *, uint64_t, size_t, void *);
API CUresult cuMemsetD8Async(uint64_t, unsigned char, size_t, void *);
API CUresult cuModuleLoadData(Module **, const char *);
API CUresult cuModuleGetFunction(Function **, Module *, const char *);
API CUresult cuLaunchKernel(Function *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                            void **, void **);
API CUresult cuLaunchKernelEx(const gpu::LaunchConfig *, Function *, void **, void **);
API CUresult cuStreamCreate(void **, unsigned);
API CUresult cuStreamSynchronize(void *);
API CUresult cuStreamBeginCapture_v2(void *, int);
API CUresult cuStreamEndCapture(void *, gpu::Graph **);
API CUresult cuGraphInstantiateWithFlags(Exec **, gpu::Graph *, unsigned long long);
API CUresult cuGraphLaunch(Exec *, void *);

namespace {

int failures = 0;

void check(bool condition, const char *what) {
    if (!condition) {
        failures++;
        printf("not so: %s\n", what);
    }
}

void *context, *stream, *other;
Function *sum, *tables;
constexpr size_t COUNT = 10, BYTES = COUNT * sizeof(float);

uint64_t memory() {
    uint64_t pointer;
    cuMemAllocAsync(&pointer, BYTES, stream);
    return pointer;
}

CUresult add(uint64_t a, uint64_t b, uint64_t to, unsigned blocks = 1) {
    size_t count = COUNT, dims = 1;
    uint64_t info = 0;
    void *parameters[] = {&count, &dims, &info, &a, &b, &to};
    return cuLaunchKernel(sum, blocks, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr);
}

// A kernel that writes nothing, with the name of that whose writes are read early.
void write_tables(const uint32_t *, int) {}

CUresult launch_tables() {
    uint64_t words = 0;
    int table = 0;
    void *parameters[] = {&words, &table};
    return cuLaunchKernel(tables, 1, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr);
}

// As `add`, but it may start before the previous kernel has ended.
CUresult add_early(uint64_t a, uint64_t b, uint64_t to) {
    size_t count = COUNT, dims = 1;
    uint64_t info = 0;
    void *parameters[] = {&count, &dims, &info, &a, &b, &to};
    const gpu::LaunchAttribute overlap = {gpu::LaunchAttribute::OVERLAP, 0, {1}};
    const gpu::LaunchConfig config = {{1, 1, 1}, {32, 1, 1}, 0, stream, &overlap, 1};
    return cuLaunchKernelEx(&config, sum, parameters, nullptr);
}

// to = host + b + b, with the host's values at the time of each launch.
void test_graph() {
    float values[COUNT], result[COUNT];
    std::fill_n(values, COUNT, 2.f);
    uint64_t a = memory(), b = memory(), to = memory();
    cuMemcpyHtoDAsync_v2(b, values, BYTES, stream);
    cuStreamBeginCapture_v2(stream, 1);
    uint64_t between = memory();
    cuMemcpyHtoDAsync_v2(a, values, BYTES, stream);
    check(add(a, b, between) == 0 && add(between, b, to) == 0, "launches are recorded");
    check(cuMemFreeAsync(between, stream) == 0, "a graph frees what it has allocated");
    check(cuMemFreeAsync(a, stream) == CUDA_ERROR_INVALID_VALUE, "and nothing else");
    gpu::Graph *graph;
    Exec *exec;
    check(cuStreamEndCapture(stream, &graph) == 0 && cuGraphInstantiateWithFlags(&exec, graph, 0) == 0, "a graph");
    for (float first : {5.f, 7.f}) {
        values[0] = first;
        cuGraphLaunch(exec, stream);
        cuMemcpyDtoHAsync_v2(result, to, BYTES, stream);
        check(result[0] == first + 4 && result[9] == 6, "a launch reads the host's memory anew");
    }
    cuStreamBeginCapture_v2(stream, 1);
    uint64_t pointer;
    check(cuMemAlloc_v2(&pointer, 1) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "no waiting while a stream is captured");
    check(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "which spoils the capture");
}

void test_errors() {
    uint64_t a = memory();
    check(add(a, a, a, 0) == CUDA_ERROR_INVALID_VALUE, "a launch has a block");
    check(cuMemAllocAsync(&a, gpu::MEMORY + 1, stream) == CUDA_ERROR_OUT_OF_MEMORY, "memory ends");
    cuCtxSetCurrent(nullptr);
    check(cuMemAllocAsync(&a, 1, stream) == CUDA_ERROR_INVALID_CONTEXT, "a thread needs a context");
    cuCtxSetCurrent(context);
}

template <typename F> void test_ends(const char *what, F bug) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        freopen("/dev/null", "w", stderr);
        bug();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status), what);
}

} // namespace

int main() {
    setenv("FORETOKEN_EMULATED_GPUS", "2", 1);
    cuInit(0);
    // Kept, but owned by nobody: what the process owns when it ends is a test's.
    cuDevicePrimaryCtxRetain(&context, 0);
    cuDevicePrimaryCtxRelease_v2(0);
    cuCtxSetCurrent(context);
    cuStreamCreate(&stream, 0);
    cuStreamCreate(&other, 0);
    Module *module;
    cuModuleLoadData(&module, "");
    cuModuleGetFunction(&sum, module, "badd_f32");
    gpu::add(gpu::READ_EARLY, write_tables);
    cuModuleGetFunction(&tables, module, gpu::READ_EARLY);
    test_graph();
    test_errors();
    static float values[COUNT + 4];
    auto at = [](uint64_t pointer) { return reinterpret_cast<float *>(pointer); };
    test_ends("writing behind an allocation is found", [&] {
        uint64_t a = memory();
        at(a)[COUNT] = 0;
        cuMemFreeAsync(a, stream);
    });
    test_ends("reading far behind one is found", [&] { values[0] = at(memory())[COUNT + 2]; });
    test_ends("copying too much is found", [&] { cuMemcpyHtoDAsync_v2(memory(), values, BYTES + 4, stream); });
    test_ends("a pointer to nothing is found", [&] {
        uint64_t a = memory();
        cuMemFreeAsync(a, stream);
        add(a, a, a);
    });
    test_ends("a race of streams is found", [&] {
        uint64_t a = memory();
        cuMemsetD8Async(a, 0, BYTES, other);
        add(a, a, memory());
    });
    test_ends("a kernel that may read tables before they are written is found", [&] {
        uint64_t a = memory();
        launch_tables();
        cuMemFreeAsync(memory(), stream);
        add_early(a, a, a);
    });
    uint64_t late = memory();
    check(launch_tables() == 0 && add(late, late, late) == 0, "a kernel that starts later may read them");
    check(add_early(late, late, late) == 0, "and so may those after it, whenever they start");
    void *second;
    check(cuDevicePrimaryCtxRetain(&second, 2) == CUDA_ERROR_INVALID_DEVICE, "there are two devices");
    auto of_second = [&] {
        void *its;
        cuDevicePrimaryCtxRetain(&second, 1);
        cuCtxSetCurrent(second);
        cuStreamCreate(&its, 0);
        return its;
    };
    test_ends("memory that is freed on a stream of another device is found", [&] {
        uint64_t a = memory();
        cuMemFreeAsync(a, of_second());
    });
    test_ends("work with memory of another device is found", [&] {
        uint64_t a = memory();
        cuMemsetD8Async(a, 0, BYTES, of_second());
    });
    test_ends("a process that ends before a thread that uses the device is found", [&] {
        std::promise<void> uses;
        std::thread thread([&] {
            cuDevicePrimaryCtxRetain(&context, 0);
            cuCtxSetCurrent(context);
            uses.set_value();
            pause();
        });
        uses.get_future().wait();
        exit(0);
    });
    cuDevicePrimaryCtxRetain(&context, 0);
    check(cuDevicePrimaryCtxRelease_v2(0) == 0, "a context is released");
    check(cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT, "and only once");
    uint64_t a = memory();
    cuMemsetD8Async(a, 0, BYTES, other);
    cuStreamSynchronize(other);
    check(add(a, a, memory()) == 0, "who waits may go on");
    printf("%d failures\n", failures);
    return failures;
}
