// CUDA kernels on a CPU, for tests: every thread of a block is a fiber; what a warp or a block does together waits for
// all of them. It stands in place of device.cu, and of the built-in functions that the kernels call.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return uint4{x, y, z, w}; }
static float __uint_as_float(u32 raw) { float value; memcpy(&value, &raw, 4); return value; }
static u32 __float_as_uint(float value) { u32 raw; memcpy(&raw, &value, 4); return raw; }
static float fmaf_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#define fmaf fmaf_
static std::vector<char> waited;  // for what came before the kernel; until then its results are not there
static int current;
// What is not yet there when some look.
static int __ldcg(const int *at) { return waited[current] || current / 32 % 3 ? *at : *at * 7 - 3; }

[[noreturn]] static void fail(const char *why) {
    fprintf(stderr, "the emulated kernel %s\n", why);
    abort();
}
template <class T> static T __ldcs(const T *at) {
    if (!waited[current]) fail("loads weights before it has waited");
    return *at;
}
template <class T> static T __ldcg(const T *at) { return __ldcs(at); }
template <class T> static T __ldca(const T *at) { return __ldcs(at); }

// ---- fibers ----
static std::vector<ucontext_t> fibers;
static std::vector<char> done;
static ucontext_t home;
static void (*body)();
static void rest() { swapcontext(&fibers[current], &home); }
static void live() { body(); done[current] = 1; rest(); }

struct Warp {
    int arrived = 0, round = 0;
    u64 in[32], out[32];
    u32 from[32], words[32][6], found[32][4];
};
static std::vector<Warp> warps;
struct Barrier { int arrived = 0, round = 0; };
struct Phases { int many = 0, left = 0, phase = 0, bytes = 0; };
struct Block {  // what its threads share; those of a cluster are alive together
    int arrived = 0, round = 0, any = 0, any_now = 0;
    Barrier barriers[16];
    std::map<u32, Phases> phases;  // of barriers in shared memory
    alignas(128) unsigned char bytes[256 * 1024];
};
static std::vector<Block> cluster;
static Block *here;
static int room;  // bytes of shared memory that the launch asked for
#define shared_bytes (here->bytes)
#define shared (reinterpret_cast<uint4 *>(shared_bytes))
static long progress;  // of anybody

template <class F> static void together(F last) {  // the last lane to come does it for all
    Warp &warp = warps[current / 32];
    const int round = warp.round;
    progress++;
    if (++warp.arrived == 32) last(warp), warp.arrived = 0, warp.round++;
    else while (warp.round == round) rest();
}
static int __syncthreads_or(int value) {
    Block &own = *here;
    const int now = own.round;
    own.any |= value != 0, progress++;
    if (++own.arrived == (int)blockDim.x) own.any_now = own.any, own.any = own.arrived = 0, own.round++;
    else while (own.round == now) rest();
    return own.any_now;
}
static void __syncthreads() { __syncthreads_or(0); }
static int join(int which, int threads) {
    Barrier &barrier = here->barriers[which];
    const int now = barrier.round;
    if (threads % 32) fail("has a barrier for part of a warp");
    progress++;
    if (++barrier.arrived == threads) barrier.arrived = 0, barrier.round++;
    return now;
}
static void meet(int which, int threads) {
    const int now = join(which, threads);
    while (here->barriers[which].round == now) rest();
}
static void __syncwarp() { together([](Warp &) {}); }
template <class T> static T exchange(T value, int from) {
    Warp &warp = warps[current / 32];
    const int lane = current % 32;
    warp.in[lane] = 0, warp.from[lane] = from;
    memcpy(&warp.in[lane], &value, sizeof(T));
    together([](Warp &w) { for (int i = 0; i < 32; i++) w.out[i] = w.in[w.from[i]]; });
    memcpy(&value, &warp.out[lane], sizeof(T));
    return value;
}
static void require_all(u32 mask) { if (mask != 0xffffffffu) fail("shuffles only part of a warp"); }
template <class T> static T __shfl_sync(u32 m, T value, int from) { require_all(m); return exchange(value, from & 31); }
template <class T> static T __shfl_xor_sync(u32 m, T value, int by) { require_all(m); return exchange(value, current % 32 ^ by); }
static int __reduce_add_sync(u32 mask, int value) {
    require_all(mask);
    for (int by = 16; by; by /= 2) value += exchange(value, current % 32 ^ by);
    return value;
}
static int __reduce_max_sync(u32 mask, int value) {
    require_all(mask);
    for (int by = 16; by; by /= 2) value = max(value, exchange(value, current % 32 ^ by));
    return value;
}
static bool __any_sync(u32 mask, bool value) { return __reduce_max_sync(mask, value) != 0; }
static bool __all_sync(u32 mask, bool value) { return !__any_sync(mask, !value); }
static u32 __byte_perm(u32 a, u32 b, u32 which) {
    const u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; i++) found |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}

// ---- in place of device.cu ----
static void let_others_start() {}
static void wait_for_others() { waited[current] = 1; }
static void send_for(const void *) {}
static float from_half(u16 raw) { _Float16 value; memcpy(&value, &raw, 2); return value; }
static u16 to_half(float value) { const _Float16 near = value; u16 raw; memcpy(&raw, &near, 2); return raw; }
static u16 to_brain(float value) {
    const u32 raw = __float_as_uint(value);
    return value != value ? 0x7fff : (u16)((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
}
static void remember(u32 &) {}
static void remember(const u16 *&) {}
template <int MANY> static void fewer_registers() {}
template <int MANY> static void more_registers() {}
constexpr bool TURNS = true;
static void store_matrices(const u32 (&x)[4], u32 to) {
    Warp &warp = warps[current / 32];
    warp.from[current % 32] = to;
    for (int m = 0; m < 4; m++) warp.words[current % 32][m] = x[m];
    together([](Warp &w) {
        for (int m = 0; m < 4; m++) {
            u32 banks = 0;
            for (int row = 0; row < 8; row++) {
                const u32 at = w.from[8 * m + row];
                if (at % 16 || at + 16 > (u32)room) fail("stores a row of a matrix where none is");
                banks |= 1u << at / 16 % 8;
                for (int g = 0; g < 8; g++) {
                    const u16 one = (u16)(w.words[4 * g + row / 2][m] >> 16 * (row % 2));
                    memcpy(shared_bytes + at + 2 * g, &one, 2);
                }
            }
            if (banks != 255) fail("stores two rows of a matrix into the same banks");
        }
    });
}
template <int KIND> static u32 spoil(u32 sum, u32 two) {
    constexpr u32 top = KIND == 0 ? 0x7f80u : 0x7c00u;
    for (int half = 0; half < 2; half++) if ((two >> 16 * half & top) == top) sum |= 0x7fffu << 16 * half;
    return sum;
}
static long fetched, cycles;  // matrices, and what they took: banks that are met twice cost one more
static void read_matrices(u32 (&x)[4], u32 at) {
    Warp &warp = warps[current / 32];
    warp.from[current % 32] = at;
    together([](Warp &w) {
        for (int m = 0; m < 4; m++) {
            std::vector<u32> rows(w.from + 8 * m, w.from + 8 * m + 8), apart = rows;
            for (u32 at : rows) if (at % 16 || at + 16 > (u32)room) fail("reads a row of a matrix where none is");
            std::sort(apart.begin(), apart.end());
            apart.erase(std::unique(apart.begin(), apart.end()), apart.end());
            int met[8] = {}, most = 0;
            for (u32 at : apart) most = max(most, ++met[at / 16 % 8]);
            fetched++, cycles += most;
            for (int lane = 0; lane < 32; lane++) {
                u16 two[2];
                for (int i = 0; i < 2; i++) memcpy(&two[i], shared_bytes + rows[lane % 4 * 2 + i] + 2 * (lane / 4), 2);
                w.found[lane][m] = two[0] | (u32)two[1] << 16;
            }
        }
    });
    for (int m = 0; m < 4; m++) x[m] = warp.found[current % 32][m];
}
static u32 place_of(const void *in_shared) { return (u32)(static_cast<const unsigned char *>(in_shared) - shared_bytes); }
template <class T> static T read_at(u32 at) {
    if (at % sizeof(T) || at + sizeof(T) > (u32)room) fail("reads where nothing is");
    T value;
    memcpy(&value, shared_bytes + at, sizeof(T));
    return value;
}
static u32 read2(u32 at) { return read_at<u16>(at); }
static u32 read4(u32 at) { return read_at<u32>(at); }
static uint2 read8(u32 at) { return read_at<uint2>(at); }
static uint4 read16(u32 at) { return read_at<uint4>(at); }
template <class T> static void write_at(u32 at, T value) {
    if (at % sizeof(T) || at + sizeof(T) > (u32)room) fail("writes where nothing is");
    memcpy(shared_bytes + at, &value, sizeof(T));
}
static void write16(u32 at, uint4 what) { write_at(at, what); }
static void write2_if(u32 wanted, u32 at, u32 word) { if (wanted) write_at(at, (u16)word); }
struct Copy { u32 to; const void *from; int size; };
static std::vector<std::vector<std::vector<Copy>>> on_their_way;  // of each thread, set by set; they arrive when waited for
static void copy_later(u32 to, const void *from, bool there, int size) {
    if (!waited[current]) fail("copies before it has waited");
    if ((uintptr_t)from % size) fail("copies from a place that is not aligned");
    on_their_way[current].back().push_back(Copy{to, there ? from : nullptr, size});
}
static void copy16(u32 to, const void *from, bool there) {
    copy_later(to, from, there, 16);
}
static void copy8(u32 to, const void *from, bool there) { copy_later(to, from, there, 8); }
static void end_set() { on_their_way[current].emplace_back(); }
template <int LEFT> static void wait_for_sets() {
    auto &sets = on_their_way[current];  // the last one is open
    while (sets.size() > LEFT + 1) {
        for (const Copy &copy : sets.front())
            if (copy.size == 16) write_at(copy.to, copy.from ? *static_cast<const uint4 *>(copy.from) : uint4{});
            else write_at(copy.to, copy.from ? *static_cast<const u64 *>(copy.from) : u64(0));
        sets.erase(sets.begin());
    }
}
static void begin_barrier(u32 at, int many) { write_at<u64>(at, 0), here->phases[at] = Phases{many, many}; }
static void end_phase(Phases &p) { if (p.left == 0 && p.bytes == 0) p.left = p.many, p.phase++; }
static void come(u32 barrier) {
    if (!here->phases.count(barrier)) fail("has no barrier there");
    Phases &p = here->phases[barrier];
    progress++, p.left--;
    end_phase(p);
}
static void wait_for_phase(u32 barrier, u32 parity);
static void wait_for_others_of_cluster(u32 barrier) { wait_for_phase(barrier, 0); }
struct Late { size_t to; std::function<void()> what; };
static std::vector<Late> late;  // what goes to other blocks arrives when it will, in any order
static void arrive(size_t to, u32 place, std::vector<unsigned char> what, u32 barrier, int come = 0) {
    if (!cluster[to].phases.count(barrier)) fail("sends to a block that has not begun");
    late.push_back(Late{to, [=] {
        Phases &p = cluster[to].phases[barrier];
        memcpy(cluster[to].bytes + place, what.data(), what.size());
        p.bytes -= (int)what.size(), p.left -= come;
        end_phase(p);
    }});
}
static void barriers_begun() {}
static void come_with(u32 barrier, u32 bytes) { here->phases[barrier].bytes += bytes, come(barrier); }
static void copy_to_all(u32 to, const void *from, u32 bytes, u32 barrier, u32 mask) {
    if (!waited[current]) fail("copies before it has waited");
    if (to % 16 || bytes % 16 || (uintptr_t)from % 16) fail("copies what is not aligned");
    if (to + bytes > (u32)room || mask >> cluster.size()) fail("copies to where nothing is");
    const unsigned char *first = static_cast<const unsigned char *>(from);
    for (size_t i = 0; i < cluster.size(); i++)
        if (mask >> i & 1) arrive(i, to, std::vector<unsigned char>(first, first + bytes), barrier);
}
static void wait_for_phase(u32 barrier, u32 parity) {
    if (!here->phases.count(barrier)) fail("has no barrier there");
    while ((here->phases[barrier].phase & 1) == (int)parity) rest();
}
// Blocks of a cluster: a place in another one's shared memory has its number in the upper bits.
// A block that is alone waits until all of its threads wait, as the compiler has it.
static int met, waiting;
static void come_to_cluster() { met++, progress++; }
static void wait_for_cluster() {
    waiting++, progress++;
    while ((cluster.size() > 1 ? met : waiting) < (int)done.size()) rest();
}
static u32 place_in(u32 at, int block) {
    if (block >= (int)cluster.size()) fail("has no such block in its cluster");
    return at | (u32)(block + 1) << 24;
}
static void push16(u32 to, uint4 what, u32 barrier) {
    const unsigned char *first = reinterpret_cast<const unsigned char *>(&what);
    if (to >> 24 == 0 || to >> 24 != barrier >> 24) fail("sends to no block of its cluster");
    if ((to & 0xffffff) % 16 || (to & 0xffffff) + 16 > (u32)room) fail("sends to where nothing is");
    arrive((to >> 24) - 1, to & 0xffffff, std::vector<unsigned char>(first, first + 16), barrier & 0xffffff);
}
static void come_there(u32 barrier) {
    if (barrier >> 24 == 0) fail("comes to no block of its cluster");
    arrive((barrier >> 24) - 1, 0, {}, barrier & 0xffffff, 1);
}
template <int KIND> static float number(u32 word, int half) {
    const u16 raw = (u16)(half ? word >> 16 : word);
    return KIND == 0 ? __uint_as_float((u32)raw << 16) : from_half(raw);
}
template <int KIND> static void multiply(float (&sum)[4], const u32 (&x)[4], u32 upper, u32 lower) {
    Warp &warp = warps[current / 32];
    u32 *own = warp.words[current % 32];
    for (int i = 0; i < 4; i++) own[i] = x[i];
    own[4] = upper, own[5] = lower;
    together([](Warp &w) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++) {
                const int g = lane / 4, t = lane % 4 * 2 + half;
                for (int i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 8] = number<KIND>(w.words[lane][i], half);
                for (int i = 0; i < 2; i++) b[t + 8 * i][g] = number<KIND>(w.words[lane][4 + i], half);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                float total = 0;
                for (int k = 0; k < 16; k++) total += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
                w.found[lane][i] = __float_as_uint(total);
            }
    });
    for (int i = 0; i < 4; i++) sum[i] += __uint_as_float(warp.found[current % 32][i]);
}

static void run_grid(int across, int down, Place of, int threads, int bytes, void (*what)()) {
    constexpr size_t STACK = 64 * 1024;
    static std::vector<char> stacks;
    const int all = threads * of.x * of.y;
    stacks.resize(STACK * all);
    gridDim = Place{(unsigned)across, (unsigned)down, 1}, blockDim = Place{(unsigned)threads, 1, 1}, body = what;
    room = bytes;
    if (down % of.y || across % of.x) fail("has clusters that are not whole");
    if (bytes > (int)sizeof(Block::bytes)) fail("asks for more shared memory than there is");
    for (unsigned first = 0; first < across * down / (of.x * of.y); first++) {
        cluster.assign(of.x * of.y, Block{});
        for (Block &block : cluster) memset(block.bytes, 0x7f, sizeof block.bytes);  // not what a kernel would find by luck
        fibers.assign(all, ucontext_t{}), warps.assign(all / 32, Warp{}), done.assign(all, 0);
        waited.assign(all, 0), on_their_way.assign(all, {{}}), met = waiting = 0;
        for (int i = 0; i < all; i++) {
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = stacks.data() + STACK * i, fibers[i].uc_stack.ss_size = STACK;
            makecontext(&fibers[i], live, 0);
        }
        for (int left = all, sweep = 0; left; sweep++) {  // forwards and backwards: no order is to be relied on
            const long before = progress;
            for (int i = 0; i < all; i++) {
                current = sweep % 2 ? all - 1 - i : i;
                if (done[current]) continue;
                const unsigned block = current / threads, wide = across / of.x;
                here = &cluster[block];
                blockIdx = Place{first % wide * of.x + block % of.x, first / wide * of.y + block / of.x, 0};
                threadIdx = Place{(unsigned)(current % threads), 0, 0};
                swapcontext(&home, &fibers[current]);
                left -= done[current], progress += done[current];
            }
            if (before == progress && late.empty()) fail("waits for ever");
            if (late.empty() || (before != progress && sweep % 5)) continue;
            const size_t next = sweep * 7 % late.size();
            const auto of_block = done.begin() + late[next].to * threads;
            if (std::all_of(of_block, of_block + threads, [](char ended) { return ended; })) fail("sends to a block that has ended");
            late[next].what(), late.erase(late.begin() + next);
        }
        if (!late.empty()) fail("ends while something is on its way");
        for (const Block &block : cluster) {
            for (const Barrier &barrier : block.barriers) if (barrier.arrived) fail("ends while some are at a barrier");
            for (size_t i = room; i < sizeof block.bytes; i++) if (block.bytes[i] != 0x7f) fail("writes beyond its shared memory");
        }
    }
}
