// y = x W^T + bias for a packed W (see format.py) and a few rows of x, which lie in shared memory; equal work for all.
//
// KIND: what values, x and y are (0 bf16, 1 fp16, 2 fp32). BATCH: rows of x, rounded up to 1, 2, 4, 8 or 16;
// from 8 on those of 16 bits go by tensor cores. Sums are made in fp32, always in the same order.
//
// A block has some rows of W, one for a thread at most. Their chunks are counted in octets (the last of a row may be
// short), and each quarter of a warp, a stream, takes an equal run of them, wherever rows begin and end. A row that lies
// within one stream is written by it; of others each stream leaves its piece in shared memory, and they are added up in
// the order of streams.

constexpr u32 ALL = 0xffffffffu;

// The rows of a block: octets before each and their total, the first chunk of each, and the one after its last.
template <int WARPS> struct Rows {
    static constexpr int STREAMS = 4 * WARPS, MOST = 32 * WARPS, WORDS = 3 * MOST + 36;
    int *octets, *firsts, *lasts, *of_warps;
    int count, total;

    __device__ __forceinline__ Rows(void *memory, int count) : count(count), total(0) {
        firsts = reinterpret_cast<int *>(memory), lasts = firsts + MOST, of_warps = lasts + MOST, octets = of_warps + 32;
    }
    __device__ __forceinline__ static int up_to(int own, int lane) {  // sums over the lanes so far
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int more = __shfl_up_sync(ALL, own, d);
            if (lane >= d) own += more;
        }
        return own;
    }
    // Every thread has one row, or none.
    __device__ __forceinline__ void lay_out(int first, int last) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = (last - first + 7) / 8;
        const int within = up_to(own, lane);
        if (lane == 31) of_warps[warp] = within;
        __syncthreads();
        const int mine = lane < WARPS ? of_warps[lane] : 0, warps = up_to(mine, lane);
        total = __shfl_sync(ALL, warps, 31);
        const int before = __shfl_sync(ALL, warps - mine, warp) + within - own;
        if (threadIdx.x < count) octets[threadIdx.x] = before, firsts[threadIdx.x] = first, lasts[threadIdx.x] = last;
        if (threadIdx.x == 0) octets[count] = total;
        __syncthreads();
    }
    __device__ __forceinline__ int begin(int stream) const { return (int)((long long)stream * total / STREAMS); }
    // The row that an octet belongs to.
    __device__ __forceinline__ int row_of(int octet) const {
        int low = 0, high = count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (octets[middle] <= octet) low = middle;
            else high = middle;
        }
        return low;
    }
};

// Where a stream is.
template <int WARPS> struct Cursor {
    int now, end, row, at, stop, finish;

    __device__ __forceinline__ void start(const Rows<WARPS> &rows, int stream) {
        now = rows.begin(stream), end = rows.begin(stream + 1), row = 0, at = stop = finish = 0;
        if (now < end) {
            row = rows.row_of(now);
            enter(rows);
            at += 8 * (now - rows.octets[row]);
        }
    }
    __device__ __forceinline__ void enter(const Rows<WARPS> &rows) {
        at = rows.firsts[row], stop = rows.lasts[row], finish = rows.octets[row + 1];
    }
    // The chunk of a lane, or -1; and the row that is to be written after it, or -1.
    __device__ __forceinline__ int take(const Rows<WARPS> &rows, int lane, int &mark) {
        const bool here = now < end;
        const int chunk = here && at + lane % 8 < stop ? at + lane % 8 : -1;
        at += 8, now++;
        const bool over = now == finish;
        mark = here && (over || now == end) ? row : -1;
        if (over && now < end) {
            do row++;
            while (row + 1 < rows.count && rows.octets[row + 1] <= now);
            enter(rows);
        }
        return chunk;
    }
};

// The sums of four streams. A lane has totals of one of them, of one or two rows of x.
template <int KIND, int BATCH, bool TENSOR> struct Quarters : Sums<KIND, BATCH, false> {
    static_assert(BATCH <= 8, "a quarter of a warp has eight lanes");
    static constexpr int TOTALS = 1, LANES = 8 / BATCH;
    using Sums<KIND, BATCH, false>::Sums;

    __device__ __forceinline__ static int stream_of(int lane) { return lane / 8; }
    __device__ __forceinline__ static int row_of(int lane, int) { return lane % 8 / LANES; }
    __device__ __forceinline__ static bool writes(int lane) { return lane % LANES == 0; }
    __device__ __forceinline__ void collect(int lane, float (&total)[TOTALS]) const {
        float sum[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) sum[b] = this->sum[b];
        total[0] = reduce<BATCH, 4>(sum, lane);
    }
};

// In a product of tensor.cu the sums of a quarter's chunks stand in two columns of their own.
template <int KIND, int BATCH> struct Quarters<KIND, BATCH, true> : Sums<KIND, BATCH, true> {
    static constexpr int TOTALS = BATCH / 8;
    using Sums<KIND, BATCH, true>::Sums;

    __device__ __forceinline__ static int stream_of(int lane) { return lane % 4; }
    __device__ __forceinline__ static int row_of(int lane, int i) { return 8 * i + lane / 4; }
    __device__ __forceinline__ static bool writes(int) { return true; }
    __device__ __forceinline__ void collect(int lane, float (&total)[TOTALS]) const {
#pragma unroll
        for (int e = 0; e < TOTALS; e++)
            total[e] = lane % 4 < 2 ? this->sum[e][0] + this->sum[e][1] : this->sum[e][2] + this->sum[e][3];
    }
};

template <int KIND, int BATCH, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, WARPS == 16 ? 2 : 1)
    sparse_flow(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                float *partial, int rows, int columns, int tiles, int batch, int tiles_here, int chunks) {
    constexpr bool TENSOR = KIND != 2 && BATCH >= 8;
    constexpr int STREAMS = 4 * WARPS;
    constexpr int DEPTH = KIND == 2 || BATCH == 16 ? 1 : 2;  // sets on their way; more take too many registers there
    typedef Quarters<KIND, BATCH, TENSOR> Own;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = blockIdx.y * tiles_here, tiles_end = min(tile + tiles_here, tiles);
    const int base = tile * TILE, width = min(tiles_end * TILE, columns) - base;
    const int row0 = (int)((long long)rows * blockIdx.x / gridDim.x);
    char *memory = reinterpret_cast<char *>(shared) + ((long long)width * BYTES<KIND, BATCH> + 15) / 16 * 16;
    Rows<WARPS> here(memory, (int)((long long)rows * (blockIdx.x + 1) / gridDim.x) - row0);
    float *heads = reinterpret_cast<float *>(memory) + Rows<WARPS>::WORDS, *tails = heads + STREAMS * BATCH;

    const auto look = [&](int &first, int &last) {  // of the thread's row; what is not yet there does no harm
        first = last = 0;
        if (threadIdx.x < here.count) {
            const int *at = starts + (long long)(row0 + threadIdx.x) * tiles;
            first = min(max(__ldcg(at + tile), 0), chunks);
            last = min(max(__ldcg(at + tiles_end), first), chunks);
        }
    };
    struct Set {
        Chunk<KIND> chunk;
        int mark;
    };
    Cursor<WARPS> cursor;
    const auto load = [&](Set &set) {
        const int own = cursor.take(here, lane, set.mark);
#pragma unroll
        for (int i = 0; i < (KIND == 2 ? 2 : 1); i++) set.chunk.words[i] = make_uint4(0, 0, 0, 0);
        set.chunk.place = (u64)base << 42;
        const int other = TENSOR ? __shfl_sync(ALL, own, partner(lane)) : own;
        if (own >= 0) set.chunk.load_values(values, own);
        if (other >= 0) set.chunk.place = __ldcs(places + other);
    };

    int first, last, first_now, last_now;
    let_others_start();
    look(first, last);
    here.lay_out(first, last);
    cursor.start(here, 4 * warp + lane / 8);
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ahead++) {
        int mark;
        const int chunk = cursor.take(here, lane, mark);
        if (chunk >= 0) Chunk<KIND>::send_for_it(values, places, chunk);
    }
    cursor.start(here, 4 * warp + lane / 8);
    wait_for_others();
    look(first_now, last_now);
    Set sets[DEPTH + 1];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) load(sets[i]);  // while x is on its way
    const bool spoilt = fetch<KIND, BATCH>(shared, x, batch, columns, base, width);
    if (__syncthreads_or(first != first_now || last != last_now)) {  // the weights were made just before
        here.lay_out(first_now, last_now);
        cursor.start(here, 4 * warp + lane / 8);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) load(sets[i]);
    }
    if (__syncthreads_or(spoilt)) {
        constexpr int LANES = 32 / BATCH;
        for (int r = warp; r < here.count; r += WARPS) {
            Sums<KIND, BATCH, false> slow(lane);
            careful<KIND, BATCH>(values, places, here.firsts[r], here.lasts[r], shared, base, width, 0, 32, slow.sum);
            const float total = reduce<BATCH>(slow.sum, lane);
            const int b = lane / LANES;
            if (lane % LANES == 0 && b < batch) put<KIND>(total, b, batch, row0 + r, rows, bias, y, partial);
        }
        return;
    }

    Own sums(lane);
    const int stream = 4 * warp + Own::stream_of(lane), from = here.begin(stream), to = here.begin(stream + 1);
    for (int left = (here.total + STREAMS - 1) / STREAMS; left > 0; left--) {
        load(sets[DEPTH]);
        if (TENSOR) __syncwarp();
        sums.add(sets[0].chunk, shared, base, 0, 1, 0);
        const int r = TENSOR ? __shfl_sync(ALL, sets[0].mark, 8 * Own::stream_of(lane)) : sets[0].mark;
        if (__any_sync(ALL, r >= 0)) {
            float total[Own::TOTALS];
            sums.collect(lane, total);
            if (r >= 0) {
                const bool began = here.octets[r] >= from, ended = here.octets[r + 1] <= to;
#pragma unroll
                for (int i = 0; i < Own::TOTALS; i++) {
                    const int b = Own::row_of(lane, i);
                    if (b >= batch || !Own::writes(lane)) continue;
                    if (began && ended) put<KIND>(total[i], b, batch, row0 + r, rows, bias, y, partial);
                    else (began ? tails : heads)[stream * BATCH + b] = total[i];
                }
                sums.clear();
            }
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) sets[i] = sets[i + 1];
    }
    __syncthreads();
    for (int piece = threadIdx.x; piece < STREAMS * batch; piece += blockDim.x) {
        int stream = piece / batch;
        const int b = piece % batch, from = here.begin(stream), to = here.begin(stream + 1);
        if (from == to) continue;
        const int r = here.row_of(to - 1), end = here.octets[r + 1];
        if (end <= to || here.octets[r] < from) continue;  // only what begins here and does not end here
        float total = tails[stream * BATCH + b];
        while (here.begin(stream + 1) < end) {
            stream++;
            if (here.begin(stream) < here.begin(stream + 1)) total += heads[stream * BATCH + b];
        }
        put<KIND>(total, b, batch, row0 + r, rows, bias, y, partial);
    }
    if (threadIdx.x < here.count && here.octets[threadIdx.x] == here.octets[threadIdx.x + 1])
        for (int b = 0; b < batch; b++) put<KIND>(0.0f, b, batch, row0 + threadIdx.x, rows, bias, y, partial);
}
