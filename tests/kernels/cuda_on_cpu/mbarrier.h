// Shared memory, mbarriers, copies that arrive at them, and copies out.
//
// A 32-bit shared address is kDynamicBase + offset into the launch's dynamic shared memory, or kStaticBase + offset into
// the static variables. Every access through an address is checked.
//
// A copy fills its target with garbage when it starts and with the data at some later turn, at the latest when no thread
// can run. So a reader that does not wait, and a stage that is refilled too early, show as garbage. A copy out reads its
// source as late as that, or when its thread waits for it.
#pragma once

#include <link.h>

#include "scheduler.h"

namespace cta {

constexpr uint32_t kDynamicBase = 0x400, kStaticBase = 0x100000;
constexpr uint32_t kGarbage = 0x7fff7fffu; // NaN as f32, f16 and bf16

inline void fill_with_garbage(uint8_t* to, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) to[i] = static_cast<uint8_t>(kGarbage >> 8 * (i % 4));
}

// This library's thread-local block: the variables declared __shared__.
struct StaticShared {
    uint8_t* begin;
    size_t bytes;
};
inline thread_local int static_shared_anchor;
inline StaticShared find_static_shared() {
    StaticShared found{nullptr, 0};
    static_shared_anchor = 1; // the block exists from its first use on
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* result) {
            for (int i = 0; i < info->dlpi_phnum; i++) {
                uint8_t* begin = static_cast<uint8_t*>(info->dlpi_tls_data);
                const size_t bytes = info->dlpi_phdr[i].p_memsz;
                uint8_t* anchor = reinterpret_cast<uint8_t*>(&static_shared_anchor);
                if (info->dlpi_phdr[i].p_type != PT_TLS || begin == nullptr) continue;
                if (anchor >= begin && anchor < begin + bytes) *static_cast<StaticShared*>(result) = {begin, bytes};
            }
            return 0;
        },
        &found);
    return found;
}
inline StaticShared static_shared;

inline uint8_t* dynamic_shared() { return current->shared; }

inline uint32_t shared_address(const void* pointer, Where where) {
    const uint8_t* p = static_cast<const uint8_t*>(pointer);
    if (p >= current->shared && p <= current->shared + shared_bytes)
        return kDynamicBase + static_cast<uint32_t>(p - current->shared);
    if (p >= static_shared.begin && p <= static_shared.begin + static_shared.bytes)
        return kStaticBase + static_cast<uint32_t>(p - static_shared.begin);
    fail("shared_address of a pointer that is not into shared memory", where);
}
// Where the bytes at a shared address lie.
inline uint8_t* shared_pointer(uint32_t address, size_t bytes, uint32_t alignment, const char* name, Where where) {
    if (address % alignment != 0) fail(format("%s: shared address 0x%x is not a multiple of %u", name, address, alignment), where);
    if (address >= kStaticBase && address - kStaticBase + bytes <= static_shared.bytes)
        return static_shared.begin + (address - kStaticBase);
    if (address >= kDynamicBase && address - kDynamicBase + bytes <= shared_bytes)
        return current->shared + (address - kDynamicBase);
    fail(format("%s: %zu bytes at shared address 0x%x (dynamic offset %lld), outside the %zu dynamic bytes", name, bytes,
                address, static_cast<long long>(address) - kDynamicBase, shared_bytes),
         where);
}

// ---- mbarriers

inline Mbarrier& find_mbarrier(uint32_t address, const char* name, Where where) {
    uint64_t token;
    std::memcpy(&token, shared_pointer(address, 8, 8, name, where), 8);
    const auto found = current->mbarriers.find(address);
    if (found == current->mbarriers.end()) fail(format("%s: no mbarrier was made at 0x%x", name, address), where);
    if (found->second.token != token) fail(format("%s: the mbarrier at 0x%x was written over", name, address), where);
    return found->second;
}
inline void mbarrier_init(uint32_t address, uint32_t arrivals, Where where) {
    uint8_t* at = shared_pointer(address, 8, 8, "mbarrier_init", where);
    uint64_t token;
    std::memcpy(&token, at, 8);
    const auto found = current->mbarriers.find(address);
    if (found != current->mbarriers.end() && found->second.token == token)
        fail(format("mbarrier_init: there is an mbarrier at 0x%x already", address), where);
    if (arrivals == 0 || arrivals >= 1u << 20) fail(format("mbarrier_init: %u arrivals", arrivals), where);
    token = 0x7fffba44e70000ull ^ static_cast<uint64_t>(address) << 40 ^ 0xffull << 56; // NaNs if read as floats
    current->mbarriers[address] = {arrivals, arrivals, 0, 0, token, {}};
    std::memcpy(at, &token, 8);
}
inline void complete_phase_if_done(Cta& c, Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
    for (Thread* waiter : barrier.waiters) make_ready(c, waiter->warp(), waiter->bit());
    barrier.waiters.clear();
}
inline void mbarrier_expect(uint32_t address, uint32_t bytes, Where where) {
    find_mbarrier(address, "mbarrier expect_tx", where).bytes += bytes;
}
inline void mbarrier_arrive(uint32_t address, Where where) {
    Mbarrier& barrier = find_mbarrier(address, "mbarrier_arrive", where);
    if (barrier.pending == 0)
        fail(format("mbarrier_arrive: all %u arrivals of phase %u at 0x%x are there", barrier.arrivals, barrier.phase, address),
             where);
    barrier.pending--;
    idle_polls = 0;
    complete_phase_if_done(*current, barrier);
    maybe_let_others_run();
}
inline bool mbarrier_done(uint32_t address, uint32_t parity, const char* name, Where where) {
    if (parity > 1) fail(format("%s: parity %u", name, parity), where);
    return (find_mbarrier(address, name, where).phase & 1) != parity;
}
inline bool mbarrier_test(uint32_t address, uint32_t parity, Where where) {
    if (mbarrier_done(address, parity, "mbarrier_test", where)) return true;
    thread->barrier = address;
    thread->parity = parity;
    poll("mbarrier_test", where);
    return mbarrier_done(address, parity, "mbarrier_test", where);
}
inline void mbarrier_wait(uint32_t address, uint32_t parity, Where where) {
    maybe_let_others_run();
    // Tested anew after each phase: a waiter that comes late may find a phase of the same parity begun, as on a GPU.
    while (!mbarrier_done(address, parity, "mbarrier_wait", where)) {
        thread->barrier = address;
        thread->parity = parity;
        find_mbarrier(address, "mbarrier_wait", where).waiters.push_back(thread);
        wait_until_ready("mbarrier_wait", where);
    }
}

// ---- copies into shared memory

inline void check_copy(uint32_t to, const void* from, uint32_t bytes, Where where) {
    if (bytes == 0 || bytes % 16 != 0) fail(format("stage_copy: %u bytes, not a multiple of 16", bytes), where);
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail(format("stage_copy: source %p is not a multiple of 16", from), where);
    fill_with_garbage(shared_pointer(to, bytes, 16, "stage_copy", where), bytes);
}
// cp.async.bulk: its bytes are signalled at the mbarrier.
inline void start_bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Where where) {
    check_copy(to, from, bytes, where);
    find_mbarrier(barrier, "stage_copy", where);
    current->copies.push_back({{{to, static_cast<const uint8_t*>(from), bytes}}, barrier, bytes, 0});
}
// cp.async of this thread, and the arrival that follows all of them.
inline void start_lane_copy(uint32_t to, const void* from, uint32_t bytes, Where where) {
    check_copy(to, from, bytes, where);
    current->lane_copies[thread->number].pieces.push_back({to, static_cast<const uint8_t*>(from), bytes});
}
inline void arrive_after_lane_copies(uint32_t barrier, Where where) {
    find_mbarrier(barrier, "stage_end", where);
    Copy copy = std::move(current->lane_copies[thread->number]);
    current->lane_copies.erase(thread->number);
    copy.barrier = barrier;
    copy.bytes_signalled = 0;
    copy.arrivals_signalled = 1;
    current->copies.push_back(std::move(copy));
}

// May run outside any thread.
inline void deliver_copy(Cta& c) {
    const size_t chosen = shuffles() ? random_below(static_cast<uint32_t>(c.copies.size())) : 0;
    const Copy copy = std::move(c.copies[chosen]);
    c.copies.erase(c.copies.begin() + static_cast<std::ptrdiff_t>(chosen));
    for (const Copy::Piece& piece : copy.pieces) {
        uint8_t* to = piece.to >= kStaticBase ? static_shared.begin + (piece.to - kStaticBase)
                                              : c.shared + (piece.to - kDynamicBase);
        std::memcpy(to, piece.from, piece.bytes);
    }
    Mbarrier& barrier = c.mbarriers.at(copy.barrier);
    if (barrier.pending < copy.arrivals_signalled) {
        c.broken = format("stage_end: all %u arrivals of phase %u at 0x%x are there", barrier.arrivals, barrier.phase,
                          copy.barrier);
        c.ready_warps = 0; // nothing runs any more, and the launch ends with this
        c.copies.clear();
        return;
    }
    barrier.bytes -= copy.bytes_signalled;
    barrier.pending -= copy.arrivals_signalled;
    idle_polls = 0;
    complete_phase_if_done(c, barrier);
}

} // namespace cta
