// Stand-in for NVIDIA's header.
#pragma once
#include <cstring>

#include "cuda_types.h"

using __half = _Float16;
using half = __half;
struct __align__(4) __half2 {
    __half x, y;
};
inline __half __ushort_as_half(unsigned short bits) {
    __half x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline unsigned short __half_as_ushort(__half x) {
    unsigned short bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
inline __half __float2half(float x) { return static_cast<__half>(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
inline __half2 __hmul2(__half2 a, __half2 b) { return {static_cast<__half>(a.x * b.x), static_cast<__half>(a.y * b.y)}; }
inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline float __low2float(__half2 v) { return __half2float(v.x); }
inline float __high2float(__half2 v) { return __half2float(v.y); }
