// Written by `python -m kernels.tables` from kernels/widths.py and kernels/tables.py; do not edit.
// Signs<D>::word(w): bit j is 1 where the diagonal D of the rotation is negative at element 32 w + j.
// Grid<D, BITS>: code = sign << (BITS - 1) | i; sign 1 is negative; magnitude i is step() * (T(i) - 1/2).
// boundary(i), i < kLevels - 1: between magnitudes i and i + 1, in units of the rotated unit coordinate y.
// A tie goes to the upper cell: y >= 0 counts b <= y, y < 0 counts b < -y, and 0.0 and -0.0 have sign 0.
#pragma once

#define TAILPACK_WIDTHS(X) X(64) X(128) X(256) X(512)
#define TAILPACK_BITS(X) X(2) X(3) X(4)

namespace tailpack {

template <int D> struct Signs;
template <int D, int BITS> struct Grid;

template <> struct Signs<64> {
    static __host__ __device__ constexpr unsigned word(int i) {
        switch (i) {
            case 0: return 0x0a3a23cau;
            default: return 0x0a87b936u;
        }
    }
};

template <> struct Grid<64, 2> {
    static constexpr int kLevels = 2;
    static __host__ __device__ constexpr float step() { return 0.00179422251f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 32;
            default: return 105;
        }
    }
    static __host__ __device__ constexpr float boundary(int) { return 0.122007132f; }
};

template <> struct Grid<64, 3> {
    static constexpr int kLevels = 4;
    static __host__ __device__ constexpr float step() { return 0.00226420932f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 14;
            case 1: return 42;
            case 2: return 74;
            default: return 117;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0622657575f;
            case 1: return 0.130192041f;
            default: return 0.215099886f;
        }
    }
};

template <> struct Grid<64, 4> {
    static constexpr int kLevels = 8;
    static __host__ __device__ constexpr float step() { return 0.00296015386f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 6;
            case 1: return 17;
            case 2: return 28;
            case 3: return 40;
            case 4: return 53;
            case 5: return 68;
            case 6: return 86;
            default: return 112;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0325616933f;
            case 1: return 0.0651233867f;
            case 2: return 0.0991651565f;
            case 3: return 0.136167079f;
            case 4: return 0.177609235f;
            case 5: return 0.226451769f;
            default: return 0.291575164f;
        }
    }
};

template <> struct Signs<128> {
    static __host__ __device__ constexpr unsigned word(int i) {
        switch (i) {
            case 0: return 0x9c0df36bu;
            case 1: return 0x2fbbeeebu;
            case 2: return 0xf808af37u;
            default: return 0xa64fe38fu;
        }
    }
};

template <> struct Grid<128, 2> {
    static constexpr int kLevels = 2;
    static __host__ __device__ constexpr float step() { return 0.00163240556f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 25;
            default: return 82;
        }
    }
    static __host__ __device__ constexpr float boundary(int) { return 0.0865174979f; }
};

template <> struct Grid<128, 3> {
    static constexpr int kLevels = 4;
    static __host__ __device__ constexpr float step() { return 0.00160418707f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 14;
            case 1: return 42;
            case 2: return 74;
            default: return 118;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0441151448f;
            case 1: return 0.0922407582f;
            default: return 0.153199866f;
        }
    }
};

template <> struct Grid<128, 4> {
    static constexpr int kLevels = 8;
    static __host__ __device__ constexpr float step() { return 0.00209445041f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 6;
            case 1: return 17;
            case 2: return 28;
            case 3: return 40;
            case 4: return 53;
            case 5: return 68;
            case 6: return 87;
            default: return 114;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0230389535f;
            case 1: return 0.0460779071f;
            case 2: return 0.0701640919f;
            case 3: return 0.0963447168f;
            case 4: return 0.125667021f;
            case 5: return 0.161272675f;
            default: return 0.209445044f;
        }
    }
};

template <> struct Signs<256> {
    static __host__ __device__ constexpr unsigned word(int i) {
        switch (i) {
            case 0: return 0x15ee1d56u;
            case 1: return 0x7feb6390u;
            case 2: return 0xfed6590bu;
            case 3: return 0xa84e3ec0u;
            case 4: return 0x6f675595u;
            case 5: return 0x95e981a1u;
            case 6: return 0x70334a24u;
            default: return 0xf3505a3fu;
        }
    }
};

template <> struct Grid<256, 2> {
    static constexpr int kLevels = 2;
    static __host__ __device__ constexpr float step() { return 0.000775585533f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 37;
            default: return 122;
        }
    }
    static __host__ __device__ constexpr float boundary(int) { return 0.0612712577f; }
};

template <> struct Grid<256, 3> {
    static constexpr int kLevels = 4;
    static __host__ __device__ constexpr float step() { return 0.0012226681f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 13;
            case 1: return 39;
            case 2: return 69;
            default: return 110;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0311780367f;
            case 1: return 0.0654127449f;
            default: return 0.108817458f;
        }
    }
};

template <> struct Grid<256, 4> {
    static constexpr int kLevels = 8;
    static __host__ __device__ constexpr float step() { return 0.00149047282f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 6;
            case 1: return 17;
            case 2: return 28;
            case 3: return 40;
            case 4: return 53;
            case 5: return 68;
            case 6: return 87;
            default: return 114;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0163952f;
            case 1: return 0.0327904001f;
            case 2: return 0.0499308407f;
            case 3: return 0.0685617477f;
            case 4: return 0.0894283652f;
            case 5: return 0.114766404f;
            default: return 0.149047285f;
        }
    }
};

template <> struct Signs<512> {
    static __host__ __device__ constexpr unsigned word(int i) {
        switch (i) {
            case 0: return 0x7e794626u;
            case 1: return 0xadd2b757u;
            case 2: return 0xa7ef9104u;
            case 3: return 0xf7c0f56cu;
            case 4: return 0xad830d8du;
            case 5: return 0x5c7e5ad6u;
            case 6: return 0xa695d2b9u;
            case 7: return 0x06c478f0u;
            case 8: return 0x1a64d3e7u;
            case 9: return 0xc60c5d86u;
            case 10: return 0x094c2192u;
            case 11: return 0x91e923adu;
            case 12: return 0x5eebd110u;
            case 13: return 0x6c7282bcu;
            case 14: return 0x1e95172au;
            default: return 0x9aed3712u;
        }
    }
};

template <> struct Grid<512, 2> {
    static constexpr int kLevels = 2;
    static __host__ __device__ constexpr float step() { return 0.000562860863f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 36;
            default: return 119;
        }
    }
    static __host__ __device__ constexpr float boundary(int) { return 0.0433402881f; }
};

template <> struct Grid<512, 3> {
    static constexpr int kLevels = 4;
    static __host__ __device__ constexpr float step() { return 0.000866364106f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 13;
            case 1: return 39;
            case 2: return 69;
            default: return 110;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0220922846f;
            case 1: return 0.0463504791f;
            default: return 0.0771064088f;
        }
    }
};

template <> struct Grid<512, 4> {
    static constexpr int kLevels = 8;
    static __host__ __device__ constexpr float step() { return 0.00105243188f; }
    static __host__ __device__ constexpr signed char T(int i) {
        switch (i) {
            case 0: return 6;
            case 1: return 17;
            case 2: return 28;
            case 3: return 40;
            case 4: return 53;
            case 5: return 68;
            case 6: return 87;
            default: return 115;
        }
    }
    static __host__ __device__ constexpr float boundary(int i) {
        switch (i) {
            case 0: return 0.0115767503f;
            case 1: return 0.0231535006f;
            case 2: return 0.0352564678f;
            case 3: return 0.0484118648f;
            case 4: return 0.0631459132f;
            case 5: return 0.0810372531f;
            default: return 0.105769403f;
        }
    }
};

}  // namespace tailpack
