// Tests of the emulator itself: it finds copies to shared memory that nobody waits for, and barriers that are missing around
// them.
#include "cuda/tensor.cuh"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int THREADS = 96, VALUES = 4 * THREADS, TILES = 5;

enum Bug {
    NONE,
    NO_WAIT,
    // Waits for the tile before.
    EARLY_WAIT,
    NO_BARRIER,
    COPY_BEFORE_BARRIER,
    NO_END,
    // Nobody waits for the last tile.
    ONE_TOO_MANY,
    // Tiles come to the place of the tile that is summed up.
    ONE_STAGE,
    // Values are written while they are copied, and where they are copied to.
    WRITES_SOURCE,
    WRITES_PLACE,
};

// Each thread sums up what another one has copied of each tile. The next tile comes to shared memory meanwhile.
template <Bug BUG> void sum_up(float *tiles, float *sums) {
    DYNAMIC_SHARED(memory);
    float *stages = reinterpret_cast<float *>(memory);
    const int own = 4 * threadIdx.x, other = VALUES - 4 - own;
    auto place = [&](int tile) { return stages + (BUG == ONE_STAGE ? 0 : tile % 2 * VALUES); };
    auto load = [&](int tile) {
        if (tile == TILES && BUG != ONE_TOO_MANY) {
            return;
        }
        float *from = tiles + tile % TILES * VALUES + own;
        copy_async(place(tile) + own, from, true);
        if (BUG != NO_END) {
            end_of_copies();
        }
        if (BUG == WRITES_SOURCE) {
            *from += 1;
        }
        if (BUG == WRITES_PLACE) {
            place(tile)[own] = *from;
        }
    };
    float sum = 0;
    load(0);
    for (int tile = 0; tile < TILES; tile++) {
        if (BUG != NO_WAIT) {
            wait_for_copies<BUG == EARLY_WAIT ? 1 : 0>();
        }
        if (BUG == COPY_BEFORE_BARRIER) {
            load(tile + 1);
        }
        if (BUG != NO_BARRIER) {
            __syncthreads();
        }
        if (BUG != COPY_BEFORE_BARRIER) {
            load(tile + 1);
        }
        for (int i = 0; i < 4; i++) {
            sum += place(tile)[other + i];
            // As products do, which read long before they end: warps that keep step with one another have read all.
            __syncwarp();
            __syncwarp();
        }
    }
    sums[threadIdx.x] = sum;
}

// Whether the sums of both orders of threads are right.
template <Bug BUG> bool is_right() {
    for (int time = 0; time < 2; time++) {
        float tiles[TILES * VALUES], sums[THREADS];
        std::iota(tiles, tiles + TILES * VALUES, 0.f);
        emulator::launch({1, 1, 1}, THREADS, [&] { sum_up<BUG>(tiles, sums); }, 2 * VALUES * sizeof(float));
        for (int i = 0; i < THREADS; i++) {
            float want = 0;
            for (int at = 0; at < TILES * VALUES; at += VALUES) {
                want += 4 * (at + VALUES - 4 - 4 * i) + 6;
            }
            if (sums[i] != want) {
                return false;
            }
        }
    }
    return true;
}

int failures = 0;

// A process of its own, because the emulator ends those with some bugs.
template <Bug BUG> void test(const char *what) {
    fflush(stdout);
    if (fork() == 0) {
        freopen("/dev/null", "w", stderr);
        _exit(!is_right<BUG>());
    }
    int status;
    wait(&status);
    if ((status == 0) != (BUG == NONE)) {
        failures++;
        printf("not so: %s\n", what);
    }
}

} // namespace

int main() {
    test<NONE>("tiles come while others are summed up");
    test<NO_WAIT>("a wait that is missing is found");
    test<EARLY_WAIT>("a wait for too few copies is found");
    test<NO_BARRIER>("a barrier that is missing is found");
    test<COPY_BEFORE_BARRIER>("a copy to where others still read is found");
    test<NO_END>("copies that belong to no group are found");
    test<ONE_TOO_MANY>("a copy that nobody waits for is found");
    test<ONE_STAGE>("a copy to what is still needed is found");
    test<WRITES_SOURCE>("a write to what is copied is found");
    test<WRITES_PLACE>("a write to where a copy goes is found");
    printf("%d failures\n", failures);
    return failures;
}
