// y = x W^T + bias for a packed W (see format.py) and a few rows of x, which lie in shared memory.
//
// KIND: what values, x and y are (0 bf16, 1 fp16, 2 fp32). BATCH: rows of x, rounded up to 1, 2, 4, 8 or 16;
// from 8 on those of 16 bits go by tensor cores.
// SPLIT: how many warps share a row of W. Sums are made in fp32, always in the same order.

template <int KIND, int BATCH, int SPLIT, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, WARPS == 16 ? 2 : 1)
    sparse_linear(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                  float *partial, int rows, int columns, int tiles, int batch, int tiles_here) {
    typedef typename Kind<KIND>::Raw Raw;
    typedef Sums<KIND, BATCH, KIND != 2 && BATCH >= 8> Own;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = SPLIT > 1 ? warp % SPLIT : 0, at_once = WARPS / SPLIT;
    const int tile = blockIdx.y * tiles_here, tiles_end = min(tile + tiles_here, tiles);
    const int base = tile * TILE, width = min(tiles_end * TILE, columns) - base;
    constexpr int STRIDE = 32 * SPLIT;
    float *halves = reinterpret_cast<float *>(reinterpret_cast<char *>(shared) +
                                              (((long long)width * BATCH * sizeof(Raw) + 15) / 16) * 16);

    int row = blockIdx.x * at_once + warp / SPLIT, first, last;
    const int rows_step = gridDim.x * at_once;
    const int *at = starts + (long long)row * tiles + tile;
    const auto look = [&](int row, int &first, int &last) {
        first = row < rows ? __ldcg(at) : 0;
        last = row < rows ? __ldcg(at + (tiles_end - tile)) : 0;
    };
    let_others_start();
    look(row, first, last);
#pragma unroll
    for (int ahead = 0; ahead < 2; ahead++)
        if (first + part * 32 + ahead * STRIDE + lane < last)
            Chunk<KIND>::send_for_it(values, places, first + part * 32 + ahead * STRIDE + lane);
    wait_for_others();
    look(row, first, last);
    int from = first + part * 32;
    Chunk<KIND> chunk;
    Own::load(chunk, values, places, from, last, lane, base);  // while x is on its way
    int next_row = row + rows_step, next_first, next_last;
    at += (long long)rows_step * tiles;
    look(next_row, next_first, next_last);
    const bool bad = __syncthreads_or(fetch<KIND, BATCH>(shared, x, batch, columns, base, width));

    Own sums(lane);
    while (row - warp / SPLIT < rows) {  // the same for all warps of a block
        const bool ends = from + STRIDE >= last;
        const int next = ends ? next_first + part * 32 : from + STRIDE;
        Chunk<KIND> ahead;
        Own::load(ahead, values, places, next, ends ? next_last : last, lane, base);
        sums.add(chunk, shared, base, from, last, lane);
        if (ends) {
            float total[Own::TOTALS];
            if (bad) {
                Sums<KIND, BATCH, false> slow(lane);  // apart, so that the sums of the fast way stay in registers
                if (row < rows)
                    careful<KIND, BATCH>(values, places, first, last, shared, base, width, part, STRIDE, slow.sum);
                float all[1];
                slow.add_up(lane, all);
#pragma unroll
                for (int i = 0; i < Own::TOTALS; i++)
                    total[i] = __shfl_sync(0xffffffffu, all[0], Own::row_of(lane, i) * (32 / BATCH));
            } else sums.add_up(lane, total);
#pragma unroll
            for (int i = 0; i < Own::TOTALS; i++) {
                const int b = Own::row_of(lane, i);
                if constexpr (SPLIT > 1) {
                    if (lane % Own::LANES == 0) halves[warp * BATCH + b] = total[i];
                } else if (lane % Own::LANES == 0 && b < batch && row < rows)
                    put<KIND>(total[i], b, batch, row, rows, bias, y, partial);
            }
            if constexpr (SPLIT > 1) {
                __syncthreads();
                if (part == 0 && lane < batch && row < rows) {
                    float whole = 0;
                    for (int s = 0; s < SPLIT; s++) whole += halves[(warp + s) * BATCH + lane];
                    put<KIND>(whole, lane, batch, row, rows, bias, y, partial);
                }
                __syncthreads();
            }
            sums.clear();
            row = next_row, first = next_first, last = next_last;
            next_row += rows_step;
            at += (long long)rows_step * tiles;
            look(next_row, next_first, next_last);
        }
        from = next;
        chunk = ahead;
    }
}
