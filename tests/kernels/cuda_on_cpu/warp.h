// Runs a CUDA kernel that uses one warp's shuffles on a CPU: 32 coroutines, one a lane, switched at every shuffle.
//
// Good for kernels whose lanes all meet every shuffle (ours do: whole warps stay in the loops). It checks arithmetic,
// indexing and byte order, not timing, races or the compiler; the device check does those.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(n)

using std::max;
using std::min;

struct Dim {
    unsigned x;
};
inline Dim threadIdx, blockIdx, blockDim{32}, gridDim{1};

namespace warp {
constexpr int kLanes = 32;
constexpr size_t kStack = 1 << 17;
inline ucontext_t main_context, contexts[kLanes];
inline std::uint32_t slots[2][kLanes];
inline int parity[kLanes], alive;
inline std::function<void()> body;

// Give this lane's turn away; returns when every other lane has had its own.
inline void yield_turn() {
    const unsigned lane = threadIdx.x, next = (lane + 1) % kLanes;
    threadIdx.x = next;
    swapcontext(&contexts[lane], &contexts[next]);
}

inline void entry() {
    body();
    if (--alive == 0) setcontext(&main_context);
    threadIdx.x += 1; // lanes end in order
    setcontext(&contexts[threadIdx.x]);
}

inline void run(unsigned blocks, std::function<void()> kernel) {
    std::vector<std::unique_ptr<char[]>> stacks;
    gridDim.x = blocks;
    body = std::move(kernel);
    for (int lane = 0; lane < kLanes; lane++) stacks.push_back(std::make_unique<char[]>(kStack));
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (int lane = 0; lane < kLanes; lane++) {
            getcontext(&contexts[lane]);
            contexts[lane].uc_stack.ss_sp = stacks[lane].get();
            contexts[lane].uc_stack.ss_size = kStack;
            contexts[lane].uc_link = nullptr;
            makecontext(&contexts[lane], entry, 0);
            parity[lane] = 0;
        }
        alive = kLanes;
        threadIdx.x = 0;
        swapcontext(&main_context, &contexts[0]);
    }
}

template <typename T> T exchange(T value, int source) {
    static_assert(sizeof(T) == 4);
    const unsigned lane = threadIdx.x;
    const int buffer = parity[lane] ^= 1;
    std::memcpy(&slots[buffer][lane], &value, 4);
    yield_turn();
    T result;
    std::memcpy(&result, &slots[buffer][source], 4);
    return result;
}
} // namespace warp

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width) {
    if (mask != 0xffffffffu || lane_mask >= width) std::abort();
    return warp::exchange(value, static_cast<int>(threadIdx.x) ^ lane_mask);
}
template <typename T> T __shfl_sync(unsigned mask, T value, int source, int width) {
    if (mask != 0xffffffffu) std::abort();
    return warp::exchange(value, static_cast<int>(threadIdx.x) / width * width + source % width);
}

template <typename To, typename From> To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(std::uint32_t x) { return bit_cast<float>(x); }
inline std::uint32_t __float_as_uint(float x) { return bit_cast<std::uint32_t>(x); }
inline float __fmul_rn(float a, float b) { return a * b; } // compiled with -ffp-contract=off
inline std::uint32_t __dp4a(std::uint32_t a, std::uint32_t b, std::uint32_t sum) {
    for (int i = 0; i < 4; i++) sum += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
    return sum;
}
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<std::uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline long long atomicMin(long long* address, long long value) {
    const long long old = *address;
    *address = std::min(old, value);
    return old;
}
