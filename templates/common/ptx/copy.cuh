// Moving bytes: shared-memory addresses, asynchronous copies, wide and streaming loads, launch ordering.
#pragma once
#include "common/ptx/types.cuh"

DEVICE uint32_t smem_addr(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory. Without cp.async the thread loads and stores them at once.
DEVICE void copy16(void* dst, const void* src) {
    if constexpr (HAS_CP_ASYNC) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
    } else {
        *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(src);
    }
}

// As copy16, or 16 bytes of zeros where `valid` is false; `src` must still be a mapped address.
DEVICE void copy16_or_zero(void* dst, const void* src, bool valid) {
    if constexpr (HAS_CP_ASYNC) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src),
                     "r"(valid ? 16 : 0)
                     : "memory");
    } else {
        *reinterpret_cast<uint4*>(dst) =
            valid ? *reinterpret_cast<const uint4*>(src) : make_uint4(0, 0, 0, 0);
    }
}

// 16 bytes from global to the shared-memory address `to`, or zeros where `valid` is false; as copy16_or_zero.
DEVICE void copy16_at(uint32_t to, const void* from, bool valid = true) {
    if constexpr (HAS_CP_ASYNC) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                     : "memory");
    } else {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (valid) x = *reinterpret_cast<const uint4*>(from);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    }
}

DEVICE void copy_commit() {
    if constexpr (HAS_CP_ASYNC) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING groups are in flight. Other threads' copies need a barrier besides.
template <int PENDING> DEVICE void copy_wait() {
    if constexpr (HAS_CP_ASYNC) asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 16 bytes that are read once: not cached in L1.
DEVICE uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// 16 bytes that are read once; zeros and no access where `valid` is false. CONSTANT: this kernel does not write them;
// else they are loaded from L2.
template <bool CONSTANT> DEVICE uint4 load_or_zero(const void* p, bool valid) {
    uint4 v;
    if constexpr (CONSTANT)
        asm volatile(
            "{\n.reg .pred ok;\nsetp.ne.b32 ok, %5, 0;\n"
            "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
            "@ok ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
            : "l"(p), "r"(int(valid)));
    else
        asm volatile(
            "{\n.reg .pred ok;\nsetp.ne.b32 ok, %5, 0;\n"
            "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
            "@ok ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
            : "l"(p), "r"(int(valid))
            : "memory");
    return v;
}

// Programmatic dependent launch. launch_dependents lets the stream's next kernel start its prologue; wait blocks until
// all earlier kernels have completed and their writes are visible. Before sm90 both are no-ops, and stream order does
// the same.
DEVICE void pdl_launch_dependents() {
    if constexpr (HAS_PDL) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void pdl_wait() {
    if constexpr (HAS_PDL) asm volatile("griddepcontrol.wait;" ::: "memory");
}
