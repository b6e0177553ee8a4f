// y = x W^T + bias for a packed W (see format.py) and 9 to 16 rows of x of 16 bits, which can be read 16 bytes at a time, by
// dense products of tensor cores.
//
// Eight rows of W in one tile of columns at a time are written out into shared memory, with their zeros. Most warps write
// them there. The others multiply: each has a slice of the columns, of x in registers from the start to the end, and
// clears what it has read of W; the sums of all slices are added up in their order. Buffers go round between the two.
// Blocks that have the same rows in other tiles are in one cluster, send their sums to one of them and add them up in the
// end; or all sums of a tile are given out (``partial``). Where there is one tile only, ``across`` blocks are in one
// cluster: what one of them reads of x goes to all.
//
// Column 2048 p + 8 j + 4 h + k (p, h: 0 or 1, k: 0 to 3) of row r lies at 256 j + 128 h + 16 r + 4 k + 2 p. So eight
// rows of four kinds each are written to 32 banks, and lanes that look for four kinds of eight rows read from 32.

constexpr int ROWS = 8, BUFFER = ROWS * TILE * 2, READERS = 8;
constexpr int WRITERS = 12;
constexpr int DEPTH = 3;  // sets of chunks that are on their way
constexpr int THREADS = 32 * (READERS + WRITERS), STRIDE = 4 * WRITERS, SLOT = WRITERS * 32 * 24;
constexpr int SLICE = TILE / READERS, SETS = SLICE / 64;  // columns of a warp, and sets of eight words of a lane
constexpr int READ = 1;                     // the barrier of all readers
constexpr int X_ROW = 2 * TILE + 64;        // bytes from one row of x to the next: lanes meet no bank twice
constexpr int X_MORE = 8 * X_ROW - BUFFER;  // that eight of them are longer than eight rows of W

// What is not zero, to its place. Zeros may stand for columns that have a value elsewhere, but in chunks with steps by
// eights only for their own. Lanes without a chunk have zeros.
template <int KIND> __device__ __forceinline__ void write_out(const Chunk<KIND> &chunk, u32 to) {
    const uint4 &w = chunk.words[0];
    const bool eights = by_eights(chunk.place);
    const u32 first = first_of(chunk.place) % TILE;
    const auto place = [&](u32 column) {
        return to + ((column << 5 & 0xff80u) | (column << 2 & 12u) | (column >> 10 & 2u));
    };
    const auto value = [&](int i) { return i % 2 ? chunk.word(i / 2) >> 16 : chunk.word(i / 2); };
    if (__any_sync(ALL, !eights && (w.x | w.y | w.z | w.w))) {
        u32 column = first;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            if (i) column += step_of(chunk.place, i) * (eights ? 8 : 1);
            write2_if(value(i) & 0xffffu, place(column), value(i));
        }
        return;
    }
    u32 at[CHUNK];
    at[0] = place(first);
#pragma unroll
    for (int i = 1; i < CHUNK; i++) at[i] = at[i - 1] + step_of(chunk.place, i, 8);
    if (__any_sync(ALL, eights && at[CHUNK - 1] >= to + BUFFER)) {  // into the second half of the tile, or beyond its end
        const u32 back = first < 2048 ? BUFFER - 2 : 0;
#pragma unroll
        for (int i = 1; i < CHUNK; i++) at[i] -= at[i] >= to + BUFFER ? back : 0;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) write2_if(eights, at[i], value(i));
}

// What a lane has of x: eight columns of a row, near and 2048 further on, for each of its sets. Either one block of the
// cluster copies a row for all of its tile, eight rows to the second buffer and eight to where sums will be, and lanes take
// theirs from there; or each reads its own.
struct Incoming {
    u32 first, second;

    __device__ __forceinline__ u32 row(int b) const { return (b < 8 ? first : second) + b % 8 * X_ROW; }
    __device__ __forceinline__ void copy(const u16 *x, u32 there, int batch, int columns, int width, int across) const {
        const u32 all = ((1u << across) - 1) << blockIdx.y * across;
        for (int b = blockIdx.x % across; b < batch; b += across)
            copy_to_all(row(b), x + (long long)b * columns, 2 * width, there, all);
    }
};
// In pairs of columns that lie 2048 apart, in the order in which a lane finds them in W. COPIED: from shared memory.
template <bool COPIED>
__device__ __forceinline__ void take(u32 (&pairs)[2][8 * SETS], const Incoming &incoming, const u16 *x, int batch,
                                     int columns, int width) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 even = t & 1 ? 0x7632u : 0x5410u, odd = t & 1 ? 0x5410u : 0x7632u;
    uint4 found[2][SETS][2];
#pragma unroll
    for (int i = 0; i < 4 * SETS; i++) {
        const int b = 8 * (i / SETS / 2) + g, column = warp * (SLICE / 2) + i / 2 % SETS * 32 + t * 8 + i % 2 * (TILE / 2);
        uint4 &one = found[i / SETS / 2][i / 2 % SETS][i % 2];
        if constexpr (COPIED) one = column < width ? read16(incoming.row(b) + 2 * column) : make_uint4(0, 0, 0, 0);
        else {
            const u16 *from = x + (long long)b * columns + column;
            one = __ldcg(b < batch && column < width ? reinterpret_cast<const uint4 *>(from) : nothing);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * SETS; i++) {
        const uint4 &n = found[i / SETS][i % SETS][0], &f = found[i / SETS][i % SETS][1];
        const u32 near[4] = {t & 2 ? n.y : n.x, t & 2 ? n.x : n.y, t & 2 ? n.w : n.z, t & 2 ? n.z : n.w};
        const u32 far[4] = {t & 2 ? f.y : f.x, t & 2 ? f.x : f.y, t & 2 ? f.w : f.z, t & 2 ? f.z : f.w};
#pragma unroll
        for (int s = 0; s < 8; s++)
            pairs[i / SETS][i % SETS * 8 + s] = __byte_perm(near[s / 2], far[s / 2], s % 2 ? odd : even);
    }
}

// Chunks of packed weights on their way to a warp that writes them out: a lane has every so manieth of a row of each unit.
template <int KIND> struct Ring {
    const uint4 *values, *next_values;
    const u64 *places, *next_places;
    const int *starts;
    u32 own_values, own_places;  // where they go
    int rows, tiles, row, own, step, first, last, mine = 0, left = 0;
    u32 ends = 0, none = 0;  // a bit for each set: whether its unit ends there, whether it is none

    __device__ __forceinline__ Ring(const void *v, const u64 *p, const int *s, u32 ring, int rows, int tiles, int tile)
        : values(reinterpret_cast<const uint4 *>(v)), places(p), starts(s + tile), rows(rows), tiles(tiles) {
        const int thread = threadIdx.x - 32 * READERS;
        own_values = ring + thread * 16, own_places = ring + WRITERS * 512 + thread * 8;
        row = blockIdx.x * ROWS + thread % 32 / 4, own = thread / 32 * 4 + thread % 4, step = gridDim.x * ROWS;
    }
    __device__ __forceinline__ void look() {  // somewhere in any case: a load that may not be done is waited for at once
        const int *from = starts + (long long)min(row, rows - 1) * tiles;
        first = __ldcg(from);
        last = __ldcg(from + 1);
    }
    __device__ __forceinline__ void send(u32 slot) {
        if (left == 0) {
            const int at = first + own;
            mine = (u32)max((row < rows ? last : 0) - at + STRIDE - 1, 0) / STRIDE;
            left = max(__reduce_max_sync(ALL, mine), 1);
            next_values = values + at, next_places = places + at;
            own = own + 4 < STRIDE ? own + 4 : own + 4 - STRIDE;  // the last set of a row is not always the same warp's
            row += step;
            look();
        }
        copy16(own_values + slot, next_values, mine > 0);
        copy8(own_places + slot, next_places, mine > 0);
        end_set();
        next_values += STRIDE, next_places += STRIDE, mine--, left--;
        ends = ends >> 1 | (left == 0) << DEPTH;
        none >>= 1;
    }
    // At first only what the first unit has: for the next it would have to wait.
    __device__ __forceinline__ void begin() {
        look();
        send(0);
#pragma unroll
        for (int i = 1; i < DEPTH; i++) {
            if (left) {
                send(i * SLOT);
                continue;
            }
            end_set();
            ends >>= 1, none = none >> 1 | 1 << DEPTH;
        }
    }
    __device__ __forceinline__ void take(u32 slot, Chunk<KIND> &chunk) const {
        chunk.words[0] = read16(own_values + slot);
        const uint2 place = read8(own_places + slot);
        chunk.place = (u64)place.y << 32 | place.x;
    }
};

__device__ __forceinline__ uint4 words_of(const float4 &four) {
    return make_uint4(__float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z), __float_as_uint(four.w));
}
__device__ __forceinline__ void add(float4 &total, const uint4 &words) {
    total.x += __uint_as_float(words.x), total.y += __uint_as_float(words.y);
    total.z += __uint_as_float(words.z), total.w += __uint_as_float(words.w);
}

// Four warps change their registers together, and there are as many as the block began with.
static_assert(READERS % 4 == 0 && WRITERS % 4 == 0, "");
constexpr int READS = 168;
constexpr int WRITES = 48;
static_assert(32 * (READERS * READS + WRITERS * WRITES) <= THREADS * (65536 / THREADS / 8 * 8), "");

template <int KIND>
__global__ void __launch_bounds__(THREADS, 1)
    sparse_tiles(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                 float *partial, int rows, int columns, int tiles, int batch, int across) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.y, base = tile * TILE, width = min(TILE, columns - base);
    const int units = (rows + ROWS - 1) / ROWS;
    const u32 buffer = place_of(shared), ring = buffer + 2 * BUFFER + X_MORE;
    const u32 empty = ring + DEPTH * SLOT, full = empty + 16, there = full + 16;  // barriers of the two buffers, of x
    const u32 summed = there + 8;                                                // and of sums from other tiles
    const u32 sums = there + 16, kept = sums + 2 * READERS * 512 + lane * 16;     // kept: where there are more tiles
    const u16 *own_x = reinterpret_cast<const u16 *>(x) + base;
    const bool to_all = across > 1, alone = tiles == 1 || partial;  // alone: not in a cluster with other tiles
    const uint4 zero = make_uint4(0, 0, 0, 0);

    let_others_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) begin_barrier(empty + 8 * i, READERS), begin_barrier(full + 8 * i, WRITERS);
        begin_barrier(there, 1), begin_barrier(summed, 1);
        barriers_begun();
        const int turns = (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
        come_with(there, to_all ? 2 * width * batch : 0);
        come_with(summed, alone ? 0 : max(turns - tile + tiles - 1, 0) / tiles * (tiles - 1) * 512);
    }
    __syncthreads();
    come_to_cluster();
    if (warp >= READERS) {
        fewer_registers<WRITES>();
        Ring<KIND> chain(values, places, starts, ring, rows, tiles, tile);
        send_for(starts + tile + (long long)min(chain.row, rows - 1) * tiles);
        wait_for_others();
        chain.begin();
        wait_for_cluster();
        u32 slot = 0;
        for (int unit = blockIdx.x, turn = 0; unit < units; unit += gridDim.x, turn++) {
            const u32 to = buffer + turn % 2 * BUFFER + g * 16;
            wait_for_phase(empty + turn % 2 * 8, turn / 2 % 2);
            for (bool ended = false; !ended;) {
                Chunk<KIND> chunk;
                wait_for_sets<DEPTH - 1>();
                if (!(chain.none & 2)) {
                    chain.take(slot, chunk);
                    write_out(chunk, to);
                    ended = chain.ends & 2;
                }
                if (ended) {
                    __syncwarp();
                    if (lane == 0) come(full + turn % 2 * 8);
                }
                chain.send(slot);
                slot = slot == (DEPTH - 1) * SLOT ? 0 : slot + SLOT;
            }
        }
        wait_for_sets<0>();
        return;
    }

    more_registers<READS>();
    const u32 own_part = buffer + warp * SLICE * 16 + lane * 16;  // to be cleared
    const auto clear = [&](int which) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) write16(own_part + which * BUFFER + i * 512, zero);
        __syncwarp();
        if (lane == 0) come(empty + 8 * which);
    };
    clear(0);
    if (!to_all) clear(1);
    wait_for_others();
    wait_for_cluster();
    const Incoming incoming{buffer + BUFFER, sums};
    if (to_all && threadIdx.x == 0) incoming.copy(own_x, there, batch, columns, width, across);
    u32 a[2][8 * SETS];
    if (to_all) {
        wait_for_phase(there, 0);
        take<true>(a, incoming, own_x, batch, columns, width);
        meet(READ, 32 * READERS);
        clear(1);
    } else take<false>(a, incoming, own_x, batch, columns, width);

    u32 from[4];  // where a lane finds its words
#pragma unroll
    for (int k = 0; k < 4; k++) {
        from[k] = buffer + warp * SLICE * 16 + t * 256 + g * 16 + (k ^ t) * 4;
        remember(from[k]);
    }
    const auto put_all = [&](const float4 &total, int unit) {
        const int row = unit * ROWS + 2 * t;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int b = 8 * e + g;
            if (b < batch && row < rows) put<KIND>(e ? total.z : total.x, b, batch, row, rows, bias, y, partial);
            if (b < batch && row + 1 < rows) put<KIND>(e ? total.w : total.y, b, batch, row + 1, rows, bias, y, partial);
        }
    };
    int turn = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x, turn++) {
        const u32 now = turn % 2 * BUFFER, own_sums = sums + turn % 2 * READERS * 512 + lane * 16;
        float sum[4][4] = {};  // by turns: each waits for its last
        wait_for_phase(full + turn % 2 * 8, turn / 2 % 2);
#pragma unroll
        for (int j = 0; j < SETS; j++) {
            u32 w[8];
#pragma unroll
            for (int s = 0; s < 8; s++) w[s] = read4(now + j * 1024 + s / 4 * 128 + from[s % 4]);
            __syncwarp();
            write16(own_part + now + j * 1024, zero);
            write16(own_part + now + j * 1024 + 512, zero);
#pragma unroll
            for (int s = 0; s < 8; s += 2) {
                const u32 factor[4] = {a[0][8 * j + s], a[1][8 * j + s], a[0][8 * j + s + 1], a[1][8 * j + s + 1]};
                multiply<KIND>(sum[s / 2], factor, w[s], w[s + 1]);
            }
        }
        __syncwarp();
        if (lane == 0) come(empty + turn % 2 * 8);
        const auto all = [&](int i) { return (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]); };
        write16(own_sums + warp * 512, words_of(make_float4(all(0), all(1), all(2), all(3))));
        meet(READ, 32 * READERS);
        if (turn % READERS != warp) continue;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < READERS; s++) add(total, read16(own_sums + s * 512));
        if (alone) {
            put_all(total, unit);
            continue;
        }
        const u32 to = kept + (turn - turn % tiles + tile) * 512;
        if (turn % tiles == tile) write16(to, words_of(total));
        else push16(place_in(to, turn % tiles * across), words_of(total), place_in(summed, turn % tiles * across));
    }
    if (alone) return;
    meet(READ, 32 * READERS);
    wait_for_phase(summed, 0);
    for (int i = warp * tiles + tile; i < turn; i += READERS * tiles) {
        float4 total = make_float4(0, 0, 0, 0);
        for (int s = 0; s < tiles; s++) add(total, read16(kept + (i - tile + s) * 512));
        put_all(total, blockIdx.x + i * gridDim.x);
    }
}
