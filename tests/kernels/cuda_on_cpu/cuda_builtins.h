// Stand-ins for CUDA's built-in functions. Warp functions take the full mask only.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "mbarrier.h"

constexpr int warpSize = 32;

template <typename To, typename From> inline To cta_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// ---- barriers and warp collectives

inline void __syncthreads(cta::Where where = cta::Where::here()) {
    cta::named_barrier(0, 0, true, "__syncthreads", where);
}

namespace cta {
inline void check_mask(uint32_t mask, const char* name, Where where) {
    if (mask != kFullWarp) fail(format("%s: mask %08x, only the full warp is known here", name, mask), where);
}
// source(lane): the lane whose value this one gets.
template <typename T> inline T exchange(const char* name, uint32_t mask, T value, int width, int source, Where where) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    check_mask(mask, name, where);
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail(format("%s: width %d", name, width), where);
    const Slots& slots = meet(name, where, &value, sizeof value);
    std::memcpy(&value, slots[source], sizeof value);
    return value;
}
template <typename T, typename Reduce>
inline T reduce(const char* name, uint32_t mask, T value, Reduce combine, Where where) {
    check_mask(mask, name, where);
    const Slots& slots = meet(name, where, &value, sizeof value, [&](Slots& all) {
        T sum = cta_bits<T>(all[0][0]);
        for (int lane = 1; lane < 32; lane++) sum = combine(sum, cta_bits<T>(all[lane][0]));
        std::memcpy(all[0], &sum, sizeof sum);
    });
    return cta_bits<T>(slots[0][0]);
}
inline uint32_t ballot(const char* name, uint32_t mask, bool predicate, Where where) {
    check_mask(mask, name, where);
    const uint32_t value = predicate;
    const Slots& slots = meet(name, where, &value, sizeof value, [](Slots& all) {
        uint32_t bits = 0;
        for (int lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
        all[0][0] = bits;
    });
    return slots[0][0];
}
inline int lane_id() { return thread->lane(); }
} // namespace cta

inline void __syncwarp(unsigned mask = cta::kFullWarp, cta::Where where = cta::Where::here()) {
    cta::check_mask(mask, "__syncwarp", where);
    cta::meet("__syncwarp", where, nullptr, 0);
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, cta::Where where = cta::Where::here()) {
    const int lane = cta::lane_id();
    return cta::exchange("__shfl_sync", mask, value, width, (lane & ~(width - 1)) | (source & (width - 1)), where);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, cta::Where where = cta::Where::here()) {
    if (lane_mask < 0 || lane_mask >= width) cta::fail(cta::format("__shfl_xor_sync: lane mask %d of width %d", lane_mask, width), where);
    return cta::exchange("__shfl_xor_sync", mask, value, width, cta::lane_id() ^ lane_mask, where);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, cta::Where where = cta::Where::here()) {
    const int lane = cta::lane_id(), source = lane - static_cast<int>(delta);
    return cta::exchange("__shfl_up_sync", mask, value, width, source < (lane & ~(width - 1)) ? lane : source, where);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, cta::Where where = cta::Where::here()) {
    const int lane = cta::lane_id(), source = lane + static_cast<int>(delta);
    return cta::exchange("__shfl_down_sync", mask, value, width, source > (lane | (width - 1)) ? lane : source, where);
}
#define CTA_REDUCE(NAME, TYPE, RESULT)                                                                                 \
    inline TYPE NAME(unsigned mask, TYPE value, cta::Where where = cta::Where::here()) {                               \
        return cta::reduce(#NAME, mask, value, [](TYPE a, TYPE b) -> TYPE { return RESULT; }, where);                  \
    }
CTA_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
CTA_REDUCE(__reduce_max_sync, int, a > b ? a : b)
CTA_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
CTA_REDUCE(__reduce_min_sync, int, a < b ? a : b)
CTA_REDUCE(__reduce_add_sync, unsigned, a + b)
CTA_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
CTA_REDUCE(__reduce_or_sync, unsigned, a | b)
CTA_REDUCE(__reduce_and_sync, unsigned, a & b)
CTA_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef CTA_REDUCE
inline unsigned __ballot_sync(unsigned mask, int predicate, cta::Where where = cta::Where::here()) {
    return cta::ballot("__ballot_sync", mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate, cta::Where where = cta::Where::here()) {
    return cta::ballot("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, cta::Where where = cta::Where::here()) {
    return cta::ballot("__all_sync", mask, predicate != 0, where) == cta::kFullWarp;
}
inline unsigned __activemask() { return cta::kFullWarp; } // kernels here keep their warps together

// ---- memory

template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline T __ldca(const T* p) { return *p; }
template <typename T> inline T __ldcs(const T* p) { return *p; }
template <typename T> inline T __ldlu(const T* p) { return *p; }
template <typename T> inline T __ldcv(const T* p) { return *p; }
template <typename T> inline void __stcg(T* p, std::common_type_t<T> value) { *p = value; }
template <typename T> inline void __stcs(T* p, std::common_type_t<T> value) { *p = value; }
template <typename T> inline void __stwb(T* p, std::common_type_t<T> value) { *p = value; }
template <typename T> inline void __stwt(T* p, std::common_type_t<T> value) { *p = value; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
// A loop that looks at memory until another thread writes it must call this, or it never ends here.
inline void __nanosleep(unsigned, cta::Where where = cta::Where::here()) { cta::poll("__nanosleep", where); }

#define CTA_ATOMIC(NAME, TYPE, RESULT)                                                                                 \
    inline TYPE NAME(TYPE* address, TYPE value) {                                                                      \
        cta::maybe_let_others_run();                                                                                   \
        const TYPE old = *address;                                                                                     \
        *address = static_cast<TYPE>(RESULT);                                                                          \
        return old;                                                                                                    \
    }
#define CTA_INTEGER_ATOMICS(TYPE)                                                                                      \
    CTA_ATOMIC(atomicMax, TYPE, old > value ? old : value)                                                             \
    CTA_ATOMIC(atomicMin, TYPE, old < value ? old : value)                                                             \
    CTA_ATOMIC(atomicExch, TYPE, value)                                                                                \
    CTA_ATOMIC(atomicOr, TYPE, old | value)                                                                            \
    CTA_ATOMIC(atomicAnd, TYPE, old & value)                                                                           \
    CTA_ATOMIC(atomicXor, TYPE, old ^ value)                                                                           \
    inline TYPE atomicCAS(TYPE* address, TYPE compare, TYPE value) {                                                   \
        cta::maybe_let_others_run();                                                                                   \
        const TYPE old = *address;                                                                                     \
        if (old == compare) *address = value;                                                                          \
        return old;                                                                                                    \
    }
CTA_INTEGER_ATOMICS(int)
CTA_INTEGER_ATOMICS(unsigned)
CTA_INTEGER_ATOMICS(unsigned long long)
CTA_ATOMIC(atomicMax, long long, old > value ? old : value)
CTA_ATOMIC(atomicMin, long long, old < value ? old : value)
CTA_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(value))
CTA_ATOMIC(atomicAdd, unsigned, old + value)
CTA_ATOMIC(atomicAdd, unsigned long long, old + value)
CTA_ATOMIC(atomicAdd, float, old + value)
CTA_ATOMIC(atomicAdd, double, old + value)
CTA_ATOMIC(atomicSub, int, static_cast<unsigned>(old) - static_cast<unsigned>(value))
CTA_ATOMIC(atomicSub, unsigned, old - value)
CTA_ATOMIC(atomicExch, float, value)
CTA_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1)
#undef CTA_INTEGER_ATOMICS
#undef CTA_ATOMIC

// ---- arithmetic. Built with -ffp-contract=off, so a * b + c is rounded twice, unlike on a GPU where it may be an fma.

template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmax(static_cast<C>(a), static_cast<C>(b));
    else return static_cast<C>(a) > static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}
template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmin(static_cast<C>(a), static_cast<C>(b));
    else return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}

inline float __uint_as_float(unsigned x) { return cta_bits<float>(x); }
inline float __int_as_float(int x) { return cta_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cta_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cta_bits<int>(x); }
inline double __longlong_as_double(long long x) { return cta_bits<double>(x); }
inline long long __double_as_longlong(double x) { return cta_bits<long long>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f && !std::isinf(b) ? 0.0f * a : a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; } // NaN: 0
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }

namespace cta {
template <typename Integer> inline Integer to_integer(float x) { // x is whole, infinite or NaN
    using Limits = std::numeric_limits<Integer>;
    if (x != x) return 0;
    if (x >= std::ldexp(1.0f, Limits::digits)) return Limits::max();
    if (x <= static_cast<float>(Limits::min())) return Limits::min();
    return static_cast<Integer>(x);
}
} // namespace cta
inline int __float2int_rn(float x) { return cta::to_integer<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return cta::to_integer<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return cta::to_integer<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return cta::to_integer<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return cta::to_integer<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return cta::to_integer<unsigned>(std::trunc(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 4; i++) sum += (a >> 8 * i & 0xffu) * (b >> 8 * i & 0xffu);
    return sum;
}
inline int __dp4a(int a, int b, int c) {
    unsigned sum = static_cast<unsigned>(c);
    for (int i = 0; i < 4; i++)
        sum += static_cast<unsigned>(static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i));
    return static_cast<int>(sum);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
