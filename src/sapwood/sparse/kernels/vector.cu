// y = x W^T + bias for a packed W and one row of x: LANES lanes of a warp share a row of W, so that rows with few
// chunks leave no lane idle, and what a row costs beside its chunks is paid once for 32 / LANES of them.
template <int KIND, int LANES>
__global__ void __launch_bounds__(WARPS * 32, 2)
    vector_linear(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                  float *partial, int rows, int columns, int tiles, int batch, int tiles_here) {
    constexpr int AT_ONCE = 32 / LANES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane % LANES;
    const int tile = blockIdx.y * tiles_here, tiles_end = min(tile + tiles_here, tiles);
    const int base = tile * TILE, width = min(tiles_end * TILE, columns) - base;
    const int step = gridDim.x * WARPS * AT_ONCE;
    int row = (blockIdx.x * WARPS + warp) * AT_ONCE + lane / LANES;

    const auto look = [&](int of, int &first, int &last) {
        first = of < rows ? __ldcg(starts + (long long)of * tiles + tile) : 0;
        last = of < rows ? __ldcg(starts + (long long)of * tiles + tiles_end) : 0;
    };
    let_others_start();
    int at, last, next_first, next_last;
    look(row, at, last);
    if (at + sub < last) Chunk<KIND>::send_for_it(values, places, at + sub);
    if (at + sub + LANES < last) Chunk<KIND>::send_for_it(values, places, at + sub + LANES);
    wait_for_others();
    look(row, at, last);
    look(row + step, next_first, next_last);
    at += sub;
    Chunk<KIND> chunk;
    if (at < last) chunk.load(values, places, at);  // while x is on its way
    if (__syncthreads_or(fetch<KIND, 1>(shared, x, 1, columns, base, width))) {
        for (int first = row - lane / LANES; first < rows; first += step)
            for (int r = first; r < min(first + AT_ONCE, rows); r++) {  // the whole warp, row by row
                int from, to;
                look(r, from, to);
                float sum[1];
                careful<KIND, 1>(values, places, from, to, shared, base, width, 0, 32, sum);
                const float total = reduce<1>(sum, lane);
                if (lane == 0) put<KIND>(total, 0, 1, r, rows, bias, y, partial);
            }
        return;
    }
    for (; row - lane / LANES < rows; row += step) {
        const int length = last - at + sub;  // the same in all lanes of a row
        const int turns = max(1, __reduce_max_sync(0xffffffffu, (length + LANES - 1) / LANES));
        float sum[1] = {0};
        for (int turn = 1; turn <= turns; turn++) {
            const bool ends = turn == turns;
            const int next = ends ? next_first + sub : at + LANES, next_end = ends ? next_last : last;
            Chunk<KIND> ahead;
            if (next < next_end) ahead.load(values, places, next);
            if (at < last) accumulate<KIND, 1>(chunk, shared, base, sum);
            chunk = ahead, at = next;
        }
        last = next_last;
        look(row + 2 * step, next_first, next_last);
        float total = sum[0];
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) total += __shfl_xor_sync(0xffffffffu, total, half);
        if (sub == 0 && row < rows) put<KIND>(total, 0, 1, row, rows, bias, y, partial);
    }
}
