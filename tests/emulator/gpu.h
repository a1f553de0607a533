// The emulated GPU: what its parts know of one another. Its memory is the host's, and work is done
// when it is submitted; what is still missing then is kept in books, to find those who rely on it.
#pragma once
#include "emulator.h"
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

// Errors of the driver's API, by its numbers.
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
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
};

// What the libraries export.
#define API extern "C" __attribute__((visibility("default")))

namespace gpu {

// Held by every call.
extern std::recursive_mutex &mutex;

// Names a bug of the caller that a real GPU might pass over in silence, and ends the program.
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
// What is running, for messages.
extern std::string &doing;
constexpr const char *HOST = "the host";

struct Graph;

// Streams run one after the other here, but a GPU promises that only where one waits for another.
struct Stream {
    int number = 0;
    // Pieces of work so far, and those that someone has waited for.
    long submitted = 0, finished = 0;
    // What records the stream while it is captured, how, who, and whether a call has spoiled that.
    Graph *capture = nullptr;
    int mode = 0;
    std::thread::id capturer;
    bool spoiled = false;
};

// The stream of a handle; the default stream is one for each thread of the host.
Stream &stream_of(void *handle);
// Waits for all work of all streams.
void finish_all();

using Work = std::function<CUresult(Stream &)>;
// Does the work, or records it.
CUresult submit(void *stream, const Work &work);

// Recorded work.
struct Graph {
    std::vector<Work> nodes;
    // What nodes allocate keeps its place from one launch to the next.
    std::vector<uint64_t> places;
};
// Whether a call that waits, or allocates at once, is not allowed now; it spoils the capture.
bool waiting_spoils_capture();

// Memory, by device pointers; they are addresses of the host.
// A place that is reserved has no memory until it is restored, and stays one when that is released.
CUresult allocate(uint64_t *pointer, size_t bytes, bool reserved = false);
CUresult restore(uint64_t pointer);
CUresult release(Stream &stream, uint64_t pointer);
// Gives a place up; memory that is there is like any other from now on.
void discard(uint64_t pointer);
size_t memory_in_use();
constexpr size_t MEMORY = size_t(4) << 30;
// Notes that work of a stream reads or writes memory from a pointer on, for at least so many bytes.
void use(Stream &stream, const void *pointer, size_t bytes, bool writes);

// A launch: what each thread runs, and where its pointers point to.
struct Call {
    struct Pointer {
        const void *at;
        bool writes;
    };
    std::function<void()> thread;
    std::vector<Pointer> pointers;
};
using Kernel = std::function<Call(void **parameters)>;
std::map<std::string, Kernel> &kernels();

template <typename T> void note(std::vector<Call::Pointer> &, T) {}
template <typename T> void note(std::vector<Call::Pointer> &pointers, T *at) {
    pointers.push_back({at, !std::is_const_v<T>});
}

// Makes a kernel known, with the types of its parameters.
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

} // namespace gpu
