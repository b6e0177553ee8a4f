// y = x W^T + bias for a packed W (see format.py) and 9 to 16 rows of x of 16 bits, which can be read 16 bytes at a time, by
// dense products of tensor cores.
//
// Eight rows of W in one tile of columns at a time are written out into shared memory, with their zeros. Most warps write
// them there. The others multiply: each has a slice of the columns, of x in registers from the start to the end, and
// clears what it has read of W; the sums of all slices are added up in their order. Buffers go round between the two.
// Blocks that have the same rows in other tiles are in one cluster, send their sums to one of them and add them up in the
// end; or all sums of a tile are given out (``partial``). ``across`` blocks that have the same tile are in one cluster, too:
// what one of them reads of x goes to all.
//
// Column 2048 p + 8 j + 4 h + k (p, h: 0 or 1, k: 0 to 3) of row r lies at 256 j + 128 h + 16 r + 4 k + 2 p. So eight
// rows of four kinds each are written to 32 banks, and lanes that look for four kinds of eight rows read from 32.

constexpr int ROWS = 8, BUFFER = ROWS * TILE * 2, READERS = 8;
constexpr int WRITERS = 12;
constexpr int DEPTH = 3;  // sets of chunks that are on their way
constexpr int THREADS = 32 * (READERS + WRITERS), STRIDE = 4 * WRITERS, SLOT = WRITERS * 32 * 24;
constexpr int SLICE = TILE / READERS, SETS = SLICE / 64;  // columns of a warp, and sets of eight words of a lane
constexpr int AHEAD = 4;  // units whose sums wait to be added up: readers are never more than two apart
constexpr int EACH = 1;   // lanes of a warp that come to a barrier: 32, for tools that cannot follow it otherwise
constexpr int READ = 1, SENT = 2;  // barriers: of all readers; of writers that have sent for chunks, and a reader
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
    if (__any_sync(ALL, eights && at[CHUNK - 1] >= to + BUFFER)) {  // into the second half of the tile
#pragma unroll
        for (int i = 1; i < CHUNK; i++) at[i] -= at[i] >= to + BUFFER ? BUFFER - 2 : 0;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) write2_if(eights, at[i], value(i));
}

// Eight rows of x in one tile, from memory or from shared memory.
struct Eight {
    const u16 *x;
    u32 copied;
    int many, columns, width;

    // Each by one block for all of its tile.
    __device__ __forceinline__ void copy(u32 there, int across, int rank) const {
        const u32 all = ((1u << across) - 1) << rank;
        for (int b = blockIdx.x % across; b < many; b += across)
            copy_to_all(copied + b * X_ROW, x + (long long)b * columns, 2 * width, there, all);
    }
    // Eight columns of a row, near and 2048 further on, for each of a lane's sets: place by place.
    template <class F> __device__ __forceinline__ void each(F what) const {
        const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++) what(i, warp * (SLICE / 2) + i / 2 * 32 + t * 8 + i % 2 * (TILE / 2));
    }
    __device__ __forceinline__ u32 row() const { return copied + threadIdx.x % 32 / 4 * X_ROW; }
    __device__ __forceinline__ void clear_beyond() const {  // what is not copied
        if (width < TILE) each([&](int i, int column) {
            if (column >= width) write16(row() + 2 * column, make_uint4(0, 0, 0, 0));
        });
    }
    template <int COPIED> __device__ __forceinline__ void find(uint4 (&found)[2 * SETS]) const {
        const int g = threadIdx.x % 32 / 4;
        each([&](int i, int column) {
            if constexpr (COPIED) found[i] = read16(row() + 2 * column);
            else {
                const u16 *from = x + (long long)g * columns + column;
                found[i] = __ldcg(g < many && column < width ? reinterpret_cast<const uint4 *>(from) : nothing);
            }
        });
    }
};
// In pairs of columns that lie 2048 apart, in the order in which a lane finds them in W.
__device__ __forceinline__ void pair(u32 (&pairs)[8 * SETS], const uint4 (&found)[2 * SETS]) {
    const int t = threadIdx.x % 4;
    const u32 even = t & 1 ? 0x7632u : 0x5410u, odd = t & 1 ? 0x5410u : 0x7632u;
#pragma unroll
    for (int i = 0; i < SETS; i++) {
        const uint4 &n = found[2 * i], &f = found[2 * i + 1];
        const u32 near[4] = {t & 2 ? n.y : n.x, t & 2 ? n.x : n.y, t & 2 ? n.w : n.z, t & 2 ? n.z : n.w};
        const u32 far[4] = {t & 2 ? f.y : f.x, t & 2 ? f.x : f.y, t & 2 ? f.w : f.z, t & 2 ? f.z : f.w};
#pragma unroll
        for (int s = 0; s < 8; s++) pairs[i * 8 + s] = __byte_perm(near[s / 2], far[s / 2], s % 2 ? odd : even);
    }
}

// Chunks of packed weights on their way to a warp that writes them out: a lane has every so manieth of a row of each unit.
template <int KIND> struct Ring {
    const uint4 *values, *next_values;
    const u64 *places, *next_places;
    const int *starts;
    u32 own_values, own_places;  // where they go
    int rows, tiles, row, own, step, first, last, mine, left;
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
    __device__ __forceinline__ void open() {
        const int at = first + own;
        mine = (u32)max((row < rows ? last : 0) - at + STRIDE - 1, 0) / STRIDE;
        left = max(__reduce_max_sync(ALL, mine), 1);
        next_values = values + at, next_places = places + at;
    }
    __device__ __forceinline__ void go_on() {
        own = own + 4 < STRIDE ? own + 4 : own + 4 - STRIDE;  // the last set of a row is not always the same warp's
        row += step;
        look();
    }
    __device__ __forceinline__ void put(u32 slot) {
        copy16(own_values + slot, next_values, mine > 0);
        copy8(own_places + slot, next_places, mine > 0);
        end_set();
        next_values += STRIDE, next_places += STRIDE, mine--, left--;
        ends = ends >> 1 | (left == 0) << DEPTH;
        none >>= 1;
    }
    __device__ __forceinline__ void send(u32 slot) {
        if (left == 0) open(), go_on();
        put(slot);
    }
    // At first only what the first unit has: for the next it would have to wait.
    __device__ __forceinline__ void fill() {
        open();
        put(0);
#pragma unroll
        for (int i = 1; i < DEPTH; i++) {
            if (left) {
                put(i * SLOT);
                continue;
            }
            end_set();
            ends >>= 1, none = none >> 1 | 1 << DEPTH;
        }
    }
    // From where the first rows started when the block did. They have been there for long, nearly always; if not, again.
    __device__ __forceinline__ void begin(int chunks) {
        if (first < 0 || first > last || last > chunks) first = last = 0;
        const int early_first = first, early_last = last;
        look();
        const int true_first = first, true_last = last;
        first = early_first, last = early_last;
        fill();
        first = true_first, last = true_last;
        if (__any_sync(ALL, first != early_first || last != early_last)) {
            wait_for_sets<0>();
            ends = none = 0;
            fill();
        }
        go_on();
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

// FORM: 0: no cluster, 1: tiles of the same rows are one, 2: ``across`` is more than 1, and they may be, too.
template <int KIND, int FORM>
__global__ void __launch_bounds__(THREADS, 1)
    sparse_tiles(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                 float *partial, int rows, int columns, int tiles, int chunks, int batch, int across) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.y, base = tile * TILE, width = min(TILE, columns - base);
    const int units = (rows + ROWS - 1) / ROWS;
    constexpr bool CLUSTERED = FORM > 0, COPIED = FORM > 1;
    const bool alone = !CLUSTERED || tiles == 1 || partial;  // not in a cluster with other tiles
    const u32 buffer = place_of(shared), ring = buffer + 2 * BUFFER + X_MORE;
    const u32 empty = ring + DEPTH * SLOT, full = empty + 16, there = full + 16;  // barriers: of the two buffers, of x
    const u32 summed = there + 16, taken = summed + 8, gathered = taken + 8;      // of sums: from other tiles, and warps
    const u32 sums = gathered + 8 * AHEAD, kept = sums + AHEAD * READERS * 512 + lane * 16;  // kept: with other tiles
    const auto rank_of = [&](int tile) { return (int)blockIdx.x % across + tile * across; };  // with the same rows
    const uint4 zero = make_uint4(0, 0, 0, 0);

    let_others_start();
    Ring<KIND> chain(values, places, starts, ring, rows, tiles, tile);
    if (warp >= READERS) chain.look();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            begin_barrier(empty + 8 * i, EACH * READERS), begin_barrier(full + 8 * i, EACH * WRITERS);
            begin_barrier(there + 8 * i, 1);
        }
        for (int i = 0; i < AHEAD; i++) begin_barrier(gathered + 8 * i, EACH * READERS);
        begin_barrier(summed, 1), begin_barrier(taken, max(tiles - 1, 1));
        barriers_begun();
        come_with(there, 2 * width * min(batch, 8)), come_with(there + 8, 2 * width * max(batch - 8, 0));
        const int turns = (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
        come_with(summed, alone ? 0 : max(turns - tile + tiles - 1, 0) / tiles * (tiles - 1) * 512);
    }
    __syncthreads();
    if (CLUSTERED) come_to_cluster();
    if (warp >= READERS) {
        fewer_registers<WRITES>();
        wait_for_others();
        chain.begin(chunks);
        if (!COPIED) meet(SENT, 32 * WRITERS + 32);
        if (CLUSTERED) wait_for_cluster();
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
                    if (lane < EACH) come(full + turn % 2 * 8);
                }
                chain.send(slot);
                slot = slot == (DEPTH - 1) * SLOT ? 0 : slot + SLOT;
            }
        }
        wait_for_sets<0>();
        return;
    }

    more_registers<READS>();
    u32 own_part = buffer + warp * SLICE * 16 + lane * 16;
    const auto clear = [&](int which) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) write16(own_part + which * BUFFER + i * 512, zero);
        __syncwarp();
        if (lane < EACH) come(empty + 8 * which);
    };
    const u16 *own_x = reinterpret_cast<const u16 *>(x) + base;
    const Eight first{own_x, buffer + BUFFER, min(batch, 8), columns, width};
    const Eight second{own_x + 8ll * columns, sums, max(batch - 8, 0), columns, width};
    u32 a[2][8 * SETS];
    uint4 found[2 * SETS];
    clear(0);
    wait_for_others();
    if (!COPIED && warp == 0) meet(SENT, 32 * WRITERS + 32);  // less of x in their way: measured to be faster
    if (CLUSTERED) wait_for_cluster();
    if constexpr (COPIED) {
        if (threadIdx.x == 0) {
            const int rank = alone ? 0 : tile * across;
            first.copy(there, across, rank), second.copy(there + 8, across, rank);
        }
        first.clear_beyond(), second.clear_beyond();
        wait_for_phase(there, 0);
        first.find<1>(found), pair(a[0], found);
        meet(READ, 32 * READERS);
        clear(1);
        wait_for_phase(there + 8, 0);
        second.find<1>(found), pair(a[1], found);
        meet(READ, 32 * READERS);
    } else {
        uint4 others[2 * SETS];
        first.find<0>(found), second.find<0>(others);
        clear(1);
        pair(a[0], found), pair(a[1], others);
    }
    if (COPIED && !alone && threadIdx.x < tiles && threadIdx.x != tile) come_there(place_in(taken, rank_of(threadIdx.x)));

    u32 from[4], other = BUFFER;  // where a lane finds its words, and how far away in the other buffer
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
        const u32 own_sums = sums + turn % AHEAD * READERS * 512 + lane * 16;
        float sum[2][4] = {};  // by turns: each waits for its last
        wait_for_phase(full + turn % 2 * 8, turn / 2 % 2);
        u32 w[2][8];
        const auto read = [&](int j) {
#pragma unroll
            for (int s = 0; s < 8; s++) w[j % 2][s] = read4(from[s % 4] + j * 1024 + s / 4 * 128);
        };
        read(0);
#pragma unroll
        for (int j = 0; j < SETS; j++) {
            if (j + 1 < SETS) read(j + 1);
            __syncwarp();
            write16(own_part + j * 1024, zero);
            write16(own_part + j * 1024 + 512, zero);
#pragma unroll
            for (int s = 0; s < 8; s += 2) {
                const u32 factor[4] = {a[0][8 * j + s], a[1][8 * j + s], a[0][8 * j + s + 1], a[1][8 * j + s + 1]};
                multiply<KIND>(sum[s / 2 % 2], factor, w[j % 2][s], w[j % 2][s + 1]);
            }
        }
        __syncwarp();
        if (lane < EACH) come(empty + turn % 2 * 8);
#pragma unroll
        for (int k = 0; k < 4; k++) from[k] += other, remember(from[k]);
        own_part += other, other = -other;
        const auto both = [&](int i) { return sum[0][i] + sum[1][i]; };
        write16(own_sums + warp * 512, words_of(make_float4(both(0), both(1), both(2), both(3))));
        __syncwarp();
        if (lane < EACH) come(gathered + turn % AHEAD * 8);
        if (turn % READERS != warp) continue;
        wait_for_phase(gathered + turn % AHEAD * 8, turn / AHEAD % 2);
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < READERS; s++) add(total, read16(own_sums + s * 512));
        if (alone) {
            put_all(total, unit);
            continue;
        }
        const u32 to = kept + (turn - turn % tiles + tile) * 512;
        if (turn % tiles == tile) write16(to, words_of(total));
        else {
            const int whose = rank_of(turn % tiles);
            if (COPIED) wait_for_others_of_cluster(taken);
            push16(place_in(to, whose), words_of(total), place_in(summed, whose));
        }
    }
    if (alone) return;
    meet(READ, 32 * READERS);
    if (COPIED) wait_for_others_of_cluster(taken);  // nothing goes to a block that has ended
    wait_for_others_of_cluster(summed);
    for (int i = warp * tiles + tile; i < turn; i += READERS * tiles) {
        float4 total = make_float4(0, 0, 0, 0);
        for (int s = 0; s < tiles; s++) add(total, read16(kept + (i - tile + s) * 512));
        put_all(total, blockIdx.x + i * gridDim.x);
    }
}
