// Rows of x in shared memory, and products of chunks with their columns.

template <int KIND> constexpr u32 INFINITE = KIND == 0 ? 0x7f80u : KIND == 1 ? 0x7c00u : 0x7f800000u;
template <int KIND, int BATCH> constexpr int BYTES = sizeof(typename Kind<KIND>::Raw) * BATCH;  // of a column
// Columns of more than 16 bytes lie in several planes, so that columns of different kinds meet different banks.
template <int KIND, int BATCH> constexpr int PLANES = BYTES<KIND, BATCH> > 16 ? BYTES<KIND, BATCH> / 16 : 1;
template <int KIND, int BATCH> constexpr int WIDE = BYTES<KIND, BATCH> / PLANES<KIND, BATCH>;

// Where the columns of a chunk lie in shared memory, one after the other. ``origin``: where column 0 of W would.
template <int BYTES> struct Walk {
    static constexpr int SHIFT = BYTES == 2 ? 9 : BYTES == 4 ? 8 : BYTES == 8 ? 7 : 6;
    u64 place;
    u32 now, step;

    __device__ __forceinline__ Walk(u64 place, u32 origin) : place(place) {
        const u32 high = (u32)(place >> 32);
        // No chunk says column 0, which may lie before all that is there.
        now = max((int)(((high & 0x3ffffc00u) >> SHIFT) + origin), (int)place_of(shared));
        step = by_eights(place) ? 8 * BYTES : BYTES;
    }
    __device__ __forceinline__ u32 operator[](int i) {  // 0 to 7, in this order
        if (i) now += step_of(place, i) * step;
        return now;
    }
};

// What lies there: a column of x, of all rows of the batch. ``plane``: the bytes of one.
template <int KIND, int BATCH>
__device__ __forceinline__ void gather(u32 at, u32 plane, float (&x)[BATCH]) {
    if constexpr (BYTES<KIND, BATCH> <= 2) x[0] = widen<KIND>(read2(at));
    else if constexpr (KIND == 2 && BATCH == 1) x[0] = __uint_as_float(read4(at));
    else {
        constexpr int WORDS = BYTES<KIND, BATCH> / 4;
        u32 w[WORDS];
        if constexpr (WORDS == 1) w[0] = read4(at);
        else if constexpr (WORDS == 2) {
            const uint2 v = read8(at);
            w[0] = v.x, w[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const uint4 v = read16(at + i * plane);
                w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if constexpr (KIND == 2) x[b] = __uint_as_float(w[b]);
            else x[b] = b % 2 ? high<KIND>(w[b / 2]) : low<KIND>(w[b / 2]);
        }
    }
}

// Sums over 2 * FIRST lanes: lane l of them gets that of row l * BATCH / (2 * FIRST) of the batch, or all get the one.
template <int BATCH, int FIRST = 16> __device__ __forceinline__ float reduce(float (&sum)[BATCH], int lane) {
    int left = BATCH;
#pragma unroll
    for (int half = FIRST; half > 0; half /= 2) {
        if (left > 1) {
            left /= 2;
            const bool upper = lane & half;
#pragma unroll
            for (int b = 0; b < BATCH / 2; b++) {
                if (b < left) {
                    const float mine = upper ? sum[b + left] : sum[b], other = upper ? sum[b] : sum[b + left];
                    sum[b] = mine + __shfl_xor_sync(0xffffffffu, other, half);
                }
            }
        } else sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], half);
    }
    return sum[0];
}

// The sums of a warp over its part of so many rows of W, for BATCH rows of x.
template <int KIND, int BATCH, int ROWS, bool TENSOR> struct Sums {
    static constexpr int TOTALS = 1, LANES = 32 / ROWS, ALIKE = LANES / BATCH;  // lanes that have the same in the end
    static_assert(ALIKE >= 1, "");
    float sum[BATCH];

    __device__ __forceinline__ Sums(int) { clear(); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int b = 0; b < BATCH; b++) sum[b] = 0;
    }
    __device__ __forceinline__ static int which(int lane) { return lane / LANES; }
    __device__ __forceinline__ static int row_of(int lane, int) { return lane % LANES / ALIKE; }
    __device__ __forceinline__ static bool writes(int lane) { return lane % ALIKE == 0; }
    __device__ __forceinline__ void add(const Chunk<KIND> &chunk, u32 origin, u32 plane) {
        Walk<WIDE<KIND, BATCH>> columns(chunk.place, origin);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            float x[BATCH];
            gather<KIND, BATCH>(columns[i], plane, x);
            const float w = chunk.value(i);
#pragma unroll
            for (int b = 0; b < BATCH; b++) sum[b] = fmaf(w, x[b], sum[b]);
        }
    }
    __device__ __forceinline__ void add_up(int lane, float (&total)[TOTALS]) {
        total[0] = reduce<BATCH, LANES / 2>(sum, lane);
    }
};

// Whether anything was infinite or no number, of what comes in words.
template <int KIND> struct Spoilt {
    u32 sum = 0;
    __device__ __forceinline__ void meet(uint4 got) {
        const u32 words[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (KIND == 2) sum |= (words[i] & INFINITE<2>) == INFINITE<2>;
            else sum = spoil<KIND>(sum, words[i]);
        }
    }
    __device__ __forceinline__ operator bool() const {
        if constexpr (KIND == 2) return sum;
        else return (sum & 0x7fffu) > INFINITE<KIND> || (sum >> 16 & 0x7fffu) > INFINITE<KIND>;
    }
};

// Rows of x as they lie, copied into shared memory sixteen bytes at a time, and put in order where they are: one row as it
// is; eight or sixteen of 32 columns at a time, which stmatrix stores column by column. Each lane copies and takes up
// its own, so that nobody waits for others. Lanes take their words in turn, so that no bank is met twice.
template <int KIND, int BATCH> struct Copies {
    typedef typename Kind<KIND>::Raw Raw;
    static constexpr bool TURNED = TURNS && KIND != 2 && BATCH >= 8;
    static constexpr int MANY = 16 / sizeof(Raw), EIGHTS = TURNED ? BATCH / 8 : 1, AT_ONCE = TURNED ? 8 : 2;
    const Raw *from;
    int batch, columns, width, units, lane, warp, warps;
    u32 to;

    __device__ __forceinline__ Copies(void *xs, const void *x, int batch, int columns, int base, int width)
        : from(reinterpret_cast<const Raw *>(x) + base), batch(batch), columns(columns), width(width),
          lane(threadIdx.x % 32), warp(threadIdx.x / 32), warps(blockDim.x / 32), to(place_of(xs) + lane * 16) {
        const bool aligned = (reinterpret_cast<u64>(from) & 15) == 0;
        units = 0;
        if (TURNED && aligned && columns % 8 == 0 && width % 32 == 0) units = width / 32;
        if (BATCH == 1 && aligned && width % MANY == 0) units = (width / MANY + 31) / 32;
    }
    __device__ __forceinline__ bool possible() const { return units > 0; }
    __device__ __forceinline__ bool there(int unit) const {
        return unit < units && (TURNED || unit * 32 + lane < width / MANY);
    }
    // Some of a warp's units, from this one on.
    __device__ __forceinline__ void start(int first) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int unit = first + i * warps;
            if (there(unit)) {
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) {
                    const int b = 8 * e + lane / 4;
                    const Raw *at = TURNED ? from + (long long)b * columns + unit * 32 + lane % 4 * 8
                                           : from + (unit * 32 + lane) * MANY;
                    copy16(to + e * 16 * width + unit * 512, !TURNED || b < batch ? at : from, !TURNED || b < batch);
                }
            }
            end_set();
        }
    }
    __device__ __forceinline__ void start() const { start(warp); }
    // Whether any of it is infinite or no number.
    __device__ __forceinline__ bool finish() const {
        Spoilt<KIND> spoilt;
        for (int first = warp; first < units; first += AT_ONCE * warps) {
            if (first != warp) start(first);
            take<0>(first, spoilt);
        }
        return spoilt;
    }
    template <int I> __device__ __forceinline__ void take(int first, Spoilt<KIND> &spoilt) const {
        if constexpr (I < AT_ONCE) {
            wait_for_sets<AT_ONCE - 1 - I>();
            if (there(first + I * warps)) order(to + (first + I * warps) * 512, spoilt);
            take<I + 1>(first, spoilt);
        }
    }
    __device__ __forceinline__ void order(u32 at, Spoilt<KIND> &spoilt) const {
        uint4 got[EIGHTS];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            got[e] = read16(at + e * 16 * width);
            spoilt.meet(got[e]);
        }
        if constexpr (TURNED) {
            const int turn = lane % 4;
            const int column = lane % 8 / 2 * 8 + (lane / 8 + lane % 8 / 2) % 4 * 2 + lane % 2;  // that the lane stores
            __syncwarp();
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                u32 w[4] = {got[e].x, got[e].y, got[e].z, got[e].w}, turned[4];
#pragma unroll
                for (int m = 0; m < 4; m++) turned[m] = turn & 1 ? w[(m + 1) % 4] : w[m];
#pragma unroll
                for (int m = 0; m < 4; m++) w[m] = turn & 2 ? turned[(m + 2) % 4] : turned[m];
                store_matrices(w, at - lane * 16 + column * 16 + e * 16 * width);
            }
        }
    }
};

// The same for any x, column by column. Past the first cache, which might have what lay there when an earlier kernel read
// it.
template <int KIND, int BATCH>
__device__ bool fetch(void *xs, const void *x, int batch, int columns, int base, int width) {
    typedef typename Kind<KIND>::Raw Raw;
    Raw *to = reinterpret_cast<Raw *>(xs);
    const Raw *from = reinterpret_cast<const Raw *>(x);
    constexpr u32 TOP = INFINITE<KIND>;
    bool bad = false;
    const auto store = [&](int c, const Raw (&got)[BATCH]) {
        char *at = reinterpret_cast<char *>(xs) + c * WIDE<KIND, BATCH>;
        if constexpr (BYTES<KIND, BATCH> >= 16) {
#pragma unroll
            for (int i = 0; i < PLANES<KIND, BATCH>; i++) {
                u32 word[4];
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    if constexpr (KIND == 2) word[w] = got[4 * i + w];
                    else word[w] = got[8 * i + 2 * w] | (u32)got[8 * i + 2 * w + 1] << 16;
                }
                *reinterpret_cast<uint4 *>(at + i * 16 * width) = make_uint4(word[0], word[1], word[2], word[3]);
            }
        } else {
#pragma unroll
            for (int b = 0; b < BATCH; b++) reinterpret_cast<Raw *>(at)[b] = got[b];
        }
    };
    if constexpr (KIND != 2) {  // two columns at a time
        if (columns % 2 == 0 && width % 2 == 0 && (reinterpret_cast<u64>(from) & 3) == 0) {
#pragma unroll 2
            for (int c = 2 * threadIdx.x; c < width; c += 2 * blockDim.x) {
                u32 two[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; b++)
                    two[b] = b < batch ? __ldcg(reinterpret_cast<const u32 *>(from + (long long)b * columns + base + c)) : 0;
                Raw left[BATCH], right[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    bad |= (two[b] & TOP) == TOP || (two[b] >> 16 & TOP) == TOP;
                    left[b] = (Raw)two[b], right[b] = (Raw)(two[b] >> 16);
                }
                if constexpr (BYTES<KIND, BATCH> >= 16) {  // eight lanes in a row store eight kinds of columns
                    const bool turned = threadIdx.x & 4;
                    Raw now[BATCH], then[BATCH];
#pragma unroll
                    for (int b = 0; b < BATCH; b++) {
                        now[b] = turned ? right[b] : left[b];
                        then[b] = turned ? left[b] : right[b];
                    }
                    store(c + turned, now);
                    store(c + !turned, then);
                } else {
                    store(c, left);
                    store(c + 1, right);
                }
            }
            return bad;
        }
    }
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        Raw got[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            got[b] = b < batch ? __ldcg(from + (long long)b * columns + base + c) : (Raw)0;
            bad |= (got[b] & TOP) == TOP;
        }
        store(c, got);
    }
    return bad;
}

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// A row as a dense product has it: a zero of W times what is not finite is nan. Fillers are no zeros of W.
template <int KIND, int BATCH>
__device__ __noinline__ void careful(const void *values, const u64 *places, const int *starts, int tile, int tiles_end,
                                     const void *xs, int base, int width, int row, int rows, int batch,
                                     const void *bias, void *y, float *partial) {
    const int lane = threadIdx.x % 32, last = starts[tiles_end];
    int met[BATCH];
    float sum[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) sum[b] = 0, met[b] = 0;
    for (int c = starts[tile] + lane; c < last; c += 32) {
        Chunk<KIND> chunk;
        chunk.load(values, places, c);
        Walk<WIDE<KIND, BATCH>> columns(chunk.place, place_of(xs) - base * WIDE<KIND, BATCH>);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const u32 column = columns[i];
            if (chunk.filler(i)) continue;
            float x[BATCH];
            gather<KIND, BATCH>(column, 16 * width, x);
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                sum[b] = fmaf(chunk.value(i), x[b], sum[b]);
                met[b] += !finite(x[b]);
            }
        }
    }
    for (int c = lane; c < width; c += 32) {
        float x[BATCH];
        gather<KIND, BATCH>(place_of(xs) + c * WIDE<KIND, BATCH>, 16 * width, x);
#pragma unroll
        for (int b = 0; b < BATCH; b++) met[b] -= !finite(x[b]);
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++)  // columns that are left over met zeros
        if (__reduce_add_sync(0xffffffffu, met[b]) < 0) sum[b] = __uint_as_float(0x7fc00000u);
    const float total = reduce<BATCH>(sum, lane);
    const int b = lane / (32 / BATCH);
    if (lane % (32 / BATCH) == 0 && b < batch) put<KIND>(total, b, batch, row, rows, bias, y, partial);
}
