// What is done with whole results: sums of parts, and the dense matrix again.

// The parts of the columns, in their order, and the bias.
template <int KIND>
__global__ void sum_parts(const float *partial, const void *bias, void *y, int parts, int rows, long long count) {
    typedef typename Kind<KIND>::Raw Raw;
    let_others_start();
    wait_for_others();
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
        float total = 0;
        for (int p = 0; p < parts; p++) total += partial[p * count + i];
        if (bias) total += widen<KIND>(reinterpret_cast<const Raw *>(bias)[i % rows]);
        reinterpret_cast<Raw *>(y)[i] = narrow<KIND>(total);
    }
}

// The dense matrix again: a warp fills a row of a tile in shared memory and writes it out.
template <int KIND>
__global__ void unpack(const void *values, const u64 *places, const int *starts, void *dense, int rows, int columns,
                       int tiles) {
    typedef typename Kind<KIND>::Raw Raw;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    Raw *own = reinterpret_cast<Raw *>(shared) + warp * TILE;
    wait_for_others();
    for (long long cell = blockIdx.x * (long long)warps + warp; cell < (long long)rows * tiles;
         cell += (long long)gridDim.x * warps) {
        const int row = cell / tiles, base = (int)(cell % tiles) * TILE, width = min(TILE, columns - base);
        for (int c = lane; c < width; c += 32) own[c] = 0;
        __syncwarp();
        for (int c = starts[cell] + lane; c < starts[cell + 1]; c += 32) {
            Chunk<KIND> chunk;
            chunk.load(values, places, c);
            u32 column = first_of(chunk.place) - base;
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                if (i) column += step_of(chunk.place, i) * (by_eights(chunk.place) ? 8 : 1);
                if (chunk.filler(i)) continue;
                if constexpr (KIND == 2) own[column] = chunk.word(i);
                else own[column] = (u16)(i % 2 ? chunk.word(i / 2) >> 16 : chunk.word(i / 2));
            }
        }
        __syncwarp();
        Raw *to = reinterpret_cast<Raw *>(dense) + (long long)row * columns + base;
        for (int c = lane; c < width; c += 32) to[c] = own[c];
        __syncwarp();
    }
}
