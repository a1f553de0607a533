// The devices of the emulated driver, and their contexts.
#include "gpu.h"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace gpu {

namespace {

// Each device has one context, which each thread must make current.
int device_contexts[MAX_DEVICES];
thread_local void *context;
// Owners of the context, and threads that have made it current and have not ended.
std::atomic<int> owners, users;

struct User {
    User() { users++; }
    ~User() { users--; }
};

} // namespace

int device_of(const void *context) { return static_cast<const int *>(context) - device_contexts; }

bool exists(int device) { return device >= 0 && device < device_count(); }

int device_count() {
    static const int count = [] {
        const char *asked = getenv("FORETOKEN_EMULATED_GPUS");
        return asked ? std::clamp(atoi(asked), 0, MAX_DEVICES) : 1;
    }();
    return count;
}

int current_device() { return context ? device_of(context) : 0; }

bool has_context() { return context != nullptr; }

} // namespace gpu

using namespace gpu;

API CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int *count) {
    *count = device_count();
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return exists(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDeviceGetName(char *name, int length, int) {
    snprintf(name, length, "emulated GPU");
    return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = MEMORY;
    return CUDA_SUCCESS;
}
// FORETOKEN_EMULATED_OTHERS is the compute capability of all devices but the first.
API CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *others = device > 0 ? getenv("FORETOKEN_EMULATED_OTHERS") : nullptr;
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
        *value = others ? atoi(others) : 9;
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

API CUresult cuDevicePrimaryCtxRetain(void **result, int device) {
    if (!exists(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *result = &device_contexts[device];
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

// There is one pool of each device.
API CUresult cuDeviceGetDefaultMemPool(void **pool, int device) {
    *pool = &device_contexts[device];
    return CUDA_SUCCESS;
}
