// y = x W^T for a packed W and up to 32 rows of x, by tensor cores.
//
// A block takes 16 rows of W at a time, of one tile of columns. Each warp unpacks one of the rows into shared memory;
// then each warp multiplies all 16 with its own 128 columns of x, which stay in its registers; the products of the
// warps are added up in their order. KIND: 0 bf16, 1 fp16. NS: rows of x in eights.
constexpr int ROWS = 16, SLICE = TILE / WARPS, STEPS = SLICE / 16;
constexpr int PITCH = TILE + 8;  // of a row in shared memory: rows start at different banks

template <int KIND> __device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&w)[4], const u32 (&x)[2]) {
    if constexpr (KIND == 0)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
}

__device__ __forceinline__ void load_fragment(u32 (&w)[4], const u16 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"((u32)__cvta_generic_to_shared(at)));
}

// The values of a chunk to their columns; zeros that fill it up are left out.
template <int KIND> __device__ __forceinline__ void scatter(const Chunk<KIND> &chunk, u16 *row, u32 base) {
    u32 column = chunk.start() - base;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (i) column += chunk.step(i);
        if (!chunk.filler(i)) row[column] = (u16)(i % 2 ? chunk.word(i / 2) >> 16 : chunk.word(i / 2));
    }
}

// The chunks of one row and tile, by the lanes of a warp: those read ahead, then the others.
template <int KIND, int AHEAD> struct Row {
    Chunk<KIND> chunk[AHEAD];
    int first = 0, last = 0;

    __device__ __forceinline__ void read(const void *values, const u64 *places, int lane) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a * 32 + lane < last) chunk[a].load(values, places, first + a * 32 + lane);
    }
    __device__ __forceinline__ void write(const void *values, const u64 *places, int lane, u16 *row, u32 base) {
#pragma unroll
        for (int i = 0; i < TILE / 8 / 32; i++) reinterpret_cast<uint4 *>(row)[i * 32 + lane] = make_uint4(0, 0, 0, 0);
        __syncwarp();
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a * 32 + lane < last) scatter<KIND>(chunk[a], row, base);
        for (int c = first + AHEAD * 32 + lane; c < last; c += 32) {
            Chunk<KIND> more;
            more.load(values, places, c);
            scatter<KIND>(more, row, base);
        }
    }
};

template <int KIND, int NS>
__global__ void __launch_bounds__(WARPS * 32, NS <= 2 ? 2 : 1)
    tensor_linear(const void *values, const u64 *places, const int *starts, const void *x, const void *bias, void *y,
                  float *partial, int rows, int columns, int tiles, int batch) {
    constexpr int AHEAD = NS == 2 ? 1 : 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.y, base = tile * TILE;
    u16 *w = reinterpret_cast<u16 *>(shared);
    float *products = reinterpret_cast<float *>(w + ROWS * PITCH);  // [warp][row of x][row of W]
    const int groups = (rows + ROWS - 1) / ROWS;

    const auto look = [&](int group, int &first, int &last) {
        const long long row = (long long)group * ROWS + warp;
        first = row < rows ? __ldcg(starts + row * tiles + tile) : 0;
        last = row < rows ? __ldcg(starts + row * tiles + tile + 1) : 0;
    };
    let_others_start();
    Row<KIND, AHEAD> own;
    int group = blockIdx.x, first, last;
    look(group, own.first, own.last);
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        if (own.first + a * 32 + lane < own.last)
            Chunk<KIND>::send_for_it(values, places, own.first + a * 32 + lane);
    wait_for_others();
    look(group, own.first, own.last);
    look(group + gridDim.x, first, last);
    own.read(values, places, lane);

    u32 xs[STEPS][NS][2];  // lane: row of x lane / 4 of eight, columns 2 * (lane % 4) and next, and eight on
    const u16 *from = reinterpret_cast<const u16 *>(x);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int b = n * 8 + lane / 4, c = base + warp * SLICE + s * 16 + h * 8 + lane % 4 * 2;
                const u16 *at = from + (long long)b * columns + c;
                const u32 one = b < batch && c < columns ? at[0] : 0, two = b < batch && c + 1 < columns ? at[1] : 0;
                xs[s][n][h] = one | two << 16;
            }

    for (; group < groups; group += gridDim.x) {
        own.write(values, places, lane, w + warp * PITCH, base);
        own.first = first, own.last = last;
        look(group + 2 * gridDim.x, first, last);
        own.read(values, places, lane);  // the next, while these are multiplied
        __syncthreads();
        float sum[NS][4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            u32 part[4];
            load_fragment(part, w + (lane % 16) * PITCH + warp * SLICE + s * 16 + lane / 16 * 8);
#pragma unroll
            for (int n = 0; n < NS; n++) multiply<KIND>(sum[n], part, xs[s][n]);
        }
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                products[((warp * NS + n) * 8 + lane % 4 * 2 + i % 2) * ROWS + lane / 4 + i / 2 * 8] = sum[n][i];
        __syncthreads();
        for (int t = threadIdx.x; t < NS * 8 * ROWS; t += WARPS * 32) {
            const int b = t / ROWS;
            const long long row = (long long)group * ROWS + t % ROWS;
            float total = 0;
#pragma unroll
            for (int p = 0; p < WARPS; p++) total += products[p * NS * 8 * ROWS + t];
            if (b < batch && row < rows) put<KIND>(total, b, batch, row, rows, bias, y, partial);
        }
    }
}
