// y = x W^T + bias for a packed W (see format.py) and a few rows of x, which lie in shared memory.
//
// KIND: what values, x and y are (0 bf16, 1 fp16, 2 fp32). BATCH: rows of x, rounded up to 1, 2, 4, 8 or 16;
// from 8 on those of 16 bits go by tensor cores.
// ROWS: how many rows of W a warp has at once, one after the other in W; or SPLIT: how many warps share a row.
// Sums are made in fp32, always in the same order.

constexpr u32 ALL = 0xffffffffu;
constexpr int SCOUT = 3;  // sets of chunks that are sent for ahead of the one that is loaded

// Where a lane is: its chunk, and the end of its row's. With tensor cores the places it looks up are another lane's.
struct Run {
    int at, stop, other, other_stop, left;

    __device__ __forceinline__ void go_on(int by) { at += by, other += by; }
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
    const auto begin = [&](int first, int last) {
        Run run;
        run.at = first + part * LANES + lane % LANES, run.stop = last;
        run.left = (last - first - part * LANES + STRIDE - 1) / STRIDE;
        if constexpr (ROWS > 1) run.left = __reduce_max_sync(ALL, run.left);
        run.left = max(run.left, 1);
        if constexpr (TENSOR) {
            run.other = ROWS > 1 ? __shfl_sync(ALL, run.at, partner(lane)) : run.at - lane + partner(lane);
            run.other_stop = ROWS > 1 ? __shfl_sync(ALL, last, partner(lane)) : last;
        }
        return run;
    };
    const auto load = [&](Chunk<KIND> &chunk, const Run &run) {  // zeros, where there are no more
#pragma unroll
        for (int i = 0; i < (KIND == 2 ? 2 : 1); i++) chunk.words[i] = make_uint4(0, 0, 0, 0);
        chunk.place = (u64)base << 42;
        if (run.at < run.stop) chunk.load_values(values, run.at);
        const int other = TENSOR ? run.other : run.at;
        if (other < (TENSOR ? run.other_stop : run.stop)) chunk.place = __ldcs(places + other);
        if (SCOUT && run.at + SCOUT * STRIDE < run.stop) Chunk<KIND>::send_for_it(values, places, run.at + SCOUT * STRIDE);
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
    Chunk<KIND> chunk;
    load(chunk, run);  // while x is on its way
    look(unit + step, next_first, next_last);
    if (__syncthreads_or(fetch<KIND, BATCH>(shared, x, batch, columns, base, width))) {  // not all of x is finite
        for (int row = blockIdx.x * WARPS + warp; row < rows; row += gridDim.x * WARPS)
            careful<KIND, BATCH>(values, places, starts + (long long)row * tiles, tile, tiles_end, shared, base, width,
                                 row, rows, batch, bias, y, partial);
        return;
    }

    Own sums(lane);
    int left = run.left, of_block = blockIdx.x;
    const auto turn = [&](const Chunk<KIND> &chunk, Chunk<KIND> &ahead) {  // whether there are more
        const bool ends = --left == 0;
        if (ends) run = begin(next_first, next_last);
        else run.go_on(STRIDE);
        load(ahead, run);
        sums.add(chunk, shared, base, 16 * width);
        if (!ends) return true;
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
        unit += step, of_block += step, left = run.left;
        look(unit + step, next_first, next_last);
        return of_block < units;  // the same for all warps of a block
    };
    Chunk<KIND> other;
    while (turn(chunk, other) && turn(other, chunk)) {}
}
