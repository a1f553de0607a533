// The CUDA driver API of the emulated GPU: the device, memory, modules and launches. Functions that are
// not called here are missing.
#include "gpu.h"
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

using namespace gpu;
using Lock = std::lock_guard<std::recursive_mutex>;

namespace {

struct Function {
    int device;
    std::string name;
    // Dynamic shared memory that was asked for.
    int shared = 0;
};

struct Module {
    int device;
    std::string image;
    std::map<std::string, Function> functions;
};

// Dynamic shared memory that a launch may use without asking. A GPU has 48 KiB for it and for what a kernel declares, of which
// nothing is known here.
constexpr int UNASKED = 32 << 10;

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
    *left = MEMORY - memory_in_use(current_device());
    return has_context() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    Lock lock(mutex);
    if (!has_context()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return bytes ? allocate(current_device(), pointer, bytes) : CUDA_ERROR_INVALID_VALUE;
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
    if (!has_context()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (bytes == 0) {
        // Some drivers do not accept this.
        return CUDA_ERROR_INVALID_VALUE;
    }
    Stream &stream = stream_of(handle);
    if (!stream.capture) {
        return allocate(stream.device, pointer, bytes);
    }
    if (CUresult error = allocate(stream.device, pointer, bytes, true)) {
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

// The host always gets freed memory back.
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
// Between devices, in the order of a stream of one of them.
API CUresult cuMemcpyPeerAsync(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t bytes,
                               void *handle) {
    Lock lock(mutex);
    const int target = device_of(to_context), source = device_of(from_context);
    const int own = stream_of(handle).device;
    if (!exists(target) || !exists(source) || (own != target && own != source)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    counts().copies += !is_recorded(handle);
    return submit(handle, [=](Stream &on) {
        doing = "a copy between devices";
        auto read = reinterpret_cast<const void *>(from);
        auto written = reinterpret_cast<void *>(to);
        use_of(source, on, read, bytes, false);
        use_of(target, on, written, bytes, true);
        memmove(written, read, bytes);
        return CUDA_SUCCESS;
    });
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
    if (!has_context()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    *module = new Module{current_device(), image, {}};
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
    *function = &module->functions.try_emplace(name, Function{module->device, name}).first->second;
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

// `blocks` = those of a cluster, in the second dimension; `overlaps` = it may start before the previous kernel has ended.
static CUresult launch(Function *function, const unsigned (&sizes)[3], const unsigned (&threads)[3], unsigned shared,
                       unsigned blocks, bool overlaps, void *stream, void **parameters) {
    Lock lock(mutex);
    if (!has_context()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (function->device != current_device() || stream_of(stream).device != current_device()) {
        fault("kernel %s of device %d is launched on a stream of device %d, while device %d is current",
              function->name.c_str(), function->device, stream_of(stream).device, current_device());
    }
    auto kernel = kernels().find(function->name);
    if (kernel == kernels().end() || threads[1] != 1 || threads[2] != 1) {
        fprintf(stderr, "emulated GPU: no emulation of kernel %s\n", function->name.c_str());
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto &[x, y, z] = sizes;
    bool fits = x > 0 && y > 0 && z > 0 && x < 1u << 31 && y < 1 << 16 && z < 1 << 16;
    fits = fits && threads[0] > 0 && threads[0] <= 1024 && blocks > 0 && blocks <= emulator::MAX_CLUSTER && y % blocks == 0;
    if (!fits || shared > unsigned(std::max(function->shared, UNASKED))) {
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
        const auto apart = std::exchange(on.apart, std::thread::id());
        if (name == READ_EARLY) {
            on.apart = std::this_thread::get_id();
        } else if (overlaps && apart == std::this_thread::get_id()) {
            fault("kernel %s may start before the writes of %s are visible", name.c_str(), READ_EARLY);
        }
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
    return launch(function, {x, y, z}, {threads, threads_y, threads_z}, shared, 1, false, stream, parameters);
}

// Kernels run one after the other, whatever their attributes allow.
API CUresult cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **parameters, void **) {
    unsigned blocks = 1;
    bool overlaps = false;
    for (unsigned i = 0; i < config->count; i++) {
        const LaunchAttribute &attribute = config->attributes[i];
        if (attribute.id == LaunchAttribute::OVERLAP) {
            overlaps = attribute.value[0] != 0;
        }
        if (attribute.id == LaunchAttribute::CLUSTER) {
            if (attribute.value[0] != 1 || attribute.value[2] != 1) {
                return CUDA_ERROR_NOT_SUPPORTED;
            }
            blocks = attribute.value[1];
        }
    }
    return launch(function, config->grid, config->block, config->shared, blocks, overlaps, config->stream, parameters);
}

// Binaries that are linked to the CUDA libraries do not start without these; candle calls none of them
// here.
API CUresult cuProfilerStart() { return CUDA_SUCCESS; }
API CUresult cuProfilerStop() { return CUDA_SUCCESS; }
API CUresult cuCtxDestroy_v2() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuModuleLoad() { return CUDA_ERROR_NOT_SUPPORTED; }
