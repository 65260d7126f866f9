// From one thread's stack to another's. Knows no threads.
#pragma once
#include "libc.h"

#if defined(__APPLE__)
#define MSL_SYMBOL(name) "_" name
#else
#define MSL_SYMBOL(name) name
#endif

// Saves what a called function must keep on the running stack, and goes on with another.
extern "C" void msl_switch(void** save, void* to);

#if defined(__x86_64__)
asm(".text\n"
    ".globl " MSL_SYMBOL("msl_switch") "\n" MSL_SYMBOL("msl_switch") ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
#elif defined(__aarch64__)
asm(".text\n"
    ".globl " MSL_SYMBOL("msl_switch") "\n"
    ".p2align 2\n" MSL_SYMBOL("msl_switch") ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");
#else
#error "the machine runs on x86-64 and on arm64"
#endif

namespace machine {

// A stack on which msl_switch starts a function, which must not return.
inline void* new_stack(unsigned char* top, void (*function)()) {
  void** place = (void**)top;
#if defined(__x86_64__)
  *--place = nullptr; // so that the function finds the alignment that a call leaves
  *--place = (void*)function;
  for (int i = 0; i < 6; i++) {
    *--place = nullptr;
  }
#else
  place -= 20;
  memset(place, 0, 20 * sizeof(void*));
  place[11] = (void*)function; // x30
#endif
  return place;
}

} // namespace machine
