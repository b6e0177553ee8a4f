// y = x W^T + bias for a packed W (see format.py) and a few rows of x, which lie in shared memory.
//
// KIND: what values, x and y are (0 bf16, 1 fp16, 2 fp32). BATCH: rows of x, rounded up to 1, 2, 4, 8 or 16;
// from 8 on those of 16 bits go by tensor cores.
// ROWS: how many rows of W a warp has at once, one after the other in W; or SPLIT: how many warps share a row.
// Sums are made in fp32, always in the same order.

constexpr u32 ALL = 0xffffffffu;
constexpr int SCOUT = 3;  // sets of chunks that are sent for ahead of the one that is loaded

// Where a lane is: its values and, with tensor cores another lane's, places. Sets of chunks count down to 1, and at
// ``gap`` a lane has no more; above ``most`` all have one, now and as far as is sent for.
struct Run {
    const uint4 *values;
    const u64 *places;
    int gap, other_gap, left, most;
};

template <int KIND, int BATCH, int ROWS, int SPLIT, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, WARPS == 16 ? 2 : 1)
    sparse_rows(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                float *partial, int rows, int columns, int tiles, int batch, int tiles_here, int chunks) {
    static_assert(ROWS == 1 || SPLIT == 1, "");
    constexpr bool TENSOR = KIND != 2 && BATCH >= 8;
    constexpr int LANES = 32 / ROWS, STRIDE = LANES * SPLIT;
    typedef Sums<KIND, BATCH, ROWS, TENSOR> Own;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = SPLIT > 1 ? warp % SPLIT : 0;
    const int tile = blockIdx.y * tiles_here, tiles_end = min(tile + tiles_here, tiles);
    const int base = tile * TILE, width = min(tiles_end * TILE, columns) - base;
    float *halves = reinterpret_cast<float *>(reinterpret_cast<char *>(shared) +
                                              ((long long)width * BYTES<KIND, BATCH> + 15) / 16 * 16);

    const auto look = [&](int unit, int &first, int &last) {  // the chunks of the lane's row
        const int row = unit * ROWS + lane / LANES;
        const int *at = starts + (long long)row * tiles;
        first = row < rows ? __ldcg(at + tile) : 0;
        last = row < rows ? __ldcg(at + tiles_end) : 0;
    };
    const u32 plane = min(16 * width, 1 << 20);
    u32 origin = place_of(shared) - base * WIDE<KIND, BATCH>;
    remember(origin);
    constexpr int N = KIND == 2 ? 2 : 1;
    const auto begin = [&](int first, int last) {
        Run run;
        const int at = first + part * LANES + lane % LANES;
        const int own = (u32)(last - at + STRIDE - 1) / STRIDE;  // sets
        const int all = (u32)(last - first - part * LANES + STRIDE - 1) / STRIDE;
        run.left = max(ROWS > 1 ? __reduce_max_sync(ALL, all) : all, 1);
        run.gap = run.left - own;
        int other = at;
        if constexpr (TENSOR) {
            other = ROWS > 1 ? __shfl_sync(ALL, at, partner(lane)) : at - lane + partner(lane);
            run.other_gap = __shfl_sync(ALL, run.gap, partner(lane));
        }
        run.most = __reduce_max_sync(ALL, run.gap) + SCOUT;
        run.values = reinterpret_cast<const uint4 *>(values) + (long long)at * N, run.places = places + other;
#pragma unroll
        for (int i = 1; i < SCOUT; i++)
            if (own > i) Chunk<KIND>::send_for_it(values, places, at + i * STRIDE);
        return run;
    };
    const auto load = [&](Chunk<KIND> &chunk, const Run &run, int left) {  // zeros, where there are no more
        const int other_gap = TENSOR ? run.other_gap : run.gap;
        if (left > run.most) {  // all lanes have one, now and later
#pragma unroll
            for (int i = 0; i < N; i++) chunk.words[i] = __ldcs(run.values + i);
            chunk.place = __ldcs(run.places);
            send_for(run.values + SCOUT * STRIDE * N);
            send_for(run.places + SCOUT * STRIDE);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; i++) chunk.words[i] = make_uint4(0, 0, 0, 0);
        if (left > run.gap) {
#pragma unroll
            for (int i = 0; i < N; i++) chunk.words[i] = __ldcs(run.values + i);
        }
        if (left > other_gap) chunk.place = __ldcs(run.places);  // else any within these columns
        if (left - SCOUT > run.gap) send_for(run.values + SCOUT * STRIDE * N);
        if (left - SCOUT > other_gap) send_for(run.places + SCOUT * STRIDE);
    };

    int unit = warp / SPLIT * gridDim.x + blockIdx.x, first, last, next_first, next_last;
    const int units = (rows + ROWS - 1) / ROWS, step = WARPS / SPLIT * gridDim.x;
    let_others_start();
    look(unit, first, last);  // what is not yet there does no harm
#pragma unroll
    for (int i = 0; i < SCOUT + 1; i++) {
        const int at = first + part * LANES + lane % LANES + i * STRIDE;
        if (at >= 0 && at < last && at < chunks) Chunk<KIND>::send_for_it(values, places, at);
    }
    wait_for_others();
    look(unit, first, last);
    Run run = begin(first, last);
    Chunk<KIND> chunk, other;
    chunk.place = other.place = (u64)base << 42;
    int left = run.left, of_block = blockIdx.x;
    load(chunk, run, left);  // while x is on its way
    look(unit + step, next_first, next_last);
    if (__syncthreads_or(fetch<KIND, BATCH>(shared, x, batch, columns, base, width))) {  // not all of x is finite
        for (int row = blockIdx.x * WARPS + warp; row < rows; row += gridDim.x * WARPS)
            careful<KIND, BATCH>(values, places, starts + (long long)row * tiles, tile, tiles_end, shared, base, width,
                                 row, rows, batch, bias, y, partial);
        return;
    }

    Own sums(lane);
    const auto turn = [&](const Chunk<KIND> &chunk, Chunk<KIND> &ahead) {  // whether a row ends
        const bool ends = --left == 0;
        if (ends) {
            run = begin(next_first, next_last);
            left = run.left;
        } else {
            run.values += STRIDE * N;
            run.places += STRIDE;
        }
        load(ahead, run, left);
        sums.add(chunk, origin, plane);
        return ends;
    };
    const auto finish = [&] {  // whether that was all
        float total[Own::TOTALS];
        sums.add_up(lane, total);
        const int row = unit * ROWS + Own::which(lane);
#pragma unroll
        for (int i = 0; i < Own::TOTALS; i++) {
            const int b = Own::row_of(lane, i);
            if (!Own::writes(lane)) continue;
            if (SPLIT > 1) halves[warp * BATCH + b] = total[i];
            else if (b < batch && row < rows) put<KIND>(total[i], b, batch, row, rows, bias, y, partial);
        }
        if constexpr (SPLIT > 1) {
            __syncthreads();
            if (part == 0 && lane < batch && unit < rows) {
                float whole = 0;
                for (int s = 0; s < SPLIT; s++) whole += halves[(warp + s) * BATCH + lane];
                put<KIND>(whole, lane, batch, unit, rows, bias, y, partial);
            }
            __syncthreads();
        }
        sums.clear();
        unit += step, of_block += step;
        look(unit + step, next_first, next_last);
        return of_block >= units;  // the same for all warps of a block
    };
    while (true) {
        if (turn(chunk, other) && finish()) break;
        if (turn(other, chunk) && finish()) break;
    }
}
