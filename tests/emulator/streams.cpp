// Streams, events and graphs of the emulated GPU.
#include "gpu.h"
#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

namespace gpu {

namespace {

// Streams are never freed, because allocations refer to the streams that used them.
std::vector<Stream *> &streams = *new std::vector<Stream *>;

Stream &make_stream(int device) {
    streams.push_back(new Stream{.number = int(streams.size()), .device = device});
    return *streams.back();
}

struct Event {
    int device = 0;
    Stream *stream = nullptr;
    long number = 0;
    // The graph during whose capture it was recorded.
    Graph *graph = nullptr;
    std::chrono::steady_clock::time_point at;
};

void finish(Stream &stream, long number) { stream.finished = std::max(stream.finished, number); }

CUresult spoil(Stream &stream, CUresult error) {
    stream.spoiled = true;
    return error;
}

} // namespace

Counts &counts() {
    thread_local Counts own;
    return own;
}

Stream &stream_of(void *handle) {
    static Stream *legacy[MAX_DEVICES];
    thread_local Stream *own[MAX_DEVICES];
    auto number = reinterpret_cast<uintptr_t>(handle);
    if (number > 2) {
        return *static_cast<Stream *>(handle);
    }
    const int device = current_device();
    Stream *&stream = number < 2 ? legacy[device] : own[device];
    stream = stream ? stream : &make_stream(device);
    return *stream;
}

void finish_all() {
    for (Stream *stream : streams) {
        if (stream->device == current_device()) {
            finish(*stream, stream->submitted);
        }
    }
}

static CUresult run(Stream &stream, const Work &work) {
    stream.submitted++;
    CUresult result = work(stream);
    doing = HOST;
    return result;
}

CUresult submit(void *handle, const Work &work) {
    Stream &stream = stream_of(handle);
    if (stream.spoiled) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (stream.capture) {
        stream.capture->nodes.push_back(work);
        return CUDA_SUCCESS;
    }
    return run(stream, work);
}

bool waiting_spoils_capture() {
    // Capture mode 0 forbids the call to all threads, 1 to the capturing thread, 2 to none.
    bool spoils = false;
    for (Stream *stream : streams) {
        bool own = stream->capturer == std::this_thread::get_id();
        if (stream->capture && (stream->mode == 0 || (stream->mode == 1 && own))) {
            stream->spoiled = spoils = true;
        }
    }
    return spoils;
}

} // namespace gpu

using namespace gpu;
using Lock = std::lock_guard<std::recursive_mutex>;

API CUresult cuStreamCreate(void **stream, unsigned) {
    Lock lock(mutex);
    *stream = &make_stream(current_device());
    return CUDA_SUCCESS;
}
API CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
API CUresult cuStreamDestroy_v2(void *) { return CUDA_SUCCESS; }

// The counts of this thread: waits, copies, kernels and graphs.
API void emulated_gpu_counts(long *to) {
    const Counts &own = counts();
    const long all[] = {own.waits, own.copies, own.kernels, own.graphs};
    std::copy(std::begin(all), std::end(all), to);
}

API CUresult cuStreamSynchronize(void *handle) {
    Lock lock(mutex);
    counts().waits++;
    Stream &stream = stream_of(handle);
    if (stream.capture) {
        return spoil(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    finish(stream, stream.submitted);
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize() {
    Lock lock(mutex);
    counts().waits++;
    if (waiting_spoils_capture()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    finish_all();
    return CUDA_SUCCESS;
}

API CUresult cuEventCreate(void **event, unsigned) {
    *event = new Event{.device = current_device()};
    return CUDA_SUCCESS;
}
API CUresult cuEventDestroy_v2(Event *event) {
    delete event;
    return CUDA_SUCCESS;
}
API CUresult cuEventRecord(Event *event, void *handle) {
    Lock lock(mutex);
    Stream &stream = stream_of(handle);
    if (stream.device != event->device) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *event = {stream.device, &stream, stream.submitted, stream.capture, std::chrono::steady_clock::now()};
    return CUDA_SUCCESS;
}
API CUresult cuEventQuery(Event *) { return CUDA_SUCCESS; }
API CUresult cuEventSynchronize(Event *event) {
    Lock lock(mutex);
    if (event->graph) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    counts().waits++;
    if (event->stream) {
        finish(*event->stream, event->number);
    }
    return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime_v2(float *ms, Event *start, Event *end) {
    *ms = std::chrono::duration<float, std::milli>(end->at - start->at).count();
    return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime(float *ms, Event *start, Event *end) { return cuEventElapsedTime_v2(ms, start, end); }

// Work that one stream waits for counts as finished for all: here the emulator finds fewer bugs than
// there are.
API CUresult cuStreamWaitEvent(void *handle, Event *event, unsigned) {
    Lock lock(mutex);
    Stream &stream = stream_of(handle);
    if (!event->stream) {
        return CUDA_SUCCESS;
    }
    if (stream.capture != event->graph) {
        return spoil(stream, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    finish(*event->stream, event->number);
    return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    Lock lock(mutex);
    Stream &stream = stream_of(handle);
    if (reinterpret_cast<uintptr_t>(handle) < 2) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream.capture) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    stream.capture = new Graph;
    stream.mode = mode;
    stream.capturer = std::this_thread::get_id();
    return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(void *handle, int *status) {
    Lock lock(mutex);
    Stream &stream = stream_of(handle);
    *status = !stream.capture ? 0 : stream.spoiled ? 2 : 1;
    return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(Graph *graph) {
    Lock lock(mutex);
    for (uint64_t place : graph->places) {
        discard(place);
    }
    delete graph;
    return CUDA_SUCCESS;
}

// Without room for nodes, they are only counted; nothing asks for more here.
API CUresult cuGraphGetNodes(Graph *graph, void **nodes, size_t *count) {
    Lock lock(mutex);
    *count = graph->nodes.size();
    return nodes ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(void *handle, Graph **graph) {
    Lock lock(mutex);
    Stream &stream = stream_of(handle);
    if (!stream.capture) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    *graph = std::exchange(stream.capture, nullptr);
    if (!std::exchange(stream.spoiled, false)) {
        return CUDA_SUCCESS;
    }
    cuGraphDestroy(std::exchange(*graph, nullptr));
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

namespace {

// A graph that can be launched. It may outlive the graph but not its addresses; this holds only here.
struct Exec {
    Graph *graph;
    bool frees_on_launch;
};

} // namespace

API CUresult cuGraphInstantiateWithFlags(Exec **exec, Graph *graph, unsigned long long flags) {
    *exec = new Exec{graph, (flags & 1) != 0};
    return CUDA_SUCCESS;
}
API CUresult cuGraphUpload(Exec *, void *) { return CUDA_SUCCESS; }
API CUresult cuGraphExecDestroy(Exec *exec) {
    delete exec;
    return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(Exec *exec, void *handle) {
    Lock lock(mutex);
    Stream &stream = stream_of(handle);
    if (stream.capture) {
        // Graphs within graphs are not supported, because nothing uses them.
        return spoil(stream, CUDA_ERROR_NOT_SUPPORTED);
    }
    if (exec->frees_on_launch) {
        for (uint64_t place : exec->graph->places) {
            release(stream, place);
        }
    }
    counts().graphs++;
    // A graph starts after all work before it.
    stream.apart = {};
    for (const Work &work : exec->graph->nodes) {
        if (CUresult error = run(stream, work)) {
            return error;
        }
    }
    return CUDA_SUCCESS;
}
