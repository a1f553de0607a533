// The emulated GPU: the interface between its parts. Its memory is host memory, and work runs when it is
// submitted. The emulator records which work would still be pending on a real GPU, to find code that
// relies on it.
#pragma once
#include "emulator.h"
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

// Error codes of the driver API.
enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
};

// Marks functions that the libraries export.
#define API extern "C" __attribute__((visibility("default")))

namespace gpu {

// The devices, FORETOKEN_EMULATED_GPUS of them or one: each has memory, streams, modules and a context of its own.
constexpr int MAX_DEVICES = 8;
int device_count();
// The device of the context that this thread has made current; the first one if it has none.
int current_device();
bool has_context();
bool exists(int device);
// The device of a context.
int device_of(const void *context);
// Few, so that a block of a kernel that takes each once has several parts of small models to compute.
constexpr int MULTIPROCESSORS = 6;

// Locked by every call.
extern std::recursive_mutex &mutex;

// Reports a bug of the caller that a real GPU might silently ignore, and ends the program.
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The current operation, for messages.
extern std::string &doing;
constexpr const char *HOST = "the host";

struct Graph;

// Streams run one after the other here, but a GPU guarantees an order only where one waits for another.
struct Stream {
    int number = 0, device = 0;
    // Number of pieces of work submitted, and of those that the host or a stream has waited for.
    long submitted = 0, finished = 0;
    // During capture: the graph, the mode, the capturing thread, and whether a call invalidated it.
    Graph *capture = nullptr;
    int mode = 0;
    std::thread::id capturer;
    bool spoiled = false;
    // The host thread that launched the last kernel, if that is one whose writes are read early: see READ_EARLY.
    std::thread::id apart;
};

// The stream of a handle; each host thread has its own default stream of each device, of which it gets that of the current
// one.
Stream &stream_of(void *handle);
// Whether work of the stream is recorded instead of run.
inline bool is_recorded(void *handle) { return stream_of(handle).capture != nullptr; }
// Waits for all work of all streams of the current device.
void finish_all();

using Work = std::function<CUresult(Stream &)>;
// Runs the work, or records it during capture.
CUresult submit(void *stream, const Work &work);

// Recorded work.
struct Graph {
    std::vector<Work> nodes;
    // The addresses of allocations by nodes, which stay the same for all launches.
    std::vector<uint64_t> places;
};
// Whether a call that waits or allocates immediately is not allowed now; if so, it invalidates the
// capture.
bool waiting_spoils_capture();

// What a host thread has asked for so far, for tests: how often it waited, and the copies, launches of kernels and launches
// of graphs that it submitted and did not record.
struct Counts {
    long waits = 0, copies = 0, kernels = 0, graphs = 0;
};
Counts &counts();

// Memory, by device pointers, which are host addresses.
// A reserved address has no memory until it is restored, and stays reserved when the memory is released.
CUresult allocate(int device, uint64_t *pointer, size_t bytes, bool reserved = false);
CUresult restore(uint64_t pointer);
CUresult release(Stream &stream, uint64_t pointer);
// Ends the reservation of an address; memory that is there becomes an ordinary allocation.
void discard(uint64_t pointer);
size_t memory_in_use(int device);
// Of each device.
constexpr size_t MEMORY = size_t(4) << 30;
// Records that work of a stream reads or writes at least `bytes` bytes of `device` from `pointer` on.
void use_of(int device, Stream &stream, const void *pointer, size_t bytes, bool writes);
// The same, of the device of the stream: there is no access to the memory of peers.
inline void use(Stream &stream, const void *pointer, size_t bytes, bool writes) {
    use_of(stream.device, stream, pointer, bytes, writes);
}

// A launch: the function of each thread, the pointers among its arguments, and the number of phases between which its
// blocks wait for one another.
struct Call {
    struct Pointer {
        const void *at;
        bool writes;
    };
    std::function<void()> thread;
    std::vector<Pointer> pointers;
    int phases = 1;
};
// The kernel that writes tables, which other kernels read before they wait for the previous one. So after it, a launch must
// not say that it may start before the previous kernel has ended.
constexpr const char *READ_EARLY = "write_words";

// How kernels are launched with attributes.
struct LaunchAttribute {
    static constexpr unsigned CLUSTER = 4, OVERLAP = 6;
    unsigned id, pad, value[16];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned count;
};

using Kernel = std::function<Call(void **parameters)>;
std::map<std::string, Kernel> &kernels();

template <typename T> void note(std::vector<Call::Pointer> &, T) {}
template <typename T> void note(std::vector<Call::Pointer> &pointers, T *at) {
    pointers.push_back({at, !std::is_const_v<T>});
}

// Registers a kernel with the types of its parameters.
template <typename... A> void add(const std::string &name, void (*function)(A...)) {
    kernels()[name] = [function](void **parameters) {
        std::tuple<A...> arguments;
        Call call;
        auto take = [&](auto &argument) {
            memcpy(&argument, *parameters++, sizeof argument);
            note(call.pointers, argument);
        };
        std::apply([&](auto &...each) { (take(each), ...); }, arguments);
        call.thread = [=] { std::apply(function, arguments); };
        return call;
    };
}

// Registers a kernel of several phases; `phases_of` gives their number for its first argument.
template <typename First, typename... A>
void add_together(const std::string &name, void (*function)(First, A...), int (*phases_of)(First)) {
    add(name, function);
    kernels()[name] = [call = kernels()[name], phases_of](void **parameters) {
        First first;
        memcpy(&first, *parameters, sizeof first);
        Call made = call(parameters);
        made.phases = phases_of(first);
        return made;
    };
}

} // namespace gpu
