// Products of chunks with their columns by tensor cores, for eight rows of x and more, of 16-bit numbers.
//
// Columns of x lie in shared memory, 16 bytes for eight rows of x. Of a warp's 32 chunks one nonzero each is multiplied
// at a time, and its column of x with it: ldmatrix fetches any 32 columns as four matrices of eight. In one product
// [16 x 16] [16 x 8] the first factor has two of those above one another on the left, and two on the right; in the
// second, each nonzero stands in the row of its column of x, and in the column (one of eight) where its own lane holds
// it. Sums in columns 0 to 3 of the upper half belong to the upper matrices, those in columns 4 to 7 of the lower half
// to the lower ones; the rest is of no use. So the sums of each quarter of the chunks stand in two columns of their own.

// Whose columns a lane looks up: those of the lane that holds the value which is multiplied with them.
__device__ __forceinline__ int partner(int lane) {
    return (lane & 8) << 1 | (lane & 16) >> 1 | (lane & 1) << 2 | (lane >> 1 & 3);
}

// The sums of a warp over its part of so many rows of W.
template <int KIND, int BATCH, int ROWS> struct Sums<KIND, BATCH, ROWS, true> {
    static constexpr int EIGHTS = BATCH / 8, TOTALS = EIGHTS;
    u32 upper[2], lower[2];  // which bytes of a word of two values a lane takes, of the first and of the second
    float sum[EIGHTS][4];

    __device__ __forceinline__ Sums(int lane) {
        const bool high = lane & 4, below = lane & 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 own = (high ? 0x1044u : 0x4410u) + (i ? high ? 0x2200u : 0x22u : 0u);
            upper[i] = below ? 0x4444u : own;
            lower[i] = below ? own : 0x4444u;
            remember(upper[i]);
            remember(lower[i]);
        }
        clear();
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) sum[e][0] = sum[e][1] = sum[e][2] = sum[e][3] = 0;
    }
    __device__ __forceinline__ static int which(int lane) { return lane % 4 * ROWS / 4; }
    __device__ __forceinline__ static int row_of(int lane, int i) { return i * 8 + lane / 4; }
    __device__ __forceinline__ static bool writes(int lane) { return lane % (4 / ROWS) == 0; }
    // All that is in xs must be finite: zeros are multiplied too.
    __device__ __forceinline__ void add(const Chunk<KIND> &chunk, u32 origin, u32 plane) {
        Walk<16> columns(chunk.place, origin);
        constexpr int AT_ONCE = 2 / EIGHTS;  // eight columns of eight numbers each, four times
#pragma unroll
        for (int first = 0; first < CHUNK; first += AT_ONCE) {
            u32 x[AT_ONCE][EIGHTS][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u32 column = columns[first + i];
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) read_matrices(x[i][e], column + e * plane);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int half = (first + i) % 2;
                const u32 word = chunk.word((first + i) / 2);
                const u32 above = __byte_perm(word, 0, upper[half]), below = __byte_perm(word, 0, lower[half]);
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) multiply<KIND>(sum[e], x[i][e], above, below);
            }
        }
    }
    __device__ __forceinline__ void add_up(int lane, float (&total)[TOTALS]) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            total[e] = lane & 2 ? sum[e][2] + sum[e][3] : sum[e][0] + sum[e][1];
            if (ROWS < 4) total[e] += __shfl_xor_sync(0xffffffffu, total[e], 1);
            if (ROWS < 2) total[e] += __shfl_xor_sync(0xffffffffu, total[e], 2);
        }
    }
};
