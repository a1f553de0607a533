// The memory of the emulated GPU. Each allocation ends at a page without access rights. It is initially
// filled with 0xff, because a GPU does not define the contents, and the bytes around it on its pages
// must not change.
#include "gpu.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

namespace gpu {

// Nothing here is ever destroyed, because threads may still run when the program ends.
std::recursive_mutex &mutex = *new std::recursive_mutex;
std::string &doing = *new std::string(HOST);

std::map<std::string, Kernel> &kernels() {
    static auto &all = *new std::map<std::string, Kernel>;
    return all;
}

namespace {

constexpr unsigned char FENCE = 0xa5;
// Only this many bytes at the start of an allocation are filled, so that pools of gigabytes cost no
// memory.
constexpr size_t FILLED = 16 << 20;

// The work that used an allocation last.
struct Use {
    Stream *stream = nullptr;
    long number = 0;
    std::string what;

    // Whether work of the stream `other` could run before or at the same time as it.
    bool may_run_with(const Stream &other) const {
        return stream && stream != &other && number > stream->finished;
    }
};

struct Allocation {
    int device;
    size_t bytes;
    unsigned char *pages;
    size_t mapped;
    // Whether the address is reserved by a graph, and whether it has no memory now.
    bool reserved = false, withdrawn = false;
    Use writer;
    std::map<Stream *, Use> readers;
};

// The allocations by device pointer.
std::map<uint64_t, Allocation> &allocations = *new std::map<uint64_t, Allocation>;
size_t in_use[MAX_DEVICES];

size_t page() { return sysconf(_SC_PAGESIZE); }

unsigned char *bytes_at(uint64_t pointer) { return reinterpret_cast<unsigned char *>(pointer); }

// Calls `work` for the bytes of an allocation's pages before and after it.
template <typename F> void for_fence(uint64_t pointer, const Allocation &a, F work) {
    for (auto at = a.pages; at < bytes_at(pointer); at++) {
        work(*at);
    }
    for (auto at = bytes_at(pointer) + a.bytes; at < a.pages + a.mapped; at++) {
        work(*at);
    }
}

void fill(uint64_t pointer, const Allocation &a) {
    for_fence(pointer, a, [](unsigned char &byte) { byte = FENCE; });
    memset(bytes_at(pointer), 0xff, std::min(a.bytes, FILLED));
}

void check(uint64_t pointer, const Allocation &a) {
    for_fence(pointer, a, [&](unsigned char byte) {
        if (byte != FENCE) {
            fault("something wrote around an allocation of %zu bytes; last written by %s", a.bytes,
                  a.writer.what.c_str());
        }
    });
}

Allocation *find(uint64_t pointer) {
    auto after = allocations.upper_bound(pointer);
    if (after == allocations.begin()) {
        return nullptr;
    }
    auto &[start, allocation] = *std::prev(after);
    return pointer <= start + allocation.bytes && !allocation.withdrawn ? &allocation : nullptr;
}

void note_use(Stream &stream, Allocation &a, bool writes) {
    auto race = [&](const Use &other, const char *verb) {
        if (other.may_run_with(stream)) {
            fault("%s on stream %d %s %zu bytes that %s on stream %d may not be done with", doing.c_str(),
                  stream.number, verb, a.bytes, other.what.c_str(), other.stream->number);
        }
    };
    race(a.writer, writes ? "writes" : "reads");
    Use now{&stream, stream.submitted, doing};
    if (!writes) {
        a.readers[&stream] = now;
        return;
    }
    for (auto &[_, reader] : a.readers) {
        race(reader, "writes");
    }
    a.readers.clear();
    a.writer = now;
}

} // namespace

void fault(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fprintf(stderr, "emulated GPU: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    abort();
}

CUresult allocate(int device, uint64_t *pointer, size_t bytes, bool reserved) {
    if (in_use[device] + bytes > MEMORY) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    // Aligned for the vectors of kernels, but not more, so that the guard begins right at the end.
    size_t room = (bytes + 15) / 16 * 16, mapped = (room + page() - 1) / page() * page();
    void *pages = mmap(nullptr, mapped + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    auto first = static_cast<unsigned char *>(pages) + page();
    *pointer = reinterpret_cast<uint64_t>(first + mapped - room);
    allocations[*pointer] = {device, bytes, first, mapped, reserved, true};
    in_use[device] += bytes;
    return reserved ? CUDA_SUCCESS : restore(*pointer);
}

CUresult restore(uint64_t pointer) {
    auto &a = allocations.at(pointer);
    if (!a.withdrawn) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    a.withdrawn = false;
    mprotect(a.pages, a.mapped, PROT_READ | PROT_WRITE);
    fill(pointer, a);
    return CUDA_SUCCESS;
}

CUresult release(Stream &stream, uint64_t pointer) {
    auto at = allocations.find(pointer);
    if (at == allocations.end() || at->second.withdrawn) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto &a = at->second;
    if (a.device != stream.device) {
        fault("%zu bytes of device %d are freed on a stream of device %d", a.bytes, a.device, stream.device);
    }
    check(pointer, a);
    note_use(stream, a, true);
    a.withdrawn = true;
    mprotect(a.pages, a.mapped, PROT_NONE);
    if (!a.reserved) {
        discard(pointer);
    }
    return CUDA_SUCCESS;
}

void discard(uint64_t pointer) {
    auto &a = allocations.at(pointer);
    a.reserved = false;
    if (a.withdrawn) {
        munmap(a.pages - page(), a.mapped + 2 * page());
        in_use[a.device] -= a.bytes;
        allocations.erase(pointer);
    }
}

size_t memory_in_use(int device) { return in_use[device]; }

void use_of(int device, Stream &stream, const void *at, size_t bytes, bool writes) {
    auto pointer = reinterpret_cast<uint64_t>(at);
    auto after = allocations.upper_bound(pointer);
    Allocation *a = find(pointer);
    if (!a) {
        fault("%s is given %p, where no memory is", doing.c_str(), at);
    }
    if (a->device != device) {
        fault("%s on device %d is given memory of device %d", doing.c_str(), device, a->device);
    }
    uint64_t end = std::prev(after)->first + a->bytes;
    if (pointer + bytes > end) {
        fault("%s takes %zu bytes of the last %zu of an allocation of %zu", doing.c_str(), bytes,
              size_t(end - pointer), a->bytes);
    }
    note_use(stream, *a, writes);
}

} // namespace gpu
