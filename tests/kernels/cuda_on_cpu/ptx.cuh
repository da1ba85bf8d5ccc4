// The functions of kernels/csrc/ptx.cuh for a CPU: same names, same meaning. It takes that header's place by its guard.
#ifndef TAILPACK_PTX_CUH
#define TAILPACK_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <chrono>
#include <cuda/std/cstdint>

#include "cuda_builtins.h"

#define TAILPACK_DYNAMIC_SHARED(name) ::tailpack::uint8_t* const name = ::cta::dynamic_shared()

namespace tailpack {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;
using ::cta::Where;

// ---- shared memory

inline uint32_t shared_address(const void* p, Where where = Where::here()) { return cta::shared_address(p, where); }
template <typename T> inline T load_shared(uint32_t address, const char* name, Where where) {
    T value;
    std::memcpy(&value, cta::shared_pointer(address, sizeof value, sizeof value, name, where), sizeof value);
    return value;
}
inline uint4 load_shared_16(uint32_t address, Where where = Where::here()) {
    return load_shared<uint4>(address, "load_shared_16", where);
}
inline float4 load_shared_f4(uint32_t address, Where where = Where::here()) {
    return load_shared<float4>(address, "load_shared_f4", where);
}
inline uint2 load_shared_8(uint32_t address, Where where = Where::here()) {
    return load_shared<uint2>(address, "load_shared_8", where);
}

// ---- global memory

template <typename T> inline T load_global(const void* p, const char* name, Where where) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0)
        cta::fail(cta::format("%s: %p is not a multiple of %zu", name, p, sizeof(T)), where);
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
inline uint4 load_stream_16(const void* p, Where where = Where::here()) {
    return load_global<uint4>(p, "load_stream_16", where);
}
inline uint4 load_cached_16(const void* p, Where where = Where::here()) {
    return load_global<uint4>(p, "load_cached_16", where);
}
inline uint2 load_cached_8(const void* p, Where where = Where::here()) {
    return load_global<uint2>(p, "load_cached_8", where);
}
inline uint32_t load_cached_4(const void* p, Where where = Where::here()) {
    return load_global<uint32_t>(p, "load_cached_4", where);
}
inline void store_global_16(void* p, const uint4& v, Where where = Where::here()) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) cta::fail("store_global_16: an address is a multiple of 16", where);
    std::memcpy(p, &v, sizeof v);
}
inline void prefetch_l2(const void* from, uint32_t bytes, Where where = Where::here()) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) cta::fail("prefetch_l2: multiples of 16", where);
    const volatile uint8_t* bytes_there = static_cast<const uint8_t*>(from);
    if (bytes > 0) (void)(bytes_there[0] + bytes_there[bytes - 1]);
}
inline float4 load_l2_f4(const float* p, Where where = Where::here()) { return load_global<float4>(p, "load_l2_f4", where); }
inline uint4 load_l2_16(const void* p, Where where = Where::here()) { return load_global<uint4>(p, "load_l2_16", where); }
inline float2 load_l2_f2(const float* p, Where where = Where::here()) { return load_global<float2>(p, "load_l2_f2", where); }

inline uint32_t add_release(uint32_t* p, uint32_t value) {
    cta::maybe_let_others_run();
    const uint32_t before = *p;
    *p = before + value;
    cta::idle_polls = 0;
    return before;
}
inline uint32_t load_acquire(const uint32_t* p) { return *p; }
inline void pause_poll(Where where = Where::here()) { cta::poll("pause_poll", where); }

// ---- mbarriers and the pages that arrive at them

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals, Where where = Where::here()) {
    cta::mbarrier_init(barrier, arrivals, where);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier, Where where = Where::here()) { cta::mbarrier_arrive(barrier, where); }
inline bool mbarrier_test(uint32_t barrier, uint32_t parity, Where where = Where::here()) {
    return cta::mbarrier_test(barrier, parity, where);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity, Where where = Where::here()) {
    cta::mbarrier_wait(barrier, parity, where);
}

#if defined(TAILPACK_NO_BULK_COPY)
constexpr uint32_t kStageArrivals = 32;
inline void stage_begin(uint32_t, uint32_t) { cta::thread->stage_calls++; }
inline void stage_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t, uint64_t, Where where = Where::here()) {
    cta::thread->stage_calls++;
    for (uint32_t at = 16 * (threadIdx.x % 32); at < bytes; at += 512)
        cta::start_lane_copy(to + at, static_cast<const uint8_t*>(from) + at, 16, where);
}
inline void stage_end(uint32_t full, Where where = Where::here()) {
    cta::thread->stage_calls++;
    cta::arrive_after_lane_copies(full, where);
}
#else
constexpr uint32_t kStageArrivals = 1;
inline void stage_begin(uint32_t full, uint32_t bytes, Where where = Where::here()) {
    cta::thread->stage_calls++;
    cta::meet("stage_begin", where, nullptr, 0);
    if (threadIdx.x % 32 != 0) return;
    cta::mbarrier_expect(full, bytes, where);
    cta::mbarrier_arrive(full, where);
}
inline void stage_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t full, uint64_t, Where where = Where::here()) {
    cta::thread->stage_calls++;
    if (threadIdx.x % 32 == 0) cta::start_bulk_copy(to, from, bytes, full, where);
}
inline void stage_end(uint32_t) { cta::thread->stage_calls++; }
#endif
inline uint64_t evict_first_policy() { return 0; }
inline uint64_t evict_last_policy() { return 0; }

inline void lane_copy_16(uint32_t to, const void* from, Where where = Where::here()) {
    cta::start_lane_copy(to, from, 16, where);
}
inline void lane_copies_arrive(uint32_t barrier, Where where = Where::here()) {
    cta::arrive_after_lane_copies(barrier, where);
}

// ---- programmatic dependent launch: launches here run one after the other

inline void launch_dependents() {}
inline void wait_for_dependencies() {}

// ---- arithmetic

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t choice = selector >> 4 * i & 0xf, byte = static_cast<uint32_t>(bytes >> 8 * (choice & 7)) & 0xff;
        result |= (choice & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return result;
}
inline float flush_to_zero(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_fast(float x) { return flush_to_zero(std::exp2(flush_to_zero(x))); }
inline float log2_fast(float x) { return std::log2(flush_to_zero(x)); }
inline float tanh_fast(float x) { return std::tanh(x); }
inline float divide_fast(float a, float b) { return __fdividef(a, b); }
inline float fma_saturated(float a, float b, float c) { return __saturatef(std::fma(a, b, c)); }
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }

// ---- halves in registers

template <typename T> inline float half_of(uint32_t word, int i);
template <> inline float half_of<__nv_bfloat16>(uint32_t word, int i) {
    return __bfloat162float(__ushort_as_bfloat16(static_cast<uint16_t>(word >> 16 * i)));
}
template <> inline float half_of<__half>(uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16 * i)));
}
template <typename T> inline uint32_t pack_halves(float low, float high);
template <> inline uint32_t pack_halves<__nv_bfloat16>(float low, float high) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}
template <> inline uint32_t pack_halves<__half>(float low, float high) {
    return __half_as_ushort(__float2half_rn(low)) | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}
template <typename T> inline uint32_t multiply_halves(uint32_t a, uint32_t b) { // products are exact in f32
    return pack_halves<T>(half_of<T>(a, 0) * half_of<T>(b, 0), half_of<T>(a, 1) * half_of<T>(b, 1));
}
template <typename T> inline void halves_to_floats(uint32_t halves, float& low, float& high) {
    low = half_of<T>(halves, 0);
    high = half_of<T>(halves, 1);
}
// Magnitudes of halves order like their bits, NaN above infinity.
template <typename T> inline uint32_t max_magnitudes(uint32_t a, uint32_t b) {
    const uint32_t low = max(a & 0x7fffu, b & 0x7fffu), high = max(a & 0x7fff0000u, b & 0x7fff0000u);
    return low | high;
}

// ---- tensor cores

inline uint32_t transpose_8x8(uint32_t a, Where where = Where::here()) {
    const auto& rows = cta::meet("transpose_8x8", where, &a, sizeof a);
    const int g = cta::lane_id() / 4, t = cta::lane_id() % 4; // gets column g of rows 2t, 2t+1
    const int shift = 16 * (g % 2);
    return (rows[8 * t + g / 2][0] >> shift & 0xffffu) | (rows[8 * t + 4 + g / 2][0] >> shift & 0xffffu) << 16;
}

// One lane's registers of an mma, as it leaves them in its slot; then c holds the sums.
template <typename Sum> struct MmaLane {
    Sum c[4];
    uint32_t a[4], b[2];
};
// c += a b for matrices held as fragments. An element of A or B has `per_register` values a register; k = the values of a
// row: two registers' worth of 4 lanes. to_a, to_b: value i of a register.
template <int PER_REGISTER, typename Sum, typename Value, typename ToA, typename ToB>
__attribute__((optimize("O3"))) inline void multiply_fragments(cta::Slots& slots, ToA to_a, ToB to_b) {
    constexpr int kDepth = 8 * PER_REGISTER;
    static_assert(sizeof(MmaLane<Sum>) <= sizeof slots[0]);
    Value a[16][kDepth], b[8][kDepth];
    for (int lane = 0; lane < 32; lane++) {
        MmaLane<Sum> mine;
        std::memcpy(&mine, slots[lane], sizeof mine);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < PER_REGISTER; i++)
            for (int half = 0; half < 2; half++) {
                const int k = half * kDepth / 2 + t * PER_REGISTER + i;
                a[g][k] = to_a(mine.a[2 * half], i);
                a[g + 8][k] = to_a(mine.a[2 * half + 1], i);
                b[g][k] = to_b(mine.b[half], i);
            }
    }
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        Sum c[4];
        std::memcpy(c, slots[lane], sizeof c);
        for (int i = 0; i < 4; i++) {
            const Value *row = a[g + 8 * (i / 2)], *column = b[2 * t + i % 2];
            for (int k = 0; k < kDepth; k++) c[i] += static_cast<Sum>(row[k] * column[k]);
        }
        std::memcpy(slots[lane], c, sizeof c);
    }
}
template <int PER_REGISTER, typename Value, typename Sum, typename ToA, typename ToB>
inline void mma(const char* name, Where where, Sum (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], ToA to_a, ToB to_b) {
    const MmaLane<Sum> mine{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const auto& slots = cta::meet(name, where, &mine, sizeof mine, [&](cta::Slots& all) {
        multiply_fragments<PER_REGISTER, Sum, Value>(all, to_a, to_b);
    });
    std::memcpy(c, slots[cta::lane_id()], sizeof c);
}
inline int16_t signed_byte(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }
inline int16_t unsigned_byte(uint32_t word, int i) { return static_cast<uint8_t>(word >> 8 * i); }
inline void mma_s8_s8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                      Where where = Where::here()) {
    mma<4, int16_t>("mma_s8_s8", where, c, {a0, a1, a2, a3}, {b0, b1}, signed_byte, signed_byte);
}
inline void mma_s8_u8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                      Where where = Where::here()) {
    mma<4, int16_t>("mma_s8_u8", where, c, {a0, a1, a2, a3}, {b0, b1}, signed_byte, unsigned_byte);
}
template <typename T>
inline void mma_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                     Where where = Where::here()) {
    mma<2, float>("mma_half", where, c, {a0, a1, a2, a3}, {b0, b1}, half_of<T>, half_of<T>);
}

// ---- broken invariants

inline void trap(Where where = Where::here()) { cta::fail("trap", where); }

// ---- time

inline uint64_t global_nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

} // namespace tailpack

#endif
