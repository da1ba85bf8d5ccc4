// A step's new rows of keys and values, of one layer or of all, into tail rings or dense pages. One cell for all widths
// and dtypes: it copies bytes, 16 at a time.
//
// Entry n goes to row rows[n] of place places[n] (a tail slot, a page) in every layer. Both are read on the device, so a
// captured launch follows them. A negative place is an entry to be skipped; one behind the end, or such a row, ends the
// kernel with an error, for there is no other memory that may be written.
//
// Grid: layers * sides * num_entries CTAs, sides 1 (keys alone) or 2, entries innermost.
#include "ptx.cuh"

using namespace tailpack;

namespace {

__device__ __forceinline__ int64_t index_at(const uint8_t* indices, int64_t index_bytes, int64_t n) {
    return index_bytes == 8 ? reinterpret_cast<const int64_t*>(indices)[n] : reinterpret_cast<const int32_t*>(indices)[n];
}

} // namespace

// *_from: rows [layers][num_entries][heads][row_chunks * 16 bytes]; *_to: [layers][num_places][num_rows][heads][the same].
// All strides are bytes, all addresses and strides multiples of 16.
extern "C" __global__ void __launch_bounds__(128)
TAILPACK_KERNEL_APPEND(const uint8_t* k_from, int64_t k_from_layer, int64_t k_from_entry, int64_t k_from_head,
                       const uint8_t* v_from, int64_t v_from_layer, int64_t v_from_entry, int64_t v_from_head,
                       uint8_t* k_to, int64_t k_to_layer, int64_t k_to_place, int64_t k_to_row, int64_t k_to_head,
                       uint8_t* v_to, int64_t v_to_layer, int64_t v_to_place, int64_t v_to_row, int64_t v_to_head,
                       const uint8_t* places, const uint8_t* rows, int64_t index_bytes, int64_t sides, int64_t num_entries,
                       int64_t num_places, int64_t num_rows, int64_t heads, int64_t row_chunks) {
    const int64_t n = blockIdx.x % num_entries, side = blockIdx.x / num_entries % sides, layer = blockIdx.x / num_entries / sides;
    const int64_t place = index_at(places, index_bytes, n);
    if (place < 0) return;
    const int64_t row = index_at(rows, index_bytes, n);
    if (place >= num_places || row < 0 || row >= num_rows) trap();

    const bool keys = side == 0;
    const uint8_t* from = keys ? k_from + layer * k_from_layer + n * k_from_entry : v_from + layer * v_from_layer + n * v_from_entry;
    uint8_t* to = keys ? k_to + layer * k_to_layer + place * k_to_place + row * k_to_row
                       : v_to + layer * v_to_layer + place * v_to_place + row * v_to_row;
    const int64_t from_head = keys ? k_from_head : v_from_head, to_head = keys ? k_to_head : v_to_head;
    const int chunks = static_cast<int>(row_chunks), total = static_cast<int>(heads) * chunks;
    for (int i = static_cast<int>(threadIdx.x); i < total; i += 128) {
        const int head = i / chunks, chunk = i % chunks;
        *reinterpret_cast<uint4*>(to + head * to_head + 16 * chunk) = load_stream_16(from + head * from_head + 16 * chunk);
    }
}
