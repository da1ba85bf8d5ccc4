// The threads of CTAs as coroutines, and what they wait for: warp collectives, barriers, mbarriers (mbarrier.h).
//
// A thread runs until it waits. Then another one of its CTA that can run does. Seed 0: in order, a warp as long as it has
// lanes that can run. Other seeds: at random, at times one warp far ahead of the others, and collectives and atomics may
// give the turn away too; so that a missing barrier shows as a wrong result for some seed.
#pragma once

#include <cstdarg>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "coroutine.h"
#include "cuda_types.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace cta {

constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kMaxWarps = 32;
constexpr int kNamedBarriers = 16;

struct Where {
    const char* file;
    int line;
    // As a default argument: the place of the call.
    static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
    bool operator==(const Where& other) const { return line == other.line && std::strcmp(file, other.file) == 0; }
};

struct Thread {
    Context context;
    uint3 index;
    int number;
    bool ended;
    const char* waits_for; // null: it can run
    Where where;
    uint32_t barrier, parity; // of the mbarrier that it waits for
    uint32_t stage_calls;
    int warp() const { return number / 32; }
    int lane() const { return number % 32; }
    uint32_t bit() const { return 1u << lane(); }
};

constexpr int kSlotWords = 12;
using Slots = uint32_t[32][kSlotWords];

// A collective's data lie in slots[generation & 1]. Two are enough: a lane in collective n + 2 means that every lane has
// come to n + 1, so has read what it wanted of n.
struct Warp {
    Slots slots[2];
    uint32_t generation, arrived, alive;
    const char* name;
    Where where;
};

struct NamedBarrier {
    int arrived, expected;
    uint32_t waiting[kMaxWarps];
};

struct Mbarrier {
    uint32_t arrivals, pending, phase; // arrivals of a phase, those still missing, phases completed
    int64_t bytes;                     // expected and not yet there
    uint64_t token;                    // what its 8 bytes hold; other bytes: someone wrote over it
    std::vector<Thread*> waiters;
};

struct Copy {
    struct Piece {
        uint32_t to;
        const uint8_t* from;
        uint32_t bytes;
    };
    std::vector<Piece> pieces;
    uint32_t barrier, bytes_signalled, arrivals_signalled;
};

struct Cta {
    uint3 index;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    uint32_t ready[kMaxWarps], ready_warps; // lanes that can run, warps that have such
    int last_warp, last_lane[kMaxWarps];
    int alive, slice;
    bool next_warp; // the next turn goes to another warp if one can run
    NamedBarrier named[kNamedBarriers];
    std::unordered_map<uint32_t, Mbarrier> mbarriers;
    std::vector<Copy> copies;                    // on their way
    std::unordered_map<int, Copy> lane_copies;   // cp.async of threads that have not ended their stage
    uint8_t* shared;                             // the dynamic part
    std::vector<uint8_t> static_shared;          // the static part while another CTA runs
    std::string broken;                          // what a copy found wrong
};

// ---- the state of the launch that runs

inline Context main_context;
inline Cta* current;   // its threads run now
inline Thread* thread; // runs now; null in main
inline std::function<void()> body;
inline size_t shared_bytes;
inline uint64_t launch_seed, random_state;
inline uint32_t move_chance;  // of 256: the next turn goes to another warp
inline uint64_t idle_polls;   // polls since something happened
inline int num_resident;
inline std::string error;     // of the last launch; empty: it went well

inline bool shuffles() { return launch_seed != 0; }
inline uint32_t random_below(uint32_t n) { // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return static_cast<uint32_t>((random_state * 0x2545F4914F6CDD1Dull >> 32) * n >> 32);
}

__attribute__((format(printf, 1, 2))) inline std::string format(const char* text, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, text);
    std::vsnprintf(line, sizeof line, text, arguments);
    va_end(arguments);
    return line;
}
inline std::string to_string(Where where) {
    const char* slash = std::strrchr(where.file, '/');
    return format("%s:%d", slash ? slash + 1 : where.file, where.line);
}
inline std::string to_string(uint3 index) { return format("(%u, %u, %u)", index.x, index.y, index.z); }

// End the launch with this error. From a thread only.
[[noreturn]] inline void fail(const std::string& message) {
    error = format("block %s thread %s (warp %d, lane %d): ", to_string(current->index).c_str(),
                   to_string(thread->index).c_str(), thread->warp(), thread->lane()) +
            message;
    switch_context(&thread->context, &main_context);
    __builtin_unreachable();
}
[[noreturn]] inline void fail(const std::string& message, Where where) { fail(message + " at " + to_string(where)); }

// ---- turns

inline void deliver_copy(Cta& c); // mbarrier.h

inline void make_ready(Cta& c, int warp, uint32_t lanes) {
    if (lanes == 0) return;
    c.ready[warp] |= lanes;
    c.ready_warps |= 1u << warp;
    idle_polls = 0;
}

inline int next_bit(uint32_t bits, int after) { // cyclic; bits != 0
    const uint32_t above = after >= 31 ? 0 : bits & (kFullWarp << (after + 1));
    return __builtin_ctz(above ? above : bits);
}
inline int random_bit(uint32_t bits) {
    for (uint32_t skip = random_below(static_cast<uint32_t>(__builtin_popcount(bits))); skip > 0; skip--) bits &= bits - 1;
    return __builtin_ctz(bits);
}

// The thread whose turn is next, taken off the ready ones; null: none can run, and no copy is on its way.
inline Thread* pick(Cta& c) {
    if (!c.copies.empty() && shuffles() && random_below(32) == 0) deliver_copy(c);
    while (c.ready_warps == 0) {
        if (c.copies.empty()) return nullptr;
        deliver_copy(c);
    }
    int warp = c.last_warp;
    if (c.ready[warp] == 0 || c.next_warp || (shuffles() && random_below(256) < move_chance))
        warp = shuffles() ? random_bit(c.ready_warps) : next_bit(c.ready_warps, warp);
    c.next_warp = false;
    const int lane = shuffles() ? random_bit(c.ready[warp]) : next_bit(c.ready[warp], c.last_lane[warp]);
    c.last_warp = warp;
    c.last_lane[warp] = lane;
    c.ready[warp] &= ~(1u << lane);
    if (c.ready[warp] == 0) c.ready_warps &= ~(1u << warp);
    return &c.threads[static_cast<size_t>(warp * 32 + lane)];
}

inline void resume(Context* from, Thread* next) {
    thread = next;
    threadIdx = next->index;
    switch_context(from, &next->context);
}

// Give the turn away; returns when this thread has been made ready and picked.
__attribute__((noinline)) inline void give_way() {
    Thread* me = thread;
    Cta& c = *current;
    Thread* next = --c.slice < 0 && num_resident > 1 ? nullptr : pick(c);
    if (next == me) return;
    if (next) resume(&me->context, next);
    else switch_context(&me->context, &main_context);
}
inline void wait_until_ready(const char* name, Where where) {
    Thread* me = thread;
    me->waits_for = name;
    me->where = where;
    give_way();
    me->waits_for = nullptr;
}
// Let others run; they need not be waited for.
inline void let_others_run() {
    make_ready(*current, thread->warp(), thread->bit());
    give_way();
}
inline void maybe_let_others_run() {
    if (shuffles() && random_below(4) == 0) let_others_run();
}
// A look at something that has not happened yet. Looking for ever is a deadlock too.
inline void poll(const char* name, Where where) {
    Cta& c = *current;
    if (idle_polls % 64 == 63 && !c.copies.empty()) deliver_copy(c);
    if (idle_polls > 20000 + 2000 * c.threads.size() * static_cast<size_t>(num_resident)) {
        thread->waits_for = name;
        thread->where = where;
        switch_context(&thread->context, &main_context); // with idle_polls as it is: a deadlock
    }
    const uint64_t polls = idle_polls + 1;
    c.next_warp = true;
    c.slice -= 100;
    thread->waits_for = name;
    thread->where = where;
    make_ready(c, thread->warp(), thread->bit());
    idle_polls = polls;
    give_way();
    thread->waits_for = nullptr;
}

// ---- warp collectives

// All lanes leave `bytes` bytes and wait for the last one, which runs `complete` on all slots. Returns the slots.
template <typename Complete>
inline Slots& meet(const char* name, Where where, const void* data, size_t bytes, Complete complete) {
    Thread* me = thread;
    Warp& warp = current->warps[static_cast<size_t>(me->warp())];
    Slots& slots = warp.slots[warp.generation & 1];
    if (warp.alive != kFullWarp)
        fail(format("divergence: %s, but lanes %08x of the warp have ended", name, ~warp.alive), where);
    if (warp.arrived == 0) {
        warp.name = name;
        warp.where = where;
    } else if (std::strcmp(warp.name, name) != 0 || !(warp.where == where)) {
        fail(format("divergence: lanes %08x of the warp are in %s at %s, this one in %s", warp.arrived, warp.name,
                    to_string(warp.where).c_str(), name),
             where);
    }
    std::memcpy(slots[me->lane()], data, bytes);
    warp.arrived |= me->bit();
    if (warp.arrived != kFullWarp) {
        wait_until_ready(name, where);
        return slots;
    }
    warp.arrived = 0;
    warp.generation++;
    complete(slots);
    make_ready(*current, me->warp(), kFullWarp & ~me->bit());
    maybe_let_others_run();
    return slots;
}
inline Slots& meet(const char* name, Where where, const void* data, size_t bytes) {
    return meet(name, where, data, bytes, [](Slots&) {});
}

// ---- barriers of the CTA

inline void release_if_complete(Cta& c, NamedBarrier& barrier, int expected) {
    if (barrier.arrived == 0 || barrier.arrived != expected) return;
    barrier.arrived = 0;
    for (size_t warp = 0; warp < c.warps.size(); warp++) {
        const uint32_t lanes = barrier.waiting[warp];
        if (lanes == 0) continue;
        const Thread& first = c.threads[warp * 32 + static_cast<size_t>(__builtin_ctz(lanes))];
        for (size_t lane = 0; lane < 32; lane++) {
            const Thread& other = c.threads[warp * 32 + lane];
            if (lanes >> lane & 1 && !(other.where == first.where))
                fail(format("divergence: warp %zu meets one barrier at %s and at ", warp, to_string(first.where).c_str()) +
                     to_string(other.where));
        }
        barrier.waiting[warp] = 0;
        make_ready(c, static_cast<int>(warp), lanes);
    }
}
// bar.sync (waits) and bar.arrive. expected: threads, or 0 for all that have not ended.
inline void named_barrier(int id, int expected, bool waits, const char* name, Where where) {
    if (id < 0 || id >= kNamedBarriers) fail(format("barrier %d of %d", id, kNamedBarriers), where);
    Cta& c = *current;
    NamedBarrier& barrier = c.named[id];
    if (expected % 32 != 0) fail(format("barrier %d for %d threads, not a multiple of 32", id, expected), where);
    if (barrier.arrived > 0 && barrier.expected != expected)
        fail(format("barrier %d for %d threads, others said %d (0: all)", id, expected, barrier.expected), where);
    barrier.expected = expected;
    barrier.arrived++;
    Thread* me = thread;
    me->where = where;
    if (waits) barrier.waiting[me->warp()] |= me->bit();
    release_if_complete(c, barrier, expected ? expected : c.alive);
    if (waits) wait_until_ready(name, where);
}

// ---- from a thread's first turn to its end

inline void thread_entry() {
    body();
    Cta& c = *current;
    Thread* me = thread;
    Warp& warp = c.warps[static_cast<size_t>(me->warp())];
    if (warp.arrived != 0)
        fail(format("divergence: ends while lanes %08x of its warp are in %s", warp.arrived, warp.name), warp.where);
    me->ended = true;
    warp.alive &= ~me->bit();
    c.alive--;
    for (NamedBarrier& barrier : c.named)
        if (barrier.expected == 0) release_if_complete(c, barrier, c.alive);
    idle_polls = 0;
    Thread* next = pick(c);
    if (next) resume(&me->context, next);
    else switch_context(&me->context, &main_context);
    std::abort();
}

} // namespace cta
