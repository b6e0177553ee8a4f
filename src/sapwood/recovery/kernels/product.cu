// A convolution of few channels that keeps the size of the image, by tensor cores straight from where the image lies:
// no copy in shared memory, a lane loads four neighbouring channels of a pixel as one operand. BACK: x is the gradient of the
// output, and the weight is read the other way round. Images and weights are channels-last.

// Four channels from c on, or zeros. Not by __ldg: what it reads may be loaded before others have been waited for.
template <int C> __device__ __forceinline__ uint2 four_of(const u16 *from, bool there, int c) {
    uint2 found = {0, 0};
    if constexpr (C % 4 == 0) {
        if (there) found = __ldca(reinterpret_cast<const uint2 *>(from));
    } else if constexpr (C % 2 == 0) {
        if (there) found.x = __ldca(reinterpret_cast<const u32 *>(from));
        if (there && c + 2 < C) found.y = __ldca(reinterpret_cast<const u32 *>(from) + 1);
    } else {
        u32 one[4];
#pragma unroll
        for (int i = 0; i < 4; i++) one[i] = there && c + i < C ? __ldca(from + i) : (u16)0;
        found.x = one[0] | one[1] << 16, found.y = one[2] | one[3] << 16;
    }
    return found;
}

// Which taps of the window of a pixel lie in the image, a bit each.
template <int H, int W, int HIGH, int WIDE> __device__ __forceinline__ u32 taps_inside(u32 pixel, u32 pixels) {
    const u32 w = pixel % W, h = pixel / W % H;
    u32 across = 0, down = 0, column = 0;
#pragma unroll
    for (int i = 0; i < HIGH; i++) column |= 1u << i * WIDE;
#pragma unroll
    for (int j = 0; j < WIDE; j++) across |= w + j - WIDE / 2 < (u32)W ? column << j : 0u;
#pragma unroll
    for (int i = 0; i < HIGH; i++) down |= h + i - HIGH / 2 < (u32)H ? ((1u << WIDE) - 1) << i * WIDE : 0u;
    return pixel < pixels ? across & down : 0u;
}

// Which of a block's 16 or 32 outputs a row of a tile is: a lane ends up with two neighbours, or with four from two tiles.
template <int TILES> __device__ __forceinline__ int output_of(int tile, int row) {
    return row % 8 * 2 * TILES + tile * 2 + row / 8;
}

template <int KIND, int C, int N, int H, int W, int HIGH, int WIDE, bool BACK, int EIGHTS, int AHEAD, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
narrow_product(const u16 *x, const u16 *weight, u16 *out, int pixels) {
    constexpr int TAPS = HIGH * WIDE, FOURS = (C + 3) / 4, STEPS = (TAPS * FOURS + 3) / 4, TILES = N <= 16 ? 1 : 2;
    constexpr bool ALIKE = FOURS % 4 == 0;  // lanes have channels of the same tap, and what is added to an address is known
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, outputs = 32 * blockIdx.y;
    const int base = (blockIdx.x * WARPS + warp) * (8 * EIGHTS);  // pixel
    u32 inside[EIGHTS];
    float sum[EIGHTS][TILES][4];
    uint2 seen[AHEAD][EIGHTS];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        inside[eight] = taps_inside<H, W, HIGH, WIDE>(base + 8 * eight + g, pixels);
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) sum[eight][i / 4][i % 4] = 0;
    }
    const u16 *from = x + (long long)(base + g) * C + (ALIKE ? 4 * t : 0);
    remember(from);
    auto look = [&](int step) {
        const int four = ALIKE ? 4 * step : 4 * step + t, tap = four / FOURS, c = four % FOURS * 4;
        const u16 *window = from + ((tap / WIDE - HIGH / 2) * W + tap % WIDE - WIDE / 2) * C + c;
        if constexpr (!ALIKE) remember(window);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++)
            seen[step % AHEAD][eight] =
                four_of<C>(window + 8 * eight * C, inside[eight] >> tap & 1, ALIKE ? c + 4 * t : c);
    };
    let_others_start();
    wait_for_others();
#pragma unroll
    for (int step = 0; step < AHEAD && step < STEPS; step++) look(step);
    constexpr int PAIRS = STEPS * TILES * 64, TURNS_OF_EACH = (PAIRS + 32 * WARPS - 1) / (32 * WARPS);
#pragma unroll(BACK ? 6 : 9)
    for (int turn = 0; turn < TURNS_OF_EACH; turn++) {  // the weights, as lanes need them
        const int i = turn * 32 * WARPS + threadIdx.x;
        if (PAIRS % (32 * WARPS) && i >= PAIRS) continue;
        const int which = i / 2, four = which / 32 / TILES * 4 + which % 4, tap = four / FOURS, c = four % FOURS * 4;
        const int n = outputs + output_of<TILES>(which / 32 % TILES, which % 32 / 4 + i % 2 * 8);
        const bool there = tap < TAPS && n < N;
        uint2 found = {0, 0};
        if constexpr (BACK) {
            u32 one[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                one[k] = there && c + k < C ? __ldca(weight + ((c + k) * TAPS + TAPS - 1 - tap) * N + n) : (u16)0;
            found.x = one[0] | one[1] << 16, found.y = one[2] | one[3] << 16;
        } else found = four_of<C>(weight + (n * TAPS + tap) * C + c, there, c);
        u32 *to = reinterpret_cast<u32 *>(shared) + which * 4 + i % 2;
        to[0] = found.x, to[2] = found.y;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint4 by = shared[(step * TILES + tile) * 32 + lane];
            const u32 rows[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++)
                multiply<KIND>(sum[eight][tile], rows, seen[step % AHEAD][eight].x, seen[step % AHEAD][eight].y);
        }
        if (step + AHEAD < STEPS) look(step + AHEAD);
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int pixel = base + 8 * eight + 2 * t + i;
            u16 *to = out + (long long)pixel * N;
            const int n = outputs + output_of<TILES>(0, g);
            u32 two[TILES];
#pragma unroll
            for (int k = 0; k < TILES; k++)
                two[k] = narrow<KIND>(sum[eight][k][i]) | (u32)narrow<KIND>(sum[eight][k][i + 2]) << 16;
            if constexpr (N % 4 == 0 && TILES == 2) {
                if (pixel < pixels && n < N) *reinterpret_cast<uint2 *>(to + n) = uint2{two[0], two[1]};
            } else if constexpr (N % 2 == 0) {
#pragma unroll
                for (int k = 0; k < TILES; k++)
                    if (pixel < pixels && n + 2 * k < N) *reinterpret_cast<u32 *>(to + n + 2 * k) = two[k];
            } else {
#pragma unroll
                for (int k = 0; k < 2 * TILES; k++)
                    if (pixel < pixels && n + k < N) to[n + k] = (u16)(two[k / 2] >> 16 * (k % 2));
            }
        }
}
