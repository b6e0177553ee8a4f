// y = x W^T + bias for a packed W (see format.py) and up to 16 rows of x, by dense products of tensor cores.
//
// Eight rows of W in one tile of columns are written out into shared memory, with their zeros, while the eight before
// are multiplied. Each warp has a slice of the columns: of x in registers, from the start to the end, and of W it reads
// what the others have written, and clears it. The sums of all slices are added up in their order.
//
// Column 2048 p + 8 j + 4 h + k (p, h: 0 or 1, k: 0 to 3) of row r lies at 256 j + 128 h + 16 r + 4 k + 2 p. So eight
// rows of four kinds each are written to 32 banks, and lanes that look for four kinds of eight rows read from 32.

constexpr int ROWS = 8, BUFFER = ROWS * TILE * 2;
constexpr int SCOUT = 1;  // whether chunks are sent for before they are loaded

// The chunks of a lane: its row has a quarter of a set, and a warp every so manieth set.
template <int KIND, int SETS, int STRIDE> struct Sets {
    Chunk<KIND> chunk[SETS];
    int at, last;

    __device__ __forceinline__ void load(const void *values, const u64 *places, int first, int end, int own) {
        at = first + own, last = end;
#pragma unroll
        for (int i = 0; i < SETS; i++) read(chunk[i], values, places, at + i * STRIDE);
    }
    __device__ __forceinline__ void read(Chunk<KIND> &to, const void *values, const u64 *places, int from) const {
        const bool there = from < last;
        to.words[0] = __ldcs(there ? reinterpret_cast<const uint4 *>(values) + from : nothing);
        to.place = __ldcs(there ? places + from : reinterpret_cast<const u64 *>(nothing));
    }
};

// What is not zero, to its place. Zeros may stand for columns that have a value elsewhere, but in chunks with steps by
// eights only for their own. ``there``: whether the lane has a chunk.
template <int KIND>
__device__ __forceinline__ void write_out(const Chunk<KIND> &chunk, bool there, u32 to, int row, int base) {
    if (!__any_sync(ALL, there)) return;
    const u32 first = first_of(chunk.place) - base;
    const bool eights = by_eights(chunk.place);
    const auto place = [&](u32 column) {
        return column % 2048 / 8 * 256 + (column & 4) * 32 + row * 16 + (column & 3) * 4 + column / 2048 * 2;
    };
    const auto value = [&](int i) { return i % 2 ? chunk.word(i / 2) >> 16 : chunk.word(i / 2); };
    if (__all_sync(ALL, eights || !there)) {
        u32 at[CHUNK];
        at[0] = place(first);
#pragma unroll
        for (int i = 1; i < CHUNK; i++) at[i] = at[i - 1] + step_of(chunk.place, i, 8);
        const u32 back = first < 2048 ? BUFFER - 2 : 0;
        if (__any_sync(ALL, there && back && at[CHUNK - 1] >= BUFFER)) {  // into the second half of the tile
#pragma unroll
            for (int i = 1; i < CHUNK; i++) at[i] = min(at[i], at[i] - back);  // which is more, unless it is beyond
        }
#pragma unroll
        for (int i = 0; i < CHUNK; i++) write2_if(there, to + at[i], value(i));
    } else {
        u32 column = first;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            if (i) column += step_of(chunk.place, i) * (eights ? 8 : 1);
            write2_if(value(i) & 0xffffu, to + place(column), value(i));
        }
    }
}

// A lane's part of x, as words of two columns that lie 2048 apart, in the order in which a lane finds them in W.
template <int WORDS>
__device__ __forceinline__ void take(const u16 *x, int left, bool wide, int t, u32 (&found)[WORDS]) {
    const u32 even = t & 1 ? 0x7632u : 0x5410u, odd = t & 1 ? 0x5410u : 0x7632u;
#pragma unroll
    for (int j = 0; j < WORDS / 8; j++) {
        u32 half[2][4];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const int at = 8 * j + 2048 * p;
            uint4 got = make_uint4(0, 0, 0, 0);
            if (wide) {
                if (at < left) got = __ldcg(reinterpret_cast<const uint4 *>(x + at));
            } else {
                u32 one[8];
#pragma unroll
                for (int i = 0; i < 8; i++) one[i] = at + i < left ? __ldcg(x + at + i) : 0;
                got = make_uint4(one[0] | one[1] << 16, one[2] | one[3] << 16, one[4] | one[5] << 16, one[6] | one[7] << 16);
            }
            half[p][0] = t & 2 ? got.y : got.x, half[p][1] = t & 2 ? got.x : got.y;
            half[p][2] = t & 2 ? got.w : got.z, half[p][3] = t & 2 ? got.z : got.w;
        }
#pragma unroll
        for (int s = 0; s < 8; s++) found[8 * j + s] = __byte_perm(half[0][s / 2], half[1][s / 2], s % 2 ? odd : even);
    }
}

template <int KIND, int BATCH, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1)
    sparse_tiles(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                 float *partial, int rows, int columns, int tiles, int batch, int chunks) {
    constexpr int EIGHTS = BATCH / 8, SLICE = TILE / WARPS, WORDS = SLICE / 8, SETS = 32 / WARPS, STRIDE = 4 * WARPS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.y, base = tile * TILE, width = min(TILE, columns - base);
    const int units = (rows + ROWS - 1) / ROWS, own = warp * 4 + t;
    const u32 buffer = place_of(shared);
    float2 *sums = reinterpret_cast<float2 *>(shared + 2 * BUFFER / 16);  // [two][warps][eights][lanes]

    const auto look = [&](int unit, int &first, int &last) {  // the chunks of the lane's row
        const int row = unit * ROWS + g;
        const int *at = starts + (long long)row * tiles + tile;
        first = row < rows ? __ldcg(at) : 0;
        last = row < rows ? __ldcg(at + 1) : 0;
    };
    const auto prefetch = [&](int first, int last) {
#pragma unroll
        for (int i = 0; i < SETS; i++) {
            const int at = first + own + i * STRIDE;
            if (at >= 0 && at < last && at < chunks) Chunk<KIND>::send_for_it(values, places, at);
        }
    };
    int unit = blockIdx.x, first, last, next_first, next_last, after_first, after_last;
    let_others_start();
    look(unit, first, last);  // what is not yet there does no harm
    prefetch(first, last);
    look(unit + gridDim.x, first, last);
    prefetch(first, last);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < 2 * BUFFER / 16; i += blockDim.x) shared[i] = zero;
    wait_for_others();
    look(unit, first, last);
    look(unit + gridDim.x, next_first, next_last);
    look(unit + 2 * gridDim.x, after_first, after_last);
    Sets<KIND, SETS, STRIDE> sets;
    sets.load(values, places, first, last, own);
    const auto load_next = [&](int then) {  // and look for those of a later unit
        sets.load(values, places, next_first, next_last, own);
        if constexpr (SCOUT) prefetch(after_first, after_last);
        next_first = after_first, next_last = after_last;
        look(then, after_first, after_last);
    };

    u32 a[EIGHTS][WORDS];
    const int column = base + warp * (SLICE / 2) + t * (SLICE / 8), left = base + width - column;
    const bool wide = columns % 8 == 0 && (reinterpret_cast<u64>(x) & 15) == 0;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const int b = 8 * e + g;
        take<WORDS>(reinterpret_cast<const u16 *>(x) + (long long)b * columns + column, b < batch ? left : 0, wide, t, a[e]);
    }

    const auto scatter = [&](u32 to) {
#pragma unroll
        for (int i = 0; i < SETS; i++) write_out(sets.chunk[i], sets.at + i * STRIDE < sets.last, to, g, base);
        for (int at = sets.at + SETS * STRIDE; __any_sync(ALL, at < sets.last); at += STRIDE) {
            Chunk<KIND> chunk;
            sets.read(chunk, values, places, at);
            write_out(chunk, at < sets.last, to, g, base);
        }
    };
    __syncthreads();  // all is clear
    scatter(buffer);
    load_next(unit + 3 * gridDim.x);
    __syncthreads();

    u32 from[4];  // where a lane finds its words
#pragma unroll
    for (int k = 0; k < 4; k++) {
        from[k] = warp * SLICE * 16 + t * SLICE * 4 + g * 16 + (k ^ t) * 4;
        remember(from[k]);
    }
    for (int turn = 0; unit < units; unit += gridDim.x, turn++) {
        const u32 now = buffer + turn % 2 * BUFFER, later = buffer + (turn + 1) % 2 * BUFFER;
        float2 *own_sums = sums + turn % 2 * WARPS * EIGHTS * 32;
        if (unit + gridDim.x < units) scatter(later);
        load_next(unit + 4 * gridDim.x);

        float sum[4] = {0, 0, 0, 0}, other_sum[4] = {0, 0, 0, 0};  // by turns: each waits for its last
#pragma unroll
        for (int s = 0; s < WORDS; s += 2) {
            const u32 at = now + s / 8 * 256 + s % 8 / 4 * 128;
            const u32 upper = read4(at + from[s % 4]), lower = read4(at + from[s % 4 + 1]);
            const u32 factor[4] = {a[0][s], EIGHTS > 1 ? a[EIGHTS - 1][s] : 0,  //
                                   a[0][s + 1], EIGHTS > 1 ? a[EIGHTS - 1][s + 1] : 0};
            multiply<KIND>(s % 4 ? other_sum : sum, factor, upper, lower);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) write16(now + warp * SLICE * 16 + i * 512 + lane * 16, zero);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
            own_sums[(warp * EIGHTS + e) * 32 + lane] =
                make_float2(sum[2 * e] + other_sum[2 * e], sum[2 * e + 1] + other_sum[2 * e + 1]);
        __syncthreads();

        const int e = (warp + WARPS - turn * EIGHTS % WARPS) % WARPS;  // warps add up in turn
        if (e < EIGHTS) {
            float2 total = own_sums[e * 32 + lane];
#pragma unroll 8
            for (int w = 1; w < WARPS; w++) {
                const float2 other = own_sums[(w * EIGHTS + e) * 32 + lane];
                total.x += other.x, total.y += other.y;
            }
            const int b = 8 * e + g, row = unit * ROWS + 2 * t;
            if (b < batch && row < rows) put<KIND>(total.x, b, batch, row, rows, bias, y, partial);
            if (b < batch && row + 1 < rows) put<KIND>(total.y, b, batch, row + 1, rows, bias, y, partial);
        }
    }
}
