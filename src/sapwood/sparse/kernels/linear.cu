// y = x W^T + bias for a packed W (see format.py) and a few rows of x, which lie in shared memory.
//
// KIND: what values, x and y are (0 bf16, 1 fp16, 2 fp32). BATCH: rows of x, rounded up to 1, 2, 4, 8 or 16;
// from 8 on those of 16 bits go by tensor cores.
// ROWS: how many rows of W a warp has at once, one after the other in W; or SPLIT: how many warps share a row.
// WARPS: the most a block may have; PER: blocks of a multiprocessor. AHEAD: how many sets of chunks a warp loads while it
// works on as many; with none it loads the next when it has done with this one.
// Sums are made in fp32, always in the same order.

template <int KIND, int BATCH, int ROWS, int SPLIT, int WARPS, int PER, int AHEAD>
__global__ void __launch_bounds__(WARPS * 32, PER)
    sparse_linear(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                  float *partial, int rows, int columns, int tiles, int batch, int tiles_here, int chunks, int active) {
    static_assert((ROWS == 1 || SPLIT == 1) && AHEAD <= 2, "");
    constexpr bool TENSOR = KIND != 2 && BATCH >= 8;
    constexpr int LANES = 32 / ROWS, STRIDE = LANES * SPLIT, N = KIND == 2 ? 2 : 1;
    typedef Sums<KIND, BATCH, ROWS, TENSOR> Own;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = SPLIT > 1 ? warp % SPLIT : 0;
    const int tile = blockIdx.y * tiles_here, tiles_end = min(tile + tiles_here, tiles);
    const int base = tile * TILE, width = min(tiles_end * TILE, columns) - base;
    float *halves = reinterpret_cast<float *>(reinterpret_cast<char *>(shared) +
                                              ((long long)width * BYTES<KIND, BATCH> + 15) / 16 * 16);

    const int units = (rows + ROWS - 1) / ROWS, step = active / SPLIT * gridDim.x;
    int unit = warp < active ? warp / SPLIT * gridDim.x + blockIdx.x : units, of_block = blockIdx.x, first, last;
    const auto look = [&](int unit) {  // the chunks of the lane's row
        const int row = unit * ROWS + lane / LANES;
        const int *at = starts + (long long)row * tiles;
        first = row < rows ? __ldcg(at + tile) : 0;
        last = row < rows ? __ldcg(at + tiles_end) : 0;
    };
    let_others_start();
    look(unit);  // what is not yet there does no harm
#pragma unroll
    for (int i = 0; i < AHEAD + 2; i++) {
        const int at = first + part * LANES + lane % LANES + i * STRIDE;
        if (at >= 0 && at < last && at < chunks) Chunk<KIND>::send_for_it(values, places, at);
    }
    wait_for_others();
    const Copies<KIND, BATCH> copies(shared, x, batch, columns, base, width);
    if (copies.possible()) copies.start();
    look(unit);

    // Where a lane is: its values and, with tensor cores another lane's, places. Sets of chunks count down; at ``gap``
    // a lane has no more.
    int ahead = unit, left = 0, gap = 0, other_gap = 0;
    const uint4 *own_values;
    const u64 *own_places;
    constexpr int SETS = AHEAD ? AHEAD : 1;
    struct Batch {
        Chunk<KIND> chunk[SETS];
        int left;  // sets of the rows, with these
    };
    const u32 never = (u32)batch >> 16;  // 0, which the compiler does not know
    // Zeros, where there are no more. Not before ``before`` is there: whoever waits for one load waits for all that are on
    // their way by then, since there are few registers that count them.
    const auto load = [&](Batch &free, u64 before) {
        const int late = (u32)(before >> 32) & never;
        if (left <= 0) {
            const int at = first + part * LANES + lane % LANES;
            const int own = (u32)max(last - at + STRIDE - 1, 0) / STRIDE;
            const int all = (u32)max(last - first - part * LANES + STRIDE - 1, 0) / STRIDE;
            left = max(ROWS > 1 ? __reduce_max_sync(ALL, all) : all, 1);
            gap = other_gap = left - own;
            int other = at;
            if constexpr (TENSOR) {
                other = ROWS > 1 ? __shfl_sync(ALL, at, partner(lane)) : at - lane + partner(lane);
                other_gap = __shfl_sync(ALL, gap, partner(lane));
            }
            own_values = reinterpret_cast<const uint4 *>(values) + (long long)at * N, own_places = places + other;
            ahead = (ahead + step) | late;
            look(ahead);
        }
        free.left = left;
#pragma unroll
        for (int i = 0; i < SETS; i++) {
            // From somewhere in any case: a load that may not be done is waited for at once.
            const int now = (left - i) | late;
            const uint4 *from = now > gap ? own_values : nothing;
            const u64 *where = now > (TENSOR ? other_gap : gap) ? own_places : reinterpret_cast<const u64 *>(nothing);
#pragma unroll
            for (int j = 0; j < N; j++) free.chunk[i].words[j] = __ldcs(from + j);
            free.chunk[i].place = __ldcs(where);
            own_values += STRIDE * N, own_places += STRIDE;
        }
        left -= SETS;
    };
    Batch these, others;
    load(these, 0);  // while x is on its way
    const bool bad = copies.possible() ? copies.finish() : fetch<KIND, BATCH>(shared, x, batch, columns, base, width);
    if (__syncthreads_or(bad)) {  // not all of x is finite
        for (int row = blockIdx.x * warps + warp; row < rows; row += gridDim.x * warps)
            careful<KIND, BATCH>(values, places, starts + (long long)row * tiles, tile, tiles_end, shared, base, width,
                                 row, rows, batch, bias, y, partial);
        return;
    }

    if (warp >= active) return;
    const u32 plane = min(16 * width, 1 << 20);
    u32 origin = place_of(shared) - base * WIDE<KIND, BATCH>;
    remember(origin);
    Own sums(lane);
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
            meet(warp / SPLIT, 32 * SPLIT);
            if (part == 0 && lane < batch && unit < rows) {
                float whole = 0;
                for (int s = 0; s < SPLIT; s++) whole += halves[(warp + s) * BATCH + lane];
                put<KIND>(whole, lane, batch, unit, rows, bias, y, partial);
            }
            meet(warp / SPLIT, 32 * SPLIT);
        }
        sums.clear();
        unit += step, of_block += step;
        return of_block >= units;  // the same for all warps of a block
    };
    const auto turn = [&](Batch &now, Batch &free) {
        const bool ends = now.left <= SETS;
        if constexpr (AHEAD > 0) load(free, now.chunk[0].place);
        sums.add(now.chunk[0], origin, plane);
        if constexpr (SETS > 1)
            if (now.left > 1) sums.add(now.chunk[SETS - 1], origin, plane);
        if constexpr (AHEAD == 0) load(now, 0);
        return ends && finish();
    };
    while (true) {
        if (turn(these, others)) return;
        if constexpr (AHEAD > 0)
            if (turn(others, these)) return;
    }
}
