// y = x W^T + bias for a packed W (see format.py) and up to 16 rows of x, by dense products of tensor cores.
//
// Eight rows of W in one tile of columns at a time are written out into shared memory, with their zeros. Most warps write
// them there. The others multiply: each has a slice of the columns, of x in registers from the start to the end, and
// clears what it has read of W; the sums of all slices are added up in their order. Buffers go round between the two.
//
// Column 2048 p + 8 j + 4 h + k (p, h: 0 or 1, k: 0 to 3) of row r lies at 256 j + 128 h + 16 r + 4 k + 2 p. So eight
// rows of four kinds each are written to 32 banks, and lanes that look for four kinds of eight rows read from 32.

constexpr int ROWS = 8, BUFFER = ROWS * TILE * 2, READERS = 8;
constexpr int WRITERS = 12;
constexpr int DEPTH = 4;  // sets of chunks that are on their way
constexpr int THREADS = 32 * (READERS + WRITERS), STRIDE = 4 * WRITERS, SLOT = WRITERS * 32 * 24;
constexpr int READ = 1;  // the barrier of all readers

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

// x in shared memory: eight columns of a row in 16 bytes, so that those who take their slices meet no bank twice.
__device__ __forceinline__ u32 place_in_x(int b, int eight) {
    return b * 2 * TILE + (eight ^ ((b ^ eight >> 3 << 1) & 7)) * 16;
}
template <int BATCH>
__device__ __forceinline__ void bring(u32 to, const u16 *x, int batch, int columns, int base, int width) {
    const bool wide = columns % 8 == 0 && (reinterpret_cast<u64>(x) & 15) == 0;
    for (int eight = threadIdx.x; eight < TILE / 8; eight += 32 * READERS) {
        const u16 *from = x + base + 8 * eight;
        const int left = width - 8 * eight;
        if (wide) {
#pragma unroll
            for (int b = 0; b < BATCH; b++, from += columns) copy16(to + place_in_x(b, eight), from, b < batch && left > 0);
        } else {
            for (int b = 0; b < BATCH; b++, from += columns) {
                u32 one[8];
#pragma unroll
                for (int k = 0; k < 8; k++) one[k] = b < batch && k < left ? __ldcg(from + k) : 0;
                write16(to + place_in_x(b, eight), make_uint4(one[0] | one[1] << 16, one[2] | one[3] << 16,
                                                              one[4] | one[5] << 16, one[6] | one[7] << 16));
            }
        }
    }
    end_set();
}

// Chunks of packed weights on their way to a warp that writes them out: a lane has every so manieth of a row of each unit.
template <int KIND> struct Ring {
    const uint4 *values;
    const u64 *places;
    const int *starts;
    u32 own_values, own_places;  // where
    int rows, tiles, row, own, step, first, last, at, end, left = 0;
    u32 ends = 0;  // a bit for each set: whether its unit ends there

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
            at = first + own, end = row < rows ? last : 0;
            left = max(__reduce_max_sync(ALL, (u32)max(end - at + STRIDE - 1, 0) / STRIDE), 1);
            own = own + 4 < STRIDE ? own + 4 : own + 4 - STRIDE;  // the last set of a row is not always the same warp's
            row += step;
            look();
        }
        const bool there = at < end;
        copy16(own_values + slot, values + at, there);
        copy8(own_places + slot, places + at, there);
        end_set();
        at += STRIDE, left--;
        ends = ends >> 1 | (left == 0) << DEPTH;
    }
    __device__ __forceinline__ void take(u32 slot, Chunk<KIND> &chunk) const {
        chunk.words[0] = read16(own_values + slot);
        const uint2 place = read8(own_places + slot);
        chunk.place = (u64)place.y << 32 | place.x;
    }
};

// Four warps change their registers together, and there are as many as the block began with.
static_assert(READERS % 4 == 0 && WRITERS % 4 == 0, "");
static_assert(32 * (READERS * 168 + WRITERS * 48) <= THREADS * (65536 / THREADS / 8 * 8), "");

template <int KIND, int BATCH>
__global__ void __launch_bounds__(THREADS, 1)
    sparse_tiles(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                 float *partial, int rows, int columns, int tiles, int batch, int chunks) {
    constexpr int EIGHTS = BATCH / 8, SLICE = TILE / READERS, WORDS = SLICE / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.y, base = tile * TILE, width = min(TILE, columns - base);
    const int units = (rows + ROWS - 1) / ROWS;
    const u32 buffer = place_of(shared), sums = buffer + 2 * BUFFER, ring = sums + 2 * READERS * 512;
    const u32 empty = ring + DEPTH * SLOT, full = empty + 16;  // barriers of the two buffers
    const uint4 zero = make_uint4(0, 0, 0, 0);

    let_others_start();
    if (threadIdx.x < 4) begin_barrier(empty + 8 * threadIdx.x, threadIdx.x < 2 ? READERS : WRITERS);
    for (int i = BATCH * 2 * TILE + threadIdx.x * 16; i < 2 * BUFFER; i += THREADS * 16) write16(buffer + i, zero);
    __syncthreads();
    if (warp >= READERS) {
        fewer_registers();
        Ring<KIND> chain(values, places, starts, ring, rows, tiles, tile);
        chain.look();  // what is not yet there does no harm
        const int ready = chain.first + chain.own;
        if (ready >= 0 && ready < chain.last && ready < chunks) Chunk<KIND>::send_for_it(values, places, ready);
        wait_for_others();
        chain.look();
#pragma unroll 1
        for (int i = 0; i < DEPTH; i++) chain.send(i * SLOT);
        u32 slot = 0;
        for (int unit = blockIdx.x, turn = 0; unit < units; unit += gridDim.x, turn++) {
            const u32 to = buffer + turn % 2 * BUFFER + g * 16;
            wait_for_phase(empty + turn % 2 * 8, turn / 2 % 2);
            do {
                Chunk<KIND> chunk;
                wait_for_sets<DEPTH - 1>();
                chain.take(slot, chunk);
                write_out(chunk, to);
                chain.send(slot);
                slot = slot == (DEPTH - 1) * SLOT ? 0 : slot + SLOT;
            } while (!(chain.ends & 1));
            __syncwarp();
            if (lane == 0) come(full + turn % 2 * 8);
        }
        wait_for_sets<0>();
        return;
    }

    more_registers();
    wait_for_others();
    bring<BATCH>(buffer, reinterpret_cast<const u16 *>(x), batch, columns, base, width);
    wait_for_sets<0>();
    meet(READ, 32 * READERS);
    u32 a[EIGHTS][WORDS];  // of x, in pairs of columns that lie 2048 apart, in the order in which a lane finds them in W
    const u32 even = t & 1 ? 0x7632u : 0x5410u, odd = t & 1 ? 0x5410u : 0x7632u;
    const auto take = [&](int b, int eight, u32 (&found)[4]) {  // nobody else does; W is to be written there
        const u32 at = buffer + place_in_x(b, eight);
        const uint4 got = read16(at);
        write16(at, zero);
        found[0] = t & 2 ? got.y : got.x, found[1] = t & 2 ? got.x : got.y;
        found[2] = t & 2 ? got.w : got.z, found[3] = t & 2 ? got.z : got.w;
    };
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int j = 0; j < WORDS / 8; j++) {
            const int eight = warp * (SLICE / 16) + t * (SLICE / 64) + j;
            u32 near[4], far[4];
            take(8 * e + g, eight, near);
            take(8 * e + g, eight + 256, far);
#pragma unroll
            for (int s = 0; s < 8; s++) a[e][8 * j + s] = __byte_perm(near[s / 2], far[s / 2], s % 2 ? odd : even);
        }
    __syncwarp();
    if (lane == 0) come(empty), come(empty + 8);

    u32 from[4];  // where a lane finds its words
#pragma unroll
    for (int k = 0; k < 4; k++) {
        from[k] = buffer + warp * SLICE * 16 + t * SLICE * 4 + g * 16 + (k ^ t) * 4;
        remember(from[k]);
    }
    for (int unit = blockIdx.x, turn = 0; unit < units; unit += gridDim.x, turn++) {
        const u32 now = turn % 2 * BUFFER, own_sums = sums + turn % 2 * READERS * 512 + lane * 16;
        float sum[2][4] = {};  // by turns: each waits for its last
        wait_for_phase(full + turn % 2 * 8, turn / 2 % 2);
#pragma unroll
        for (int s = 0; s < WORDS; s += 2) {
            const u32 at = now + s / 8 * 256 + s % 8 / 4 * 128;
            const u32 upper = read4(at + from[s % 4]), lower = read4(at + from[s % 4 + 1]);
            const u32 factor[4] = {a[0][s], EIGHTS > 1 ? a[EIGHTS - 1][s] : 0,  //
                                   a[0][s + 1], EIGHTS > 1 ? a[EIGHTS - 1][s + 1] : 0};
            multiply<KIND>(sum[s / 2 % 2], factor, upper, lower);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) write16(now + buffer + warp * SLICE * 16 + i * 512 + lane * 16, zero);
        __syncwarp();
        if (lane == 0) come(empty + turn % 2 * 8);
        float4 total = make_float4(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1], sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
        write16(own_sums + warp * 512, make_uint4(__float_as_uint(total.x), __float_as_uint(total.y),
                                                  __float_as_uint(total.z), __float_as_uint(total.w)));
        meet(READ, 32 * READERS);
        if (turn % READERS != warp) continue;
        total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < READERS; s++) {
            const uint4 other = read16(own_sums + s * 512);
            total.x += __uint_as_float(other.x), total.y += __uint_as_float(other.y);
            total.z += __uint_as_float(other.z), total.w += __uint_as_float(other.w);
        }
        const int row = unit * ROWS + 2 * t;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const int b = 8 * e + g;
            if (b < batch && row < rows) put<KIND>(e ? total.z : total.x, b, batch, row, rows, bias, y, partial);
            if (b < batch && row + 1 < rows) put<KIND>(e ? total.w : total.y, b, batch, row + 1, rows, bias, y, partial);
        }
    }
}
