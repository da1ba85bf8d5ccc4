// Small kernels that check the emulator itself. Built by tests/kernels/test_cta_on_cpu.py.
#include "cta.h"

using namespace tailpack;

namespace {

int lane() { return static_cast<int>(threadIdx.x % 32); }

// out[lane] = what the lane gets of a collective
void collectives(const int32_t* in, int64_t* wide, float* out) {
    const int i = lane();
    const int32_t x = in[i];
    int32_t* row = reinterpret_cast<int32_t*>(out) + i * 12;
    row[0] = __shfl_sync(cta::kFullWarp, x, 5, 8);
    row[1] = __shfl_xor_sync(cta::kFullWarp, x, 3);
    row[2] = __shfl_up_sync(cta::kFullWarp, x, 2, 16);
    row[3] = __shfl_down_sync(cta::kFullWarp, x, 9);
    row[4] = __reduce_max_sync(cta::kFullWarp, x);
    row[5] = static_cast<int32_t>(__reduce_max_sync(cta::kFullWarp, static_cast<uint32_t>(x)));
    row[6] = __any_sync(cta::kFullWarp, i == 31);
    row[7] = __all_sync(cta::kFullWarp, i != 31);
    row[8] = static_cast<int32_t>(__ballot_sync(cta::kFullWarp, x < 0));
    row[9] = __reduce_add_sync(cta::kFullWarp, x);
    row[10] = __reduce_min_sync(cta::kFullWarp, x);
    row[11] = static_cast<int32_t>(__activemask());
    wide[i] = __shfl_sync(cta::kFullWarp, static_cast<long long>(x) << 31, 31 - i);
}

// Registers of A [32][4], B [32][2] and C [32][4] as the lanes hold them; C is replaced.
template <typename Sum, typename Multiply>
void multiply(const uint32_t* a, const uint32_t* b, Sum* c, Multiply mma) {
    a += 4 * lane();
    b += 2 * lane();
    c += 4 * lane();
    Sum sums[4] = {c[0], c[1], c[2], c[3]};
    mma(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
    for (int i = 0; i < 4; i++) c[i] = sums[i];
}

// Warp 4 brings `num_stages` stages of kStageBytes through kStages places; warps 0..3 add up the words of each.
constexpr int kStages = 3, kStageBytes = 1024;
enum Mistake { kNone, kNoFullWait, kNoEmptyWait, kWrongParity, kShortExpect, kNoSyncAfterInit, kEarlyRelease };
void pipeline(const uint8_t* data, int num_stages, uint32_t* sums, int mistake) {
    TAILPACK_DYNAMIC_SHARED(memory);
    const uint32_t stages = shared_address(memory), full = stages + kStages * kStageBytes, empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            mbarrier_init(full + 8 * i, kStageArrivals);
            mbarrier_init(empty + 8 * i, 4);
        }
        mbarrier_init_fence();
    }
    if (mistake != kNoSyncAfterInit) __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32);
    data += static_cast<int64_t>(blockIdx.x) * num_stages * kStageBytes;
    if (warp == 4) {
        for (int i = 0; i < num_stages; i++) {
            const int stage = i % kStages;
            const uint32_t round = i / kStages & 1;
            if (mistake != kNoEmptyWait) mbarrier_wait(empty + 8 * stage, round ^ 1);
            stage_begin(full + 8 * stage, kStageBytes - (mistake == kShortExpect ? 16 : 0));
            stage_copy(stages + stage * kStageBytes, data + i * kStageBytes, kStageBytes / 4, full + 8 * stage, 0);
            stage_copy(stages + stage * kStageBytes + kStageBytes / 4, data + i * kStageBytes + kStageBytes / 4,
                       kStageBytes * 3 / 4, full + 8 * stage, 0);
            stage_end(full + 8 * stage);
        }
        for (int i = 0; i < kStages; i++) // until the last copies are there
            mbarrier_wait(full + 8 * ((num_stages + i) % kStages), ((num_stages - kStages + i) / kStages & 1));
        return;
    }
    uint32_t sum = 0;
    for (int i = 0; i < num_stages; i++) {
        const int stage = i % kStages;
        const uint32_t round = i / kStages & 1;
        if (mistake != kNoFullWait) mbarrier_wait(full + 8 * stage, mistake == kWrongParity ? round ^ 1 : round);
        if (mistake == kEarlyRelease && lane() == 0) mbarrier_arrive(empty + 8 * stage);
        const uint2 words = load_shared_8(stages + stage * kStageBytes + 8 * threadIdx.x);
        sum += words.x ^ words.y;
        __syncwarp();
        if (mistake != kEarlyRelease && lane() == 0) mbarrier_arrive(empty + 8 * stage);
    }
    atomicAdd(sums + blockIdx.x, sum);
}

// Each thread leaves its number in shared memory, and takes its neighbour's.
void neighbours(int* out, int with_barrier) {
    __shared__ int numbers[128];
    numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (with_barrier) __syncthreads();
    out[blockIdx.x * 128 + threadIdx.x] = numbers[(threadIdx.x + 1) % 128];
}

void atomics(int* integers, float* sum, uint32_t* order) {
    atomicAdd(integers, 1);
    atomicMax(integers + 1, static_cast<int>(threadIdx.x));
    atomicMin(integers + 2, static_cast<int>(threadIdx.x));
    atomicAdd(sum, 0.5f);
    const unsigned place = atomicAdd(order, 1u);
    order[1 + place] = blockIdx.x * blockDim.x + threadIdx.x;
    for (int old = integers[3];;) {
        const int seen = atomicCAS(integers + 3, old, old + 2);
        if (seen == old) break;
        old = seen;
    }
}

// Takes items of a queue, as the attention kernels do; taken[block] counts.
void queue(int* next, int num_items, int* taken) {
    __shared__ int item;
    for (;;) {
        if (threadIdx.x == 0) item = atomicAdd(next, 1);
        __syncthreads();
        const int mine = item;
        __syncthreads();
        if (mine >= num_items) return;
        if (threadIdx.x == 0) taken[blockIdx.x]++;
    }
}

// Who comes when: the threads in order of arrival at a __syncwarp, and in order of leaving it.
void orders(int* before, int* after) {
    __shared__ int arrived, left;
    if (threadIdx.x == 0) arrived = left = 0;
    __syncthreads();
    before[arrived++] = static_cast<int>(threadIdx.x);
    __syncwarp();
    after[left++] = static_cast<int>(threadIdx.x);
}

// 2-d blocks and grids: every thread adds 1 at its own place.
void places(int* out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

void misuse(int kind, int* out) {
    TAILPACK_DYNAMIC_SHARED(memory);
    const uint32_t base = shared_address(memory);
    const bool one = threadIdx.x == 7;
    volatile int zero = 0;
    switch (kind) {
    case 0: if (lane() < 16) __syncwarp(); break;                          // half a warp ends
    case 1: if (lane() < 16) __syncwarp(); else *out = __shfl_sync(cta::kFullWarp, 1, 0); break;
    case 2: if (lane() < 16) __syncwarp(); else __syncthreads(); break;    // half a warp waits elsewhere
    case 3: if (one) load_shared_16(base + 1024); break;                   // behind the end
    case 4: if (one) load_shared_16(base + 8); break;                      // not aligned
    case 5: if (one) shared_address(out); break;
    case 6: if (one) mbarrier_arrive(base); break;                         // never made
    case 7: if (one) { mbarrier_init(base, 1); memory[3] = 1; mbarrier_arrive(base); } break;
    case 8: if (one) { mbarrier_init(base, 1); mbarrier_wait(base, 1); mbarrier_wait(base, 0); } break; // nobody arrives
    case 9: if (one) { mbarrier_init(base, 1); while (!mbarrier_test(base, 0)) {} } break;
    case 10: if (one) __nanosleep(100); while (*static_cast<volatile int*>(out) == 0) __nanosleep(100); break;
    case 11: __shfl_sync(0xffffu, 1, 0); break;
    case 12: if (one) memory[1024] = 1; break;                             // the page behind
    case 13: if (one) *reinterpret_cast<volatile int*>(zero) = 1; break;
    case 14: if (one) *out = 7 / zero; break;
    case 15: if (one) for (;;) zero = 0; break;
    case 16:
        if (lane() == 3) __shfl_xor_sync(cta::kFullWarp, 1, 1); // the same collective at two places
        else __shfl_xor_sync(cta::kFullWarp, 1, 1);
        break;
    case 17: if (threadIdx.x < 32) __syncthreads(); else __nanosleep(1); break; // fine: the others have ended
    case 18: if (lane() != 2) stage_end(base); break;
    case 20: if (one) trap(); break;
    case 19: if (one) { mbarrier_init(base, 2); mbarrier_init(base, 2); } break;
    }
}

// What a CTA finds in its shared memory.
void fresh(uint32_t* out) {
    TAILPACK_DYNAMIC_SHARED(memory);
    __shared__ uint32_t words[64];
    out[2 * (blockIdx.x * 64 + threadIdx.x)] = words[threadIdx.x];
    out[2 * (blockIdx.x * 64 + threadIdx.x) + 1] = reinterpret_cast<uint32_t*>(memory)[threadIdx.x];
    words[threadIdx.x] = reinterpret_cast<uint32_t*>(memory)[threadIdx.x] = 0;
}

void many_collectives(int rounds, int* out) {
    int x = static_cast<int>(threadIdx.x);
    for (int i = 0; i < rounds; i++) x += __shfl_xor_sync(cta::kFullWarp, x, 1 + i % 31) & 1;
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

} // namespace

extern "C" {
void run_collectives(const int32_t* in, int64_t* wide, float* out) {
    cta::launch(1, 32, 0, [=] { collectives(in, wide, out); });
}
void run_mma_s8_s8(const uint32_t* a, const uint32_t* b, int32_t* c) {
    cta::launch(1, 32, 0, [=] { multiply(a, b, c, [](auto&... x) { mma_s8_s8(x...); }); });
}
void run_mma_s8_u8(const uint32_t* a, const uint32_t* b, int32_t* c) {
    cta::launch(1, 32, 0, [=] { multiply(a, b, c, [](auto&... x) { mma_s8_u8(x...); }); });
}
void run_mma_bf16(const uint32_t* a, const uint32_t* b, float* c) {
    cta::launch(1, 32, 0, [=] { multiply(a, b, c, [](auto&... x) { mma_half<__nv_bfloat16>(x...); }); });
}
void run_mma_f16(const uint32_t* a, const uint32_t* b, float* c) {
    cta::launch(1, 32, 0, [=] { multiply(a, b, c, [](auto&... x) { mma_half<__half>(x...); }); });
}
void run_transpose(const uint32_t* in, uint32_t* out) {
    cta::launch(1, 32, 0, [=] { out[lane()] = transpose_8x8(in[lane()]); });
}
void run_pipeline(unsigned ctas, const uint8_t* data, int num_stages, uint32_t* sums, int mistake) {
    cta::launch(ctas, 160, kStages * kStageBytes + 16 * kStages, [=] { pipeline(data, num_stages, sums, mistake); });
}
void run_neighbours(unsigned ctas, int* out, int with_barrier) {
    cta::launch(ctas, 128, 0, [=] { neighbours(out, with_barrier); });
}
void run_atomics(unsigned ctas, int* integers, float* sum, uint32_t* order) {
    cta::launch(ctas, 96, 0, [=] { atomics(integers, sum, order); });
}
void run_queue(unsigned ctas, int* next, int num_items, int* taken) {
    cta::launch(ctas, 64, 0, [=] { queue(next, num_items, taken); });
}
void run_orders(unsigned threads, int* before, int* after) {
    cta::launch(1, threads, 0, [=] { orders(before, after); });
}
void run_places(int* out) { cta::launch({2, 3, 2}, {32, 2, 3}, 0, [=] { places(out); }); }
void run_misuse(int kind, int* out) { cta::launch(1, 64, 1024, [=] { misuse(kind, out); }); }
void run_fresh(unsigned ctas, uint32_t* out) { cta::launch(ctas, 64, 256, [=] { fresh(out); }); }
void run_many(unsigned ctas, int rounds, int* out) { cta::launch(ctas, 320, 0, [=] { many_collectives(rounds, out); }); }
unsigned permute_of(unsigned a, unsigned b, unsigned selector) { return permute(a, b, selector); }
unsigned pack_bf16(float low, float high) { return pack_halves<__nv_bfloat16>(low, high); }
unsigned multiply_bf16(unsigned a, unsigned b) { return multiply_halves<__nv_bfloat16>(a, b); }
unsigned multiply_f16(unsigned a, unsigned b) { return multiply_halves<__half>(a, b); }
unsigned pack_f16(float low, float high) { return pack_halves<__half>(low, high); }
float exp2_of(float x) { return exp2_fast(x); }
int round_of(float x) { return __float2int_rn(x); }
int dp4a_signed(int a, int b, int c) { return __dp4a(a, b, c); }
}
