// Runs CUDA kernels on a CPU: whole CTAs of up to 1024 threads, each thread a coroutine.
//
// To run a kernel of kernels/csrc here:
//   1. Write NAME.cpp in this folder. Include "cta.h" first, then the kernel's own headers. cta.h brings ptx.cuh of this
//      folder, whose guard keeps kernels/csrc/ptx.cuh out; the kernel must reach the machine through its functions, CUDA
//      built-ins (cuda_builtins.h) and plain C++ alone, and use TAILPACK_DYNAMIC_SHARED(name) for dynamic shared memory.
//   2. Give each kernel, or each cell of it, an extern "C" void function that launches it:
//        extern "C" void attend(unsigned ctas, DecodeArgs args) {
//            cta::launch(ctas, 320, kSharedBytes, [=] { attend_kernel<128, 4>(args); });
//        }
//   3. In the test: emulator = Emulator.build("NAME.cpp", ["-DX=1"]) of tests/kernels/emulator.py, then
//      emulator.call("attend", 3, args, seed=7). It raises EmulatorError with the message of whatever went wrong.
//
// What it finds: wrong arithmetic, indices, byte order and fragments; collectives that not all 32 lanes reach; deadlocks,
// naming who waits where; wrong use of mbarriers; addresses outside shared memory; with seeds other than 0, missing
// barriers and waits (scheduler.h says how). A few CTAs are resident at once, so that they share work queues.
// What it does not find: what only the compiler or the machine does, memory ordering, global accesses out of bounds,
// partial masks (refused), loops that poll memory without __nanosleep (they end at the time limit).
#pragma once

#include <csignal>
#include <ctime>
#include <stdexcept>

#include "cuda_builtins.h"
#include "ptx.cuh"

namespace cta {

constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr uint32_t kResidentCtas = 3;
inline uint32_t time_limit_s = 120;
inline uint64_t next_seed;

// ---- faults and the time limit

inline void on_signal(int signal, siginfo_t* info, void*) {
    if (thread == nullptr) {
        std::signal(signal, SIG_DFL);
        std::raise(signal);
        return;
    }
    if (signal == SIGXCPU) fail(format("still runs after %u s", time_limit_s));
    if (signal == SIGFPE) fail("integer division by zero");
    const uint8_t* address = static_cast<const uint8_t*>(info->si_addr);
    const std::ptrdiff_t offset = address - current->shared;
    if (offset >= -65536 && offset < static_cast<std::ptrdiff_t>(shared_bytes) + 65536)
        fail(format("access to byte %td of %zu bytes of dynamic shared memory", offset, shared_bytes));
    fail(format("access to address %p", info->si_addr));
}

// While it lives, faults and the end of the time limit end the launch with a message, not the process.
class SignalGuard {
  public:
    SignalGuard() : stack_(std::make_unique<char[]>(kBytes)) {
        stack_t stack{};
        stack.ss_sp = stack_.get();
        stack.ss_size = kBytes;
        sigaltstack(&stack, &old_stack_);
        struct sigaction action {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < kSignals; i++) sigaction(kNumbers[i], &action, &old_actions_[i]);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event._sigev_un._tid = gettid();
        event.sigev_signo = SIGXCPU;
        has_timer_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
        itimerspec limit{};
        limit.it_value.tv_sec = time_limit_s;
        if (has_timer_) timer_settime(timer_, 0, &limit, nullptr);
    }
    ~SignalGuard() {
        if (has_timer_) timer_delete(timer_);
        for (int i = 0; i < kSignals; i++) sigaction(kNumbers[i], &old_actions_[i], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }
    SignalGuard(const SignalGuard&) = delete;

  private:
    static constexpr size_t kBytes = 1 << 16;
    static constexpr int kSignals = 4, kNumbers[kSignals] = {SIGSEGV, SIGBUS, SIGFPE, SIGXCPU};
    std::unique_ptr<char[]> stack_;
    stack_t old_stack_{};
    struct sigaction old_actions_[kSignals];
    timer_t timer_{};
    bool has_timer_;
};

// ---- CTAs

// Dynamic shared memory that ends at a page that faults, and begins behind one (up to the 127 bytes of alignment).
class SharedMemory {
  public:
    explicit SharedMemory(size_t bytes) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), aligned = (bytes + 127) / 128 * 128;
        const size_t pages = (aligned + page - 1) / page * page;
        mapped_ = pages + 2 * page;
        memory_ = static_cast<uint8_t*>(mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (memory_ == MAP_FAILED || (pages > 0 && mprotect(memory_ + page, pages, PROT_READ | PROT_WRITE) != 0))
            throw std::runtime_error("no memory for the CTAs");
        begin_ = memory_ + page + pages - aligned;
    }
    ~SharedMemory() { munmap(memory_, mapped_); }
    SharedMemory(const SharedMemory&) = delete;
    uint8_t* begin() const { return begin_; }

  private:
    uint8_t *memory_, *begin_;
    size_t mapped_;
};

// A place for a CTA; CTAs pass through it one after the other.
struct Resident {
    SharedMemory memory;
    Cta cta;
    bool runs = false;
    explicit Resident(size_t bytes) : memory(bytes) {}
};

inline void start_cta(Resident& resident, size_t place, uint3 index) {
    const size_t num_threads = size_t{blockDim.x} * blockDim.y * blockDim.z;
    Cta& c = resident.cta;
    c = Cta{};
    c.index = index;
    c.threads.resize(num_threads);
    c.warps.resize(num_threads / 32);
    c.alive = static_cast<int>(num_threads);
    c.shared = resident.memory.begin();
    fill_with_garbage(c.shared, shared_bytes);
    c.static_shared.resize(static_shared.bytes);
    fill_with_garbage(c.static_shared.data(), c.static_shared.size());
    for (size_t i = 0; i < num_threads; i++) {
        Thread& t = c.threads[i];
        const unsigned number = static_cast<unsigned>(i);
        t.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
        t.number = static_cast<int>(i);
        make_context(t.context, stack_top(place * num_threads + i), thread_entry);
    }
    for (size_t warp = 0; warp < c.warps.size(); warp++) {
        c.warps[warp].alive = kFullWarp;
        make_ready(c, static_cast<int>(warp), kFullWarp);
        c.last_lane[warp] = 31;
    }
    c.last_warp = static_cast<int>(c.warps.size()) - 1;
    resident.runs = true;
}

// Let its threads run until it has ended, can't go on, or has had its share. False: nothing can run.
inline bool run_cta(Cta& c) {
    current = &c;
    blockIdx = c.index;
    if (static_shared.bytes > 0) std::memcpy(static_shared.begin, c.static_shared.data(), static_shared.bytes);
    c.slice = shuffles() ? 64 << random_below(10) : 1 << 14;
    bool went = false;
    if (Thread* next = pick(c)) {
        resume(&main_context, next);
        went = true;
    }
    thread = nullptr;
    if (static_shared.bytes > 0) std::memcpy(c.static_shared.data(), static_shared.begin, static_shared.bytes);
    return went;
}

inline std::string describe_waiters(Cta& c) {
    std::string text;
    for (size_t warp = 0; warp < c.warps.size(); warp++) {
        uint32_t left = kFullWarp;
        while (left != 0) { // one line for the lanes that wait alike
            const Thread& first = c.threads[warp * 32 + static_cast<size_t>(__builtin_ctz(left))];
            uint32_t lanes = 0;
            for (size_t lane = 0; lane < 32; lane++) {
                const Thread& t = c.threads[warp * 32 + lane];
                const bool same = t.ended == first.ended && t.waits_for == first.waits_for &&
                                  (!t.waits_for || (t.where == first.where && t.barrier == first.barrier && t.parity == first.parity));
                if (same) lanes |= 1u << lane;
            }
            lanes &= left;
            left &= ~lanes;
            text += format("\n  warp %2zu lanes %08x: ", warp, lanes);
            if (first.ended) text += "ended";
            else if (!first.waits_for) text += "can run";
            else text += std::string(first.waits_for) + " at " + to_string(first.where);
            if (first.waits_for && std::strncmp(first.waits_for, "mbarrier", 8) == 0) {
                const Mbarrier& b = c.mbarriers.at(first.barrier);
                text += format(" for parity %u of 0x%x (dynamic offset %lld), which is in phase %u and lacks %u of %u arrivals and %lld bytes",
                               first.parity, first.barrier, static_cast<long long>(first.barrier) - kDynamicBase, b.phase,
                               b.pending, b.arrivals, static_cast<long long>(b.bytes));
            }
        }
    }
    return text;
}

inline void check_end(const Cta& c) {
    const std::string block = "block " + to_string(c.index);
    if (!c.copies.empty() || !c.lane_copies.empty())
        throw std::runtime_error(block + ": ended while copies into its shared memory were on their way");
    for (const Thread& t : c.threads)
        if (t.stage_calls != c.threads[static_cast<size_t>(t.warp()) * 32].stage_calls)
            throw std::runtime_error(block + format(": lanes 0 and %d of warp %d called stage_begin, stage_copy and stage_end "
                                                    "differently often", t.lane(), t.warp()));
}

inline void run_grid() {
    std::vector<uint3> waiting;
    for (unsigned z = gridDim.z; z-- > 0;)
        for (unsigned y = gridDim.y; y-- > 0;)
            for (unsigned x = gridDim.x; x-- > 0;) waiting.push_back({x, y, z});
    if (shuffles())
        for (size_t i = waiting.size(); i > 1; i--) std::swap(waiting[i - 1], waiting[random_below(static_cast<uint32_t>(i))]);
    std::vector<std::unique_ptr<Resident>> places;
    while (places.size() < kResidentCtas && places.size() < waiting.size())
        places.push_back(std::make_unique<Resident>(shared_bytes));
    size_t stuck = 0;
    for (size_t turn = 0;; turn++) {
        num_resident = 0;
        for (size_t i = 0; i < places.size(); i++) {
            if (!places[i]->runs && !waiting.empty()) {
                start_cta(*places[i], i, waiting.back());
                waiting.pop_back();
            }
            num_resident += places[i]->runs;
        }
        if (num_resident == 0) return;
        Resident& chosen = *places[(shuffles() ? random_below(static_cast<uint32_t>(places.size())) : turn) % places.size()];
        if (!chosen.runs) continue;
        Cta& c = chosen.cta;
        const bool went = run_cta(c);
        if (!error.empty()) return;
        if (!c.broken.empty()) throw std::runtime_error("block " + to_string(c.index) + ": " + c.broken);
        if (c.alive == 0) {
            check_end(c);
            chosen.runs = false;
            stuck = 0;
            continue;
        }
        stuck = went ? 0 : stuck + 1;
        const bool polls_for_ever = idle_polls > 20000 + 2000 * c.threads.size() * static_cast<size_t>(num_resident);
        if (stuck > 0 || polls_for_ever) {
            bool divergence = false;
            for (const Warp& warp : c.warps) divergence |= warp.arrived != 0;
            throw std::runtime_error("block " + to_string(c.index) + ": deadlock" +
                                     (divergence ? " (divergence: some lanes of a warp are in a collective, others are not)" : "") +
                                     describe_waiters(c));
        }
    }
}

// Run the kernel on a grid; an error is left for cta_error. threads: a multiple of 32.
template <typename Kernel> inline void launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, Kernel kernel) {
    if (!error.empty()) return; // of an earlier launch of the same call
    SignalGuard guard;
    const size_t num_threads = size_t{block.x} * block.y * block.z;
    try {
        if (num_threads == 0 || num_threads % 32 != 0 || num_threads > 32 * kMaxWarps || block.x % 32 != 0)
            throw std::runtime_error(format("blocks of %zu threads", num_threads));
        if (dynamic_shared_bytes > kMaxSharedBytes)
            throw std::runtime_error(format("%zu bytes of shared memory, at most %zu", dynamic_shared_bytes, kMaxSharedBytes));
        gridDim = grid;
        blockDim = block;
        shared_bytes = dynamic_shared_bytes;
        launch_seed = next_seed;
        random_state = launch_seed * 0x9E3779B97F4A7C15ull + 1;
        constexpr uint32_t kMoveChances[] = {1, 16, 128, 256};
        move_chance = kMoveChances[random_below(4)];
        idle_polls = 0;
        static_shared = find_static_shared();
        body = kernel;
        run_grid();
    } catch (const std::exception& failure) {
        error = failure.what();
    }
    current = nullptr;
    thread = nullptr;
    body = nullptr;
}

} // namespace cta

// What tests/kernels/emulator.py calls: before a call of this library, and after it.
extern "C" __attribute__((used)) inline void cta_begin(unsigned long long seed, unsigned time_limit_s) {
    cta::next_seed = seed;
    cta::time_limit_s = time_limit_s;
    cta::error.clear();
}
extern "C" __attribute__((used)) inline const char* cta_error() { // the end of a call
    cta::release_stacks();
    return cta::error.c_str();
}
