// Coroutines: stacks, and the switch from one to another.
//
// On x86-64 the switch is a few instructions; elsewhere, or with CTA_UCONTEXT, it is swapcontext, which makes a system
// call each time.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__) || defined(CTA_UCONTEXT)
#include <ucontext.h>
#endif

namespace cta {

constexpr size_t kStackBytes = size_t{1} << 18; // touched pages alone take memory

inline std::vector<char*> stacks;
inline const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// The high end of stack `number`. A page that faults lies below each. Stacks are kept for further launches of a call.
inline char* stack_top(size_t number) {
    while (stacks.size() <= number) {
        void* memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
            std::perror("no memory for a thread's stack");
            std::abort();
        }
        stacks.push_back(static_cast<char*>(memory));
    }
    // Tops at different offsets of a page: equal ones would all compete for the same few cache sets.
    return stacks[number] + page + kStackBytes - number * 320 % 4096 / 64 * 64;
}

// A process may have 65,530 mappings: the stacks of thirty libraries would be too many.
inline void release_stacks() {
    for (char* memory : stacks) munmap(memory, page + kStackBytes);
    stacks.clear();
}

#if defined(__x86_64__) && !defined(CTA_UCONTEXT)

struct Context {
    void* stack_pointer;
};

// noipa: the compiler must not learn which registers this leaves alone, for it leaves none alone.
__attribute__((naked, noipa)) inline void switch_context(Context* /*from*/, Context* /*to*/) {
    asm volatile("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
                 "movq %rsp, (%rdi)\n\tmovq (%rsi), %rsp\n\t"
                 "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

inline void make_context(Context& context, char* top, void (*entry)()) {
    void** at = reinterpret_cast<void**>(top);
    *--at = nullptr; // entry never returns; with this word the stack is aligned as after a call
    *--at = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--at = nullptr;
    context.stack_pointer = at;
}

#else

struct Context {
    ucontext_t context;
};

inline void switch_context(Context* from, Context* to) { swapcontext(&from->context, &to->context); }

inline void make_context(Context& context, char* top, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = top - kStackBytes + 8192;
    context.context.uc_stack.ss_size = kStackBytes - 8192;
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}

#endif

} // namespace cta
