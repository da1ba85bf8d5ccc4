// Stand-in for NVIDIA's header.
#pragma once
#include <cstring>

#include "cuda_types.h"

struct __nv_bfloat16 {
    std::uint16_t bits;
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float __bfloat162float(__nv_bfloat16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {0x7fff};
    return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)}; // to nearest, ties to even
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
inline float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }
