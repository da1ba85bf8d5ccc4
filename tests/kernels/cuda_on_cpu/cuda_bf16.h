// Stand-in for NVIDIA's header.
#pragma once
#include <cstring>

#include "cuda_types.h"

struct __nv_bfloat16 {
    std::uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) { // to nearest, ties to even
        std::uint32_t word;
        std::memcpy(&word, &x, sizeof word);
        bits = x != x ? 0x7fff : static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    operator float() const {
        const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &word, sizeof x);
        return x;
    }
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 x;
    x.bits = bits;
    return x;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
inline float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }
