// The CUDA runtime, as far as candle's static library of kernels uses it to launch the products with
// quantized weights. A binary may contain its own runtime, which cannot drive an emulated GPU; calls of
// its functions are redirected here. Kernels are found by the binary's symbols.
#include "gpu.h"
#include <cstdio>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_map>

using namespace gpu;
using Lock = std::lock_guard<std::recursive_mutex>;

struct dim3 {
    unsigned x, y, z;
};

namespace {

struct Symbol {
    std::string name;
    // Dynamic shared memory that a launch may use.
    int shared = 48 << 10;
};
std::unordered_map<uintptr_t, Symbol> &symbols = *new std::unordered_map<uintptr_t, Symbol>;

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
};
thread_local std::vector<Configuration> configurations;

} // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configurations.push_back({grid, block, shared, stream});
    return CUDA_SUCCESS;
}
API CUresult __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *stream = last.stream;
    return CUDA_SUCCESS;
}

API CUresult __cudaGetKernel(Symbol **symbol, const void *function) {
    Lock lock(mutex);
    auto found = symbols.find(reinterpret_cast<uintptr_t>(function));
    if (found == symbols.end()) {
        fault("a kernel of a binary without symbols");
    }
    *symbol = &found->second;
    return CUDA_SUCCESS;
}

API CUresult __cudaLaunchKernel_ptsz(Symbol *symbol, dim3 grid, dim3 block, void **parameters, size_t shared,
                                     void *stream) {
    Lock lock(mutex);
    // Errors end the program, because callers do not check the result of such a launch.
    auto kernel = kernels().find(symbol->name);
    if (kernel == kernels().end()) {
        fault("no emulation of kernel %s", symbol->name.c_str());
    }
    unsigned threads = block.x * block.y * block.z;
    bool fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x < 1u << 31 && grid.y < 1 << 16 && grid.z < 1 << 16 &&
                threads > 0 && threads <= 1024;
    if (!fits || shared > size_t(symbol->shared)) {
        fault("%s cannot have %u x %u x %u blocks of %u threads with %zu bytes", symbol->name.c_str(), grid.x, grid.y,
              grid.z, threads, shared);
    }
    Call call = kernel->second(parameters);
    Dim blocks{int(grid.x), int(grid.y), int(grid.z)};
    return submit(stream, [=, name = symbol->name](Stream &on) {
        doing = name;
        for (auto pointer : call.pointers) {
            if (pointer.at) {
                use(on, pointer.at, 0, pointer.writes);
            }
        }
        // Here one thread does all the work of a block.
        emulator::launch(blocks, 1, call.thread, 0);
        return CUDA_SUCCESS;
    });
}

API CUresult cudaFuncSetAttribute(const void *function, int attribute, int value) {
    Lock lock(mutex);
    if (attribute == 8) {
        if (value < 0 || size_t(value) > emulator::MAX_SHARED) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        Symbol *symbol;
        __cudaGetKernel(&symbol, function);
        symbol->shared = value;
    }
    return CUDA_SUCCESS;
}
API CUresult cudaGetDevice(int *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

// Binaries that are linked to the runtime library call these to register kernels, which the symbols
// already provide, and do not start without the others, which candle does not call here.
API void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction() {}
API void __cudaRegisterVar() {}
API char __cudaInitModule(void **) { return 1; }
#define MISSING(NAME)                                                                              \
    API CUresult NAME() { return CUDA_ERROR_NOT_SUPPORTED; }
MISSING(cudaDeviceGetAttribute)
MISSING(cudaFree)
MISSING(cudaFreeAsync_ptsz)
MISSING(cudaFuncGetAttributes)
MISSING(cudaGetDeviceCount)
MISSING(cudaGetErrorName)
MISSING(cudaGetErrorString)
MISSING(cudaGetLastError)
MISSING(cudaMalloc)
MISSING(cudaMallocAsync_ptsz)
MISSING(cudaMemsetAsync_ptsz)
MISSING(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
MISSING(cudaPeekAtLastError)
MISSING(cudaSetDevice)
MISSING(cudaStreamSynchronize_ptsz)

namespace {

// Overwrites a function's first instructions with a jump.
void lead(uintptr_t function, void *to) {
#ifdef __x86_64__
    // movabs $to, %rax; jmp *%rax
    unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
    memcpy(jump + 2, &to, 8);
    uintptr_t page = sysconf(_SC_PAGESIZE), first = function / page * page;
    auto pages = reinterpret_cast<void *>(first);
    size_t bytes = function + sizeof jump - first;
    if (mprotect(pages, bytes, PROT_READ | PROT_WRITE | PROT_EXEC) == 0) {
        memcpy(reinterpret_cast<void *>(function), jump, sizeof jump);
        mprotect(pages, bytes, PROT_READ | PROT_EXEC);
    }
#endif
}

void read_symbols() {
    int file = open("/proc/self/exe", O_RDONLY);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0) {
        return;
    }
    void *mapped = mmap(nullptr, about.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    auto image = static_cast<const char *>(mapped);
    if (mapped == MAP_FAILED || memcmp(image, ELFMAG, SELFMAG) != 0) {
        return;
    }
    // The address of the binary, which is the first object.
    uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            *static_cast<uintptr_t *>(to) = info->dlpi_addr;
            return 1;
        },
        &base);
#define LEAD(NAME) {#NAME, reinterpret_cast<void *>(NAME)}
    const std::map<std::string, void *> ours = {
        LEAD(__cudaPushCallConfiguration), LEAD(__cudaPopCallConfiguration), LEAD(__cudaGetKernel),
        LEAD(__cudaLaunchKernel_ptsz),     LEAD(cudaFuncSetAttribute),       LEAD(cudaGetDevice),
    };
    auto header = reinterpret_cast<const Elf64_Ehdr *>(image);
    auto sections = reinterpret_cast<const Elf64_Shdr *>(image + header->e_shoff);
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) {
            continue;
        }
        auto table = reinterpret_cast<const Elf64_Sym *>(image + sections[s].sh_offset);
        const char *names = image + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *table; i++) {
            if (table[i].st_shndx == SHN_UNDEF || ELF64_ST_TYPE(table[i].st_info) != STT_FUNC) {
                continue;
            }
            std::string name = names + table[i].st_name;
            uintptr_t at = base + table[i].st_value;
            if (auto to = ours.find(name); to != ours.end()) {
                lead(at, to->second);
            } else if (name.starts_with("mmvq_") || name.starts_with("_Z9mul_mat_q") ||
                       name.starts_with("_Z24mul_mat_q_stream_k_fixup") || name.starts_with("_Z17quantize_mmq_q8_1")) {
                symbols[at] = {name};
            }
        }
    }
    munmap(mapped, about.st_size);
}

[[maybe_unused]] const bool read = (read_symbols(), true);

} // namespace
