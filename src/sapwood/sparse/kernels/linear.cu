// y = x W^T + bias for a packed W (see format.py) and a few rows of x, which lie in shared memory.
//
// KIND: what values, x and y are (0 bf16, 1 fp16, 2 fp32). BATCH: rows of x, rounded up to 1, 2, 4 ... 32.
// SPLIT: how many warps share a row of W. Sums are made in fp32, always in the same order.

template <int KIND, int BATCH, int SPLIT>
__global__ void __launch_bounds__(WARPS * 32, BATCH <= 8 ? 2 : 1)
    sparse_linear(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                  float *partial, int rows, int columns, int tiles, int batch, int tiles_here) {
    typedef typename Kind<KIND>::Raw Raw;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = SPLIT > 1 ? warp % SPLIT : 0, at_once = WARPS / SPLIT;
    const int tile = blockIdx.y * tiles_here, tiles_end = min(tile + tiles_here, tiles);
    const int base = tile * TILE, width = min(tiles_end * TILE, columns) - base;
    constexpr int STRIDE = 32 * SPLIT;
    float *halves = reinterpret_cast<float *>(reinterpret_cast<char *>(shared) +
                                              (((long long)width * BATCH * sizeof(Raw) + 15) / 16) * 16);

    int row = blockIdx.x * at_once + warp / SPLIT;
    const int rows_step = gridDim.x * at_once;
    int first = 0, last = 0;
    let_others_start();
    if (row < rows) {
        first = __ldcg(starts + (long long)row * tiles + tile);
        last = __ldcg(starts + (long long)row * tiles + tiles_end);
        if (first + part * 32 + lane < last) Chunk<KIND>::send_for_it(values, places, first + part * 32 + lane);
        if (first + part * 32 + STRIDE + lane < last)
            Chunk<KIND>::send_for_it(values, places, first + part * 32 + STRIDE + lane);
    }
    wait_for_others();
    if (row < rows) {
        first = __ldcg(starts + (long long)row * tiles + tile);
        last = __ldcg(starts + (long long)row * tiles + tiles_end);
    }
    int from = first + part * 32;
    Chunk<KIND> chunk;
    if (from + lane < last) chunk.load(values, places, from + lane);  // while x is on its way
    int next_row = row + rows_step, next_first = 0, next_last = 0;
    if (next_row < rows) {
        next_first = starts[(long long)next_row * tiles + tile];
        next_last = starts[(long long)next_row * tiles + tiles_end];
    }
    const bool bad = __syncthreads_or(fetch<KIND, BATCH>(shared, x, batch, columns, base, width));

    float sum[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) sum[b] = 0;
    while (row - warp / SPLIT < rows) {  // the same for all warps of a block
        const bool ends = from + STRIDE >= last;
        const int next = ends ? next_first + part * 32 : from + STRIDE;
        const int next_end = ends ? next_last : last;
        Chunk<KIND> ahead;
        if (next + lane < next_end) ahead.load(values, places, next + lane);
        if (from + lane < last) accumulate<KIND, BATCH>(chunk, shared, base, sum);
        if (ends) {
            if (bad && row < rows) {
                float slow[BATCH];  // apart, so that the sums of the fast way stay in registers
                careful<KIND, BATCH>(values, places, first, last, shared, base, width, part, STRIDE, slow);
#pragma unroll
                for (int b = 0; b < BATCH; b++) sum[b] = slow[b];
            }
            float total = reduce<BATCH>(sum, lane);
            constexpr int LANES = 32 / BATCH;
            const int b = lane / LANES;
            if constexpr (SPLIT > 1) {
                if (lane % LANES == 0) halves[warp * BATCH + b] = total;
                __syncthreads();
                total = 0;
                for (int s = 0; s < SPLIT; s++) total += halves[(warp - part + s) * BATCH + b];
                __syncthreads();
            }
            if (lane % LANES == 0 && b < batch && part == 0 && row < rows)
                put<KIND>(total, b, batch, row, rows, bias, y, partial);
#pragma unroll
            for (int i = 0; i < BATCH; i++) sum[i] = 0;
            row = next_row, first = next_first, last = next_last;
            next_row += rows_step;
            next_first = next_last = 0;
            if (next_row < rows) {
                next_first = starts[(long long)next_row * tiles + tile];
                next_last = starts[(long long)next_row * tiles + tiles_end];
            }
        }
        from = next;
        chunk = ahead;
    }
}
