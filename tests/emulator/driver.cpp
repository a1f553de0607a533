// The CUDA driver API of the emulated GPU: the device, memory, modules and launches. Functions that are
// not called here are missing.
#include "gpu.h"
#include <atomic>
#include <csignal>
#include <cstdio>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

using namespace gpu;
using Lock = std::lock_guard<std::recursive_mutex>;

namespace {

// One device with one context, which each thread must make current.
int device_context;
thread_local void *context;
// Owners of the context, and threads that have made it current and have not ended.
std::atomic<int> owners, users;

struct User {
    User() { users++; }
    ~User() { users--; }
};

// Few, so that a block of a kernel that takes each once has several parts of small models to compute.
constexpr int MULTIPROCESSORS = 6;

struct Module {
    std::string image;
};

struct Function {
    std::string name;
    // Dynamic shared memory that a launch may use.
    int shared = 48 << 10;
};

// Handles reads and writes outside of any memory.
void on_fault(int signal, siginfo_t *info, void *) {
    std::signal(signal, SIG_DFL);
    fprintf(stderr, "emulated GPU: no memory at %p, used by %s", info->si_addr, doing.c_str());
    if (kernels().count(doing)) {
        fprintf(stderr, " in thread %d of block (%d, %d, %d)", threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z);
    }
    fprintf(stderr, "\n");
    raise(signal);
}

// Copies that the host waits for, or that use pageable host memory.
CUresult copy(void *stream, const char *what, void *to, const void *from, size_t bytes, bool from_device,
              bool to_device) {
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    counts().copies += !is_recorded(stream);
    counts().waits += !is_recorded(stream) && !to_device;
    return submit(stream, [=](Stream &on) {
        doing = what;
        if (from_device) {
            use(on, from, bytes, false);
        }
        if (to_device) {
            use(on, to, bytes, true);
        }
        memmove(to, from, bytes);
        if (!to_device) {
            // A copy to pageable memory is complete when the call returns.
            on.finished = on.submitted;
        }
        return CUDA_SUCCESS;
    });
}

template <typename T> CUresult set(void *stream, uint64_t pointer, T value, size_t count) {
    if (count == 0) {
        return CUDA_SUCCESS;
    }
    return submit(stream, [=](Stream &on) {
        doing = "memset";
        auto at = reinterpret_cast<T *>(pointer);
        use(on, at, count * sizeof(T), true);
        constexpr uint64_t PAGE = 1 << 16;
        uint64_t first = (pointer + PAGE - 1) / PAGE * PAGE, end = (pointer + count * sizeof(T)) / PAGE * PAGE;
        if (value == 0 && first < end) {
            // Lets the system provide whole pages of zeros, which costs nothing.
            madvise(reinterpret_cast<void *>(first), end - first, MADV_DONTNEED);
        }
        for (size_t i = 0; i < count; i++) {
            if (at[i] != value) {
                at[i] = value;
            }
        }
        return CUDA_SUCCESS;
    });
}

} // namespace

API CUresult cuInit(unsigned) {
    Lock lock(mutex);
    static bool ready = false;
    if (!std::exchange(ready, true)) {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
        fprintf(stderr, "emulated GPU: %zu kernels, %zu MiB\n", kernels().size(), MEMORY >> 20);
    }
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(int *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDeviceGetName(char *name, int length, int) {
    snprintf(name, length, "emulated GPU");
    return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = MEMORY;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 1: // threads per block
        *value = 1024;
        break;
    case 10: // threads per warp
        *value = 32;
        break;
    case 16: // multiprocessors
        *value = MULTIPROCESSORS;
        break;
    case 75: // compute capability
        *value = 9;
        break;
    case 95: // cooperative launches
        *value = 1;
        break;
    case 97: // maximum dynamic shared memory
        *value = emulator::MAX_SHARED;
        break;
    case 115: // memory pools
        *value = 1;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(void **result, int) {
    *result = &device_context;
    owners++;
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(int) {
    if (owners == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    owners--;
    return CUDA_SUCCESS;
}

// The process ends, and the thread that ends it no longer counts. A driver is torn down now, and another thread that uses
// it crashes if it happens to be late: here always. What owns the context for ever, as candle's cache of parameters does,
// uses nothing if no such thread is left.
__attribute__((destructor)) static void tear_down() {
    if (owners > 0 && users > 0) {
        fault("the process ends, and %d threads may still use the device", users.load());
    }
}
API CUresult cuCtxSetCurrent(void *current) {
    thread_local User user;
    context = current;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(void **current) {
    *current = context;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(int, const char **text) {
    *text = "an error of the emulated GPU";
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(int error, const char **text) {
    static auto &texts = *new std::map<int, std::string>;
    Lock lock(mutex);
    *text = (texts[error] = "error " + std::to_string(error) + " of the emulated GPU").c_str();
    return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *left, size_t *total) {
    Lock lock(mutex);
    *total = MEMORY;
    *left = MEMORY - memory_in_use();
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    Lock lock(mutex);
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return bytes ? allocate(pointer, bytes) : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemFree_v2(uint64_t pointer) {
    Lock lock(mutex);
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    doing = "cuMemFree";
    finish_all();
    return pointer ? release(stream_of(nullptr), pointer) : CUDA_SUCCESS;
}

API CUresult cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *handle) {
    Lock lock(mutex);
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (bytes == 0) {
        // Some drivers do not accept this.
        return CUDA_ERROR_INVALID_VALUE;
    }
    Stream &stream = stream_of(handle);
    if (!stream.capture) {
        return allocate(pointer, bytes);
    }
    if (CUresult error = allocate(pointer, bytes, true)) {
        return error;
    }
    stream.capture->places.push_back(*pointer);
    return submit(handle, [place = *pointer](Stream &) { return restore(place); });
}
API CUresult cuMemFreeAsync(uint64_t pointer, void *handle) {
    Lock lock(mutex);
    if (Graph *graph = stream_of(handle).capture) {
        // A graph may free only what it has allocated.
        auto &places = graph->places;
        if (std::find(places.begin(), places.end(), pointer) == places.end()) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return submit(handle, [=](Stream &on) {
        doing = "cuMemFreeAsync";
        return release(on, pointer);
    });
}

// There is one pool, whose freed memory the host always gets back.
API CUresult cuDeviceGetDefaultMemPool(void **pool, int) {
    *pool = &device_context;
    return CUDA_SUCCESS;
}
API CUresult cuMemPoolSetAttribute(void *, int attribute, void *) {
    constexpr int RELEASE_THRESHOLD = 4;
    return attribute == RELEASE_THRESHOLD ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Memory of the host that kernels can read has another address for them, behind which they cannot write, and ends at a
// page without access rights.
namespace {
struct Mapped {
    size_t bytes;
    unsigned char *device;
};
std::map<void *, Mapped> &mapped = *new std::map<void *, Mapped>;

// So much is locked at most.
constexpr size_t LOCKABLE = size_t(128) << 20;

size_t whole_pages(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

CUresult map_for_kernels(void **pointer, size_t bytes) {
    size_t locked = bytes, size = whole_pages(bytes);
    for (auto &[_, one] : mapped) {
        locked += one.bytes;
    }
    int file = memfd_create("host memory", 0);
    if (locked > LOCKABLE || file < 0 || ftruncate(file, size)) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    void *host = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void *device = mmap(nullptr, size + whole_pages(1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED || device == MAP_FAILED ||
        mmap(device, size, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    close(file);
    mapped[host] = {bytes, static_cast<unsigned char *>(device)};
    *pointer = host;
    return CUDA_SUCCESS;
}
} // namespace

API CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    constexpr unsigned DEVICEMAP = 2;
    Lock lock(mutex);
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (flags & DEVICEMAP) {
        return map_for_kernels(pointer, bytes);
    }
    *pointer = malloc(bytes);
    return CUDA_SUCCESS;
}
API CUresult cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned) {
    Lock lock(mutex);
    auto at = mapped.find(host);
    if (at == mapped.end()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *device = reinterpret_cast<uint64_t>(at->second.device);
    return CUDA_SUCCESS;
}
API CUresult cuMemFreeHost(void *pointer) {
    Lock lock(mutex);
    auto at = mapped.find(pointer);
    if (at == mapped.end()) {
        free(pointer);
        return CUDA_SUCCESS;
    }
    size_t size = whole_pages(at->second.bytes);
    munmap(pointer, size);
    munmap(at->second.device, size + whole_pages(1));
    mapped.erase(at);
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    Lock lock(mutex);
    return copy(stream, "a copy from the host", reinterpret_cast<void *>(to), from, bytes, false, true);
}
API CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    Lock lock(mutex);
    return copy(stream, "a copy to the host", to, reinterpret_cast<void *>(from), bytes, true, false);
}
API CUresult cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    Lock lock(mutex);
    return copy(stream, "a copy", reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes, true, true);
}
API CUresult cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void *stream) {
    Lock lock(mutex);
    return set<uint8_t>(stream, to, value, count);
}
API CUresult cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream) {
    Lock lock(mutex);
    return set<uint32_t>(stream, to, value, count);
}

// Calls without a stream wait for all work of all streams.
template <typename F> static CUresult waited(F call) {
    Lock lock(mutex);
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    finish_all();
    CUresult result = call();
    finish_all();
    return result;
}
API CUresult cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    return waited([=] { return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr); });
}
API CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    return waited([=] { return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr); });
}
API CUresult cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
    return waited([=] { return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr); });
}
API CUresult cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) {
    return waited([=] { return cuMemsetD8Async(to, value, count, nullptr); });
}

API CUresult cuModuleLoadData(Module **module, const char *image) {
    Lock lock(mutex);
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    *module = new Module{image};
    return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(Module *module) {
    delete module;
    return CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(Function **function, Module *module, const char *name) {
    Lock lock(mutex);
    // If there is PTX, it must contain the function; the stand-in compiler produces none.
    const std::string &image = module->image;
    if (image.find(".entry ") != std::string::npos &&
        image.find(".entry " + std::string(name) + "(") == std::string::npos) {
        return CUDA_ERROR_NOT_FOUND;
    }
    static auto &functions = *new std::map<std::string, Function>;
    *function = &functions.try_emplace(name, Function{name}).first->second;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(Function *function, int attribute, int value) {
    Lock lock(mutex);
    if (attribute == 8) {
        if (value < 0 || size_t(value) > emulator::MAX_SHARED) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        function->shared = value;
    }
    return CUDA_SUCCESS;
}

// `blocks` = those of a cluster, in the second dimension.
static CUresult launch(Function *function, const unsigned (&sizes)[3], const unsigned (&threads)[3], unsigned shared,
                       unsigned blocks, void *stream, void **parameters) {
    Lock lock(mutex);
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    auto kernel = kernels().find(function->name);
    if (kernel == kernels().end() || threads[1] != 1 || threads[2] != 1) {
        fprintf(stderr, "emulated GPU: no emulation of kernel %s\n", function->name.c_str());
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto &[x, y, z] = sizes;
    bool fits = x > 0 && y > 0 && z > 0 && x < 1u << 31 && y < 1 << 16 && z < 1 << 16;
    fits = fits && threads[0] > 0 && threads[0] <= 1024 && blocks > 0 && blocks <= emulator::MAX_CLUSTER && y % blocks == 0;
    if (!fits || shared > unsigned(std::max(function->shared, 48 << 10))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call = kernel->second(parameters);
    if (call.phases > 1 && size_t(x) * y * z > MULTIPROCESSORS) {
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    }
    Dim grid{int(x), int(y), int(z)};
    counts().kernels += !is_recorded(stream);
    return submit(stream, [=, name = function->name, count = threads[0]](Stream &on) {
        doing = name;
        for (auto pointer : call.pointers) {
            if (pointer.at) {
                use(on, pointer.at, 0, pointer.writes);
            }
        }
        for (emulator::phase = 0; emulator::phase < call.phases; emulator::phase++) {
            emulator::launch(grid, count, call.thread, shared, blocks);
        }
        return CUDA_SUCCESS;
    });
}
API CUresult cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                            unsigned threads_z, unsigned shared, void *stream, void **parameters, void **) {
    return launch(function, {x, y, z}, {threads, threads_y, threads_z}, shared, 1, stream, parameters);
}

struct LaunchAttribute {
    unsigned id, pad, value[16];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned count;
};
// Kernels run one after the other, whatever their attributes allow.
API CUresult cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **parameters, void **) {
    unsigned blocks = 1;
    for (unsigned i = 0; i < config->count; i++) {
        const LaunchAttribute &attribute = config->attributes[i];
        if (attribute.id == 4) { // size of clusters
            if (attribute.value[0] != 1 || attribute.value[2] != 1) {
                return CUDA_ERROR_NOT_SUPPORTED;
            }
            blocks = attribute.value[1];
        }
    }
    return launch(function, config->grid, config->block, config->shared, blocks, config->stream, parameters);
}

// Binaries that are linked to the CUDA libraries do not start without these; candle calls none of them
// here.
API CUresult cuProfilerStart() { return CUDA_SUCCESS; }
API CUresult cuProfilerStop() { return CUDA_SUCCESS; }
API CUresult cuCtxDestroy_v2() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuMemcpyPeerAsync() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuModuleLoad() { return CUDA_ERROR_NOT_SUPPORTED; }
