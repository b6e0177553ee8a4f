// The gradient of a convolution's weight: sums over pixels of what the output's gradient says times what the window saw.
// A block has 16 outputs and goes through strips of images, which lie in shared memory with a border of zeros; a warp has 16
// inputs (or all, of up to eight) and all taps, and some of the pixels. Each block writes sums of its own.

// Eight channels from c on into shared memory, or zeros; MANY are there in all.
template <int MANY> __device__ __forceinline__ void take_eight(u32 to, const u16 *from, bool there, int c) {
    if constexpr (MANY % 8 == 0) copy16(to, from, there && c < MANY);
    else if constexpr (MANY % 4 == 0) {
        copy8(to, from, there && c < MANY);
        copy8(to + 8, c + 4 < MANY ? from + 4 : from, there && c + 4 < MANY);
    } else {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (MANY % 2 == 0) {
                word[i] = there && c + 2 * i < MANY ? __ldca(reinterpret_cast<const u32 *>(from) + i) : 0u;
            } else {
                const u32 low = there && c + 2 * i < MANY ? __ldca(from + 2 * i) : (u16)0;
                const u32 high = there && c + 2 * i + 1 < MANY ? __ldca(from + 2 * i + 1) : (u16)0;
                word[i] = low | high << 16;
            }
        }
        write16(to, uint4{word[0], word[1], word[2], word[3]});
    }
}

// A strip of an image: what windows see, with a border of zeros, and the gradient of sixteen outputs.
template <int C, int N, int H, int W, int HIGH, int WIDE, int STRIP> struct Strip {
    static constexpr int EACH = C <= 8 ? 8 : 16, GROUPS = (C + EACH - 1) / EACH, SHARES = 8 / GROUPS;
    static constexpr int THREADS = 32 * GROUPS * SHARES, EIGHTS = GROUPS * EACH / 8;
    static constexpr int SEEN = (EIGHTS | 1) * 16, MADE = 48;  // bytes of a pixel: an odd number of 16
    static constexpr int ACROSS = W + WIDE - 1, DOWN = STRIP + HIGH - 1, STRIPS = (H + STRIP - 1) / STRIP;
    static constexpr int PIXELS = STRIP * W, STEPS = (PIXELS + 15) / 16, WINDOWS = DOWN * ACROSS * SEEN;
    static constexpr int BYTES = WINDOWS + STEPS * 16 * MADE;

    __device__ __forceinline__ static void take(u32 to, const u16 *x, const u16 *grad, int unit, int outputs) {
        const int image = unit / STRIPS, top = unit % STRIPS * STRIP;
        for (int i = threadIdx.x; i < DOWN * ACROSS * EIGHTS; i += THREADS) {
            const int c = i % EIGHTS * 8, place = i / EIGHTS, h = top + place / ACROSS - HIGH / 2, w = place % ACROSS - WIDE / 2;
            const bool there = (u32)h < (u32)H && (u32)w < (u32)W;
            const long long pixel = there ? (long long)(image * H + h) * W + w : 0;
            take_eight<C>(to + place * SEEN + c * 2, x + pixel * C + (c < C ? c : 0), there, c);
        }
        for (int i = threadIdx.x; i < STEPS * 16 * 2; i += THREADS) {
            const int n = outputs + i % 2 * 8, place = i / 2, h = top + place / W;
            const bool there = place < PIXELS && h < H;
            const long long pixel = there ? (long long)(image * H + h) * W + place % W : 0;
            take_eight<N>(to + WINDOWS + place * MADE + i % 2 * 16, grad + pixel * N + (n < N ? n : 0), there, n);
        }
        end_set();
    }
};

template <int KIND, int C, int N, int H, int W, int HIGH, int WIDE, int STRIP>
__global__ void __launch_bounds__(256, 2)
narrow_weights(const u16 *x, const u16 *grad, float *parts, int images) {
    typedef Strip<C, N, H, W, HIGH, WIDE, STRIP> S;
    constexpr int TAPS = HIGH * WIDE, TILES = S::EACH / 8, SUMS = TAPS * TILES, GROUPS = S::GROUPS, SHARES = S::SHARES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % GROUPS, share = warp / GROUPS;
    const int g = lane / 4, t = lane % 4, outputs = 16 * blockIdx.y, units = images * S::STRIPS;
    const u32 strips = place_of(shared);
    float sum[SUMS][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) sum[i][k] = 0;
    let_others_start();
    wait_for_others();
    if (blockIdx.x < units) S::take(strips, x, grad, blockIdx.x, outputs);
    for (int unit = blockIdx.x, odd = 0; unit < units; unit += gridDim.x, odd ^= 1) {  // the next one while at this
        if (unit + gridDim.x < units) S::take(strips + (odd ^ 1) * S::BYTES, x, grad, unit + gridDim.x, outputs);
        else end_set();
        wait_for_sets<1>();
        __syncthreads();
        const u32 windows = strips + odd * S::BYTES, made = windows + S::WINDOWS;
        for (int step = share; step < S::STEPS; step += SHARES) {
            u32 left[4];
            read_matrices(left, made + (16 * step + lane % 8 + lane / 16 * 8) * S::MADE + lane / 8 % 2 * 16);
            int place = 16 * step + lane % 16;
            if (S::PIXELS % 16 && place >= S::PIXELS) place = 0;  // times zero
            const u32 own = windows + (place / W * S::ACROSS + place % W) * S::SEEN;
            if constexpr (TILES == 2) {
                const u32 from = own + (2 * group + lane / 16) * 16;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) {
                    u32 right[4];
                    read_matrices(right, from + (tap / WIDE * S::ACROSS + tap % WIDE) * S::SEEN);
                    multiply<KIND>(sum[2 * tap], left, right[0], right[1]);
                    multiply<KIND>(sum[2 * tap + 1], left, right[2], right[3]);
                }
            } else {  // two taps at once
#pragma unroll
                for (int tap = 0; tap < TAPS; tap += 2) {
                    const int second = tap + 1 < TAPS ? tap + 1 : tap;
                    u32 right[4];
                    read_matrices(right, own + (lane < 16 ? (tap / WIDE * S::ACROSS + tap % WIDE) * S::SEEN
                                                          : (second / WIDE * S::ACROSS + second % WIDE) * S::SEEN));
                    multiply<KIND>(sum[tap], left, right[0], right[1]);
                    if (tap + 1 < TAPS) multiply<KIND>(sum[second], left, right[2], right[3]);
                }
            }
        }
        __syncthreads();
    }
    // warps that had a share of the pixels give it to the first half of them, again and again
    float *given = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int half = SHARES / 2; half; half /= 2) {
        float *own = given + ((share % half * GROUPS + group) * SUMS * 4) * 32 + lane;
        if (share >= half && share < 2 * half)
#pragma unroll
            for (int i = 0; i < SUMS * 4; i++) own[i * 32] = sum[i / 4][i % 4];
        __syncthreads();
        if (share < half)
#pragma unroll
            for (int i = 0; i < SUMS * 4; i++) sum[i / 4][i % 4] += own[i * 32];
        __syncthreads();
    }
    if (share) return;
    float *to = parts + (long long)blockIdx.x * N * TAPS * C;
#pragma unroll
    for (int i = 0; i < SUMS * 4; i++) {
        const int tile = i / 4, tap = tile / TILES, n = outputs + g + i % 4 / 2 * 8;
        const int c = group * S::EACH + tile % TILES * 8 + 2 * t + i % 2;
        if (n < N && c < C) to[(n * TAPS + tap) * C + c] = sum[tile][i % 4];
    }
}

// What the blocks have, added up in a fixed order: 32 numbers by 32 warps.
template <int KIND> __global__ void __launch_bounds__(1024) narrow_sum(const float *parts, u16 *out, int many, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 32 + lane;
    float *sums = reinterpret_cast<float *>(shared), total = 0;
    let_others_start();
    wait_for_others();
    if (i < count)
#pragma unroll 8
        for (int part = warp; part < many; part += 32) total += __ldca(parts + (long long)part * count + i);
    sums[threadIdx.x] = total;
    __syncthreads();
    if (warp || i >= count) return;
#pragma unroll
    for (int other = 1; other < 32; other++) total += sums[32 * other + lane];
    out[i] = narrow<KIND>(total);
}
