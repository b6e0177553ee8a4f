// What only the device has: instructions without a name in CUDA C++, and shared memory.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ uint4 shared[];

// The next kernel may start when there is room, and this one before the last has ended: what does not depend on it,
// the weights, is on its way from memory by then. Nothing is used before all that came before is done.
__device__ __forceinline__ void let_others_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void send_for(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ float from_half(u16 raw) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(raw));
    return wide;
}
__device__ __forceinline__ u16 to_half(float wide) {
    u16 raw;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(raw) : "f"(wide));
    return raw;
}
__device__ __forceinline__ u16 to_brain(float wide) {
    u16 raw;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(raw) : "f"(wide));
    return raw;
}

// What is kept in a register, rather than made anew.
__device__ __forceinline__ void remember(u32 &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void remember(const u16 *&at) { asm volatile("" : "+l"(at)); }

// Two 16-bit numbers times zero, added up: no number, once one of them was infinite or none.
template <int KIND> __device__ __forceinline__ u32 spoil(u32 sum, u32 two) {
    if constexpr (KIND == 0) asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(two), "r"(0));
    else asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(two), "r"(0));
    return sum;
}

// Four matrices [8 x 8] of 16-bit numbers into shared memory, turned; each lane says where a row of 16 bytes goes.
#if __CUDA_ARCH__ >= 900
constexpr bool TURNS = true;
#else
constexpr bool TURNS = false;
#endif
__device__ __forceinline__ void store_matrices(const u32 (&x)[4], u32 to) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#endif
}

// Four matrices [8 x 8] of 16-bit numbers, turned; each lane says where a row of 16 bytes lies.
__device__ __forceinline__ u32 place_of(const void *in_shared) { return (u32)__cvta_generic_to_shared(in_shared); }
__device__ __forceinline__ void read_matrices(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}

// Shared memory by place.
__device__ __forceinline__ u32 read2(u32 at) {
    u16 raw;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(raw) : "r"(at));
    return raw;
}
__device__ __forceinline__ u32 read4(u32 at) {
    u32 raw;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(raw) : "r"(at));
    return raw;
}
__device__ __forceinline__ uint2 read8(u32 at) {
    uint2 raw;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "r"(at));
    return raw;
}
__device__ __forceinline__ uint4 read16(u32 at) {
    uint4 raw;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "r"(at));
    return raw;
}

// Sixteen bytes into shared memory, or zeros, past the first cache and while the thread goes on. Copies are counted in
// sets; a thread has what it copied itself when no more than so many sets are on their way.
__device__ __forceinline__ void copy16(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}
__device__ __forceinline__ void end_set() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_sets() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void write16(u32 at, uint4 what) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(what.x), "r"(what.y), "r"(what.z), "r"(what.w)
                 : "memory");
}
// The low half of a word, without a branch.
__device__ __forceinline__ void write2_if(u32 wanted, u32 at, u32 word) {
    asm volatile("{\n.reg .pred p;\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\nsetp.ne.u32 p, %0, 0;\n"
                 "@p st.shared.b16 [%1], low;\n}" ::"r"(wanted), "r"(at), "r"(word)
                 : "memory");
}
// So many threads wait for one another, warp by warp, wherever in the program each warp is.
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Barriers in shared memory: a phase ends when so many have come; phases are told apart by their parity.
__device__ __forceinline__ void begin_barrier(u32 at, int many) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(many) : "memory");
}
__device__ __forceinline__ void barriers_begun() {  // so that all blocks of the cluster know
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void come_with(u32 barrier, u32 bytes) {  // so many have to be copied, too
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void come(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_phase(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Whether all blocks of a cluster have begun. Not without a cluster: threads of the block would wait for one another.
__device__ __forceinline__ void come_to_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// A place in another block's shared memory, and sixteen bytes to there; a barrier of that block counts them.
__device__ __forceinline__ u32 place_in(u32 at, int block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    return there;
}
__device__ __forceinline__ void push16(u32 to, uint4 what, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "r"(what.x), "r"(what.y), "r"(what.z), "r"(what.w), "r"(barrier)
                 : "memory");
}

// To a barrier of another block, and for the first phase of one to which others come.
__device__ __forceinline__ void come_there(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_others_of_cluster(u32 barrier) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
                 "@!done bra again;\n}" ::"r"(barrier)
                 : "memory");
}

// Bytes, sixteen or a multiple of it, to the same place in all blocks of the mask; their barriers count them.
__device__ __forceinline__ void copy_to_all(u32 to, const void *from, u32 bytes, u32 barrier, u32 mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)mask)
                 : "memory");
}

// Registers go from warps that need few to those that need many.
template <int MANY> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MANY));
}
template <int MANY> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
}

// [16 x 16] [16 x 8] added to [16 x 8], of bf16 (0) or fp16 (1).
template <int KIND>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&x)[4], u32 upper, u32 lower) {
    if constexpr (KIND == 0)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(upper), "r"(lower));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(upper), "r"(lower));
}
