// Puts values that came in one copy from the host into the tensors that they are for.
#include <stdint.h>

// words: the values of all parts, and from `table` on four words of each part: the address that its values go to, the
// low half first, and the first and the number of its words. The grid is [_, parts].
extern "C" __global__ void __launch_bounds__(256) write_words(const uint32_t *words, int table) {
    const uint32_t *part = words + table + 4 * blockIdx.y;
    uint32_t *to = reinterpret_cast<uint32_t *>((uint64_t)part[1] << 32 | part[0]);
    const uint32_t *from = words + part[2];
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < part[3]; i += gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}
