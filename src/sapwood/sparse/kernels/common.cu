// What the kernels share: numbers of 16 and 32 bits, and chunks of packed weights (see format.py).
constexpr int CHUNK = 8, TILE = 4096;
constexpr u32 ALL = 0xffffffffu;  // lanes

template <int KIND> struct Kind { typedef u16 Raw; };
template <> struct Kind<2> { typedef u32 Raw; };

template <int KIND> __device__ __forceinline__ float widen(u32 raw) {
    if constexpr (KIND == 0) return __uint_as_float(raw << 16);
    else if constexpr (KIND == 1) return from_half((u16)raw);
    else return __uint_as_float(raw);
}

template <int KIND> __device__ __forceinline__ typename Kind<KIND>::Raw narrow(float wide) {
    if constexpr (KIND == 0) return to_brain(wide);
    else if constexpr (KIND == 1) return to_half(wide);
    else return __float_as_uint(wide);
}

// The low and the high half of a word of two 16-bit numbers.
template <int KIND> __device__ __forceinline__ float low(u32 two) {
    return KIND == 0 ? __uint_as_float(two << 16) : widen<KIND>(two & 0xffffu);
}
template <int KIND> __device__ __forceinline__ float high(u32 two) {
    return KIND == 0 ? __uint_as_float(two & 0xffff0000u) : widen<KIND>(two >> 16);
}

__device__ const uint4 nothing[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};  // where a lane has no chunk

// Eight values and their columns. What is read once goes past the caches.
template <int KIND> struct Chunk {
    uint4 words[KIND == 2 ? 2 : 1];
    u64 place;

    __device__ __forceinline__ void load(const void *values, const u64 *places, long long at) {
        load_values(values, at);
        place = __ldcs(places + at);
    }
    __device__ __forceinline__ void load_values(const void *values, long long at) {
        constexpr int N = KIND == 2 ? 2 : 1;
        const uint4 *from = reinterpret_cast<const uint4 *>(values) + at * N;
#pragma unroll
        for (int i = 0; i < N; i++) words[i] = __ldcs(from + i);
    }
    __device__ __forceinline__ static void send_for_it(const void *values, const u64 *places, long long at) {
        send_for(reinterpret_cast<const uint4 *>(values) + at * (KIND == 2 ? 2 : 1));
        send_for(places + at);
    }
    __device__ __forceinline__ u32 word(int i) const {
        const uint4 &w = words[i / 4];
        return i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w;
    }
    __device__ __forceinline__ float value(int i) const {
        if constexpr (KIND == 2) return __uint_as_float(word(i));
        else return i % 2 ? high<KIND>(word(i / 2)) : low<KIND>(word(i / 2));
    }
    __device__ __forceinline__ bool filler(int i) const {
        if constexpr (KIND == 2) return word(i) == 0;
        else return ((i % 2 ? word(i / 2) >> 16 : word(i / 2)) & 0xffffu) == 0;
    }
};

// What a word of places says: the first column, whether steps count by eights, and the i-th step (1 to 7), so many bits to
// the left.
__device__ __forceinline__ u32 first_of(u64 place) { return (u32)(place >> 42) & 0xfffffu; }
__device__ __forceinline__ bool by_eights(u64 place) { return (u32)(place >> 32) & 0x40000000u; }
__device__ __forceinline__ u32 step_of(u64 place, int i, int left = 0) {
    const u32 low = (u32)place, high = (u32)(place >> 32);
    const int from = 6 * (i - 1);
    const u32 bits = i == 6 ? (u32)(place >> (from - left)) : i == 7 ? high << left >> 4
                     : from < left ? low << (left - from) : low >> (from - left);
    return bits & 63u << left;
}

// The sum of a row of W and row b of x: to the sums of this part of the columns, or with the bias to y.
template <int KIND>
__device__ __forceinline__ void put(float total, int b, int batch, long long row, int rows, const void *bias, void *y,
                                    float *partial) {
    typedef typename Kind<KIND>::Raw Raw;
    if (partial) partial[((long long)blockIdx.y * batch + b) * rows + row] = total;
    else {
        if (bias) total += widen<KIND>(reinterpret_cast<const Raw *>(bias)[row]);
        reinterpret_cast<Raw *>(y)[(long long)b * rows + row] = narrow<KIND>(total);
    }
}
