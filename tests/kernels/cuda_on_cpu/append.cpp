// kernels/csrc/append.cu with the kernel's own parameters behind the number of CTAs. Built by test_append_on_cpu.py.
#include "cta.h"

#define TAILPACK_KERNEL_APPEND append_rows
#include "append.cu"

extern "C" void append(int64_t ctas, const uint8_t* k_from, int64_t a, int64_t b, int64_t c, const uint8_t* v_from, int64_t d,
                       int64_t e, int64_t f, uint8_t* k_to, int64_t g, int64_t h, int64_t i, int64_t j, uint8_t* v_to, int64_t k,
                       int64_t l, int64_t m, int64_t n, const uint8_t* places, const uint8_t* rows, int64_t index_bytes,
                       int64_t sides, int64_t num_entries, int64_t num_places, int64_t num_rows, int64_t heads,
                       int64_t row_chunks) {
    cta::launch(static_cast<unsigned>(ctas), 128, 0, [=] {
        append_rows(k_from, a, b, c, v_from, d, e, f, k_to, g, h, i, j, v_to, k, l, m, n, places, rows, index_bytes, sides,
                    num_entries, num_places, num_rows, heads, row_chunks);
    });
}
