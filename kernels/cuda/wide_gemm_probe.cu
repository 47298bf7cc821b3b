// Many rows times a matrix (decode of 65 to 512 sequences), for Hopper: y[m, n] = sum_k x[m, k] W[n, k].
//
// Between the two bounds: reading W takes about as long as multiplying. So one warpgroup only loads (tensor memory
// accelerator, a ring of STAGES slots), two warpgroups only multiply (64 rows each of a tile of 128), and programs of a
// cluster share what they load: CM programs of different rows share W, CN programs of different columns share x, each
// loading its part for all of them; CK programs split k and add their sums through each other's shared memory. Tiles are
// any multiple of 8 columns wide, so that 132 multiprocessors get equal shares. Persistent: loads of the next tile run
// under the epilogue of the last. The weights of the whole ring are requested before the wait for the kernel that makes x.
//
// Epilogues and the residual stream are those of triton/skinny_linear.py. Sizes and options are macros (wide_gemm.py,
// which also writes `wgmma`). Rows of both operands are 128 bytes of k at a time, swizzled.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(64) TensorMap { char bytes[128]; };

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, THREADS = 128 * CONSUMERS + 128;
constexpr int ITEM = FP8 ? 1 : 2;
constexpr int K_BOX = 128 / ITEM;                      // k of one box
constexpr int STEPS = K / CK / (K_BOX * BOXES);
constexpr int PEERS = CM * CN;                         // programs of one part of k
constexpr int CLUSTER = PEERS * CK;
constexpr int COLUMNS = SILU ? BLOCK_N / 2 : BLOCK_N;  // of the output
constexpr int N_TILES = N / COLUMNS;
constexpr int REGS = BLOCK_N / 2;                      // of an accumulator, a thread
constexpr int MINE = REGS / CK;                        // of the sums that it finishes
constexpr int EIGHTS = (SILU ? MINE / 2 : MINE) / 4;   // columns of these, 8 by 8
constexpr int X_BYTES = ROWS * 128, W_BYTES = BLOCK_N * 128;
constexpr int SLOT_BYTES = BOXES * (X_BYTES + W_BYTES);
#ifdef NO_X
constexpr int LOADED = BOXES * W_BYTES;
#elif defined(NO_W)
constexpr int LOADED = BOXES * X_BYTES;
#else
constexpr int LOADED = SLOT_BYTES;
#endif
constexpr int X_PART = ROWS / CN;                      // rows that one program loads for its peers
constexpr int W_BOX = SILU || CM == 2 ? BLOCK_N / 2 : BLOCK_N;
static_assert(CM <= 2 && N_TILES % CN == 0 && N % COLUMNS == 0 && K % (CK * K_BOX * BOXES) == 0, "tiles cover all");
static_assert(CK == 1 || (!SILU && BLOCK_N / 8 % CK == 0 && ROWS * BLOCK_N * 4 <= STAGES * SLOT_BYTES), "split k");

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 bar, u32 parity) {
    u32 done = 0;
#ifdef GUARD
    for (int tries = 0; !done; tries++) {
        if (tries > (1 << 20)) { __trap(); }
#else
    while (!done) {
#endif
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    }
}

__device__ __forceinline__ void expect_bytes(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void arrive_in(u32 bar, u32 rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(bar, rank)) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A box into shared memory: of this program, or at the same place of every program in `mask`.
template <bool SHARED>
__device__ __forceinline__ void load_box(const TensorMap *map, u32 to, u32 bar, int k, int row, u16 mask) {
    if constexpr (SHARED) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4}], [%2], %5;"
            ::"r"(to), "l"((u64)map), "r"(bar), "r"(k), "r"(row), "h"(mask) : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            ::"r"(to), "l"((u64)map), "r"(bar), "r"(k), "r"(row) : "memory");
    }
}

// Where a tile of rows of 128 swizzled bytes is, as wgmma wants it: rows of 8 follow each other after 1024 bytes.
__device__ __forceinline__ u64 describe(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
__device__ __forceinline__ float2 load_pair(const u16 *p) {
    u32 both = __ldg((const u32 *)p);
    return make_float2(low_of(both), high_of(both));
}
__device__ __forceinline__ float sum_of_four(float x) {  // of the lanes that hold one row
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

struct Place { int cm, cn, ck; };  // of a program in its cluster

struct Ring {
    u32 base, full, empty, slot, parity;
    __device__ u32 x(int box) const { return base + slot * SLOT_BYTES + box * X_BYTES; }
    __device__ u32 w(int box) const { return base + slot * SLOT_BYTES + BOXES * X_BYTES + box * W_BYTES; }
    __device__ u32 full_bar() const { return full + slot * 8; }
    __device__ u32 empty_bar() const { return empty + slot * 8; }
    __device__ void advance() {
        if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
};

__device__ __forceinline__ void load_weights(const TensorMap *w_map, const Ring &ring, Place at, int k, int n_tile) {
    u16 mask = 0;
    for (int i = 0; i < CM; i++) { mask |= 1 << (i + CM * (at.cn + CN * at.ck)); }
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
#pragma unroll
        for (int part = 0; part < BLOCK_N / W_BOX; part++) {
            if (CM > 1 && part != at.cm) { continue; }
            int row = SILU ? part * N + n_tile * COLUMNS : n_tile * BLOCK_N + part * W_BOX;
#ifndef NO_W
#ifdef PACK_W
            int q = ((row / W_BOX) * (K / K_BOX) + k / K_BOX + box) * W_BOX;
            load_box<(CM > 1)>(w_map, ring.w(box) + part * W_BOX * 128, ring.full_bar(), 0, q, mask);
#else
            load_box<(CM > 1)>(w_map, ring.w(box) + part * W_BOX * 128, ring.full_bar(), k + box * K_BOX, row, mask);
#endif
#endif
        }
    }
}

__device__ __forceinline__ void load_rows(const TensorMap *x_map, const Ring &ring, Place at, int k, int m_tile) {
    u16 mask = 0;
    for (int i = 0; i < CN; i++) { mask |= 1 << (at.cm + CM * (i + CN * at.ck)); }
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
        int first = at.cn * X_PART;
#ifndef NO_X
#ifdef PACK_X
        load_box<(CN > 1)>(
            x_map, ring.x(box) + first * 128, ring.full_bar(), 0, (m_tile * (K / K_BOX) + k / K_BOX + box) * ROWS + first, mask);
#else
        load_box<(CN > 1)>(
            x_map, ring.x(box) + first * 128, ring.full_bar(), k + box * K_BOX, m_tile * ROWS + first, mask);
#endif
#endif
    }
}

struct Work {  // one program's tiles: those of its cluster, whose rows and columns it takes by its place
    int cluster, clusters, m_groups, tiles;
    __device__ int m_tile(int tile, Place at) const { return tile % m_groups * CM + at.cm; }
    __device__ int n_tile(int tile, Place at) const { return tile / m_groups * CN + at.cn; }
};

__device__ __forceinline__ void produce(const TensorMap *x_map, const TensorMap *w_map, Ring ring, Place at, Work work) {
    constexpr int STEP_K = K_BOX * BOXES, AHEAD = STAGES < STEPS ? STAGES : STEPS;
    int k0 = at.ck * (K / CK);
    Ring start = ring;
    if (work.cluster < work.tiles) {
        for (int step = 0; step < AHEAD; step++, start.advance()) {
            expect_bytes(start.full_bar(), LOADED);
            load_weights(w_map, start, at, k0 + step * STEP_K, work.n_tile(work.cluster, at));
        }
    }
#if PDL
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
    for (int tile = work.cluster; tile < work.tiles; tile += work.clusters) {
        for (int step = 0; step < STEPS; step++, ring.advance()) {
            int k = k0 + step * STEP_K;
            if (tile != work.cluster || step >= AHEAD) {
                wait_barrier(ring.empty_bar(), ring.parity ^ 1);
                expect_bytes(ring.full_bar(), LOADED);
                load_weights(w_map, ring, at, k, work.n_tile(tile, at));
            }
            load_rows(x_map, ring, at, k, work.m_tile(tile, at));
        }
    }
}

__device__ __forceinline__ void release(u32 empty_bar, Place at, int thread) {
    if (thread < PEERS) { arrive_in(empty_bar, thread + PEERS * at.ck); }
}

// One tile's sums over this program's part of k.
__device__ __forceinline__ void multiply(float (&acc)[REGS], Ring &ring, Place at, int group, int thread, long long &first) {
    u32 previous = 0;
    for (int step = 0; step < STEPS; step++) {
#ifdef ONE_POLLS
        if (thread % 32 == 0) { wait_barrier(ring.full_bar(), ring.parity); }
        __syncwarp();
#endif
        wait_barrier(ring.full_bar(), ring.parity);
        if (step == 0) { first = clock64(); }
        wgmma_begin();
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
            u64 x = describe(ring.x(box) + group * (64 * 128)), w = describe(ring.w(box));
#pragma unroll
            for (int part = 0; part < 4; part++) {
#ifndef NO_MMA
                wgmma(acc, x + part * 2, w + part * 2, step > 0 || box > 0 || part > 0);
#else
                if (step == 0 && box == 0) { for (int i = 0; i < REGS; i++) acc[i] = (float)(x + w); }
#endif
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) { release(previous, at, thread); }
        previous = ring.empty_bar();
        ring.advance();
    }
    wgmma_wait<0>();
    release(previous, at, thread);
}

// Adds the parts of k: each program of the CK gets the sums of its own columns, always in the same order.
__device__ __forceinline__ void add_parts(float (&acc)[REGS], float (&sum)[MINE], u32 base, Place at, int group,
                                          int thread) {
    if (CK == 1) {
#pragma unroll
        for (int i = 0; i < MINE; i++) { sum[i] = acc[i]; }
        return;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(128 * CONSUMERS) : "memory");  // both warpgroups are done with the ring
#pragma unroll
    for (int i = 0; i < REGS; i += 4) {
        u32 to = base + ((group * REGS + i) * 128 + thread * 4) * 4;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "f"(acc[i]), "f"(acc[i + 1]), "f"(acc[i + 2]), "f"(acc[i + 3]) : "memory");
    }
    meet_cluster();
#pragma unroll
    for (int i = 0; i < MINE; i++) { sum[i] = 0; }
#pragma unroll
    for (int part = 0; part < CK; part++) {
        u32 there = address_in(base, at.cm + CM * (at.cn + CN * part));
#pragma unroll
        for (int i = 0; i < MINE; i += 4) {
            float a, b, c, d;
            u32 from = there + ((group * REGS + at.ck * MINE + i) * 128 + thread * 4) * 4;
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(from) : "memory");
            sum[i] += a, sum[i + 1] += b, sum[i + 2] += c, sum[i + 3] += d;
        }
    }
}

struct Args {
    const float *squares_in, *x_scale_m, *scale_n;
    const u16 *bias_n;
    void *y_mn;
    u16 *residual_mn, *gained_mn;
    const u16 *gain_n;
    float *squares_out;
    int num_rows;
    float eps;
    long long *stamps;
};
#define STAMP(i) if (threadIdx.x == 0) { args.stamps[blockIdx.x * 8 + i] = clock64(); }


// What a row of the product is multiplied by.
__device__ __forceinline__ float row_scale(const Args &args, int row, int lane) {
    float scale = 1;
    if (PARTIALS > 0) {
        float squares = 0;
#pragma unroll 8
        for (int i = 0; i < (PARTIALS + 3) / 4; i++) {
            int p = i * 4 + (lane & 3);
            squares += p < PARTIALS && row < args.num_rows ? args.squares_in[p * BUCKET + row] : 0.f;
        }
        scale = rsqrtf(sum_of_four(squares) / K + args.eps);
    }
    if (FP8) { scale *= row < args.num_rows ? args.x_scale_m[row] : 0.f; }
    return scale;
}

__device__ __forceinline__ float2 finished(float a, float b, float scale, const Args &args, int column) {
    if (FP8) {
        float2 w = __ldg((const float2 *)(args.scale_n + column));
        a *= w.x, b *= w.y;
    }
    a *= scale, b *= scale;
    if (HAS_BIAS) {
        float2 bias = load_pair(args.bias_n + column);
        a += bias.x, b += bias.y;
    }
    return make_float2(a, b);
}

// What a thread needs beside the sums, read before they are there. Of each 8 columns it has two, of its row and of the
// row 8 below.
struct Beside {
    int row, column;
    float scale[2];
    u32 residual[RESIDUAL ? 2 * EIGHTS : 1];

    __device__ __forceinline__ Beside(const Args &args, int first_row, int first_column, int lane)
        : row(first_row), column(first_column + (lane & 3) * 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int m = row + half * 8;
            scale[half] = row_scale(args, m, lane);
            if constexpr (RESIDUAL) {
#pragma unroll
                for (int j = 0; j < EIGHTS; j++) {
                    const u32 *from = (const u32 *)(args.residual_mn + (long long)m * N + column + j * 8);
                    residual[half * EIGHTS + j] = m < args.num_rows ? *from : 0;
                }
            }
        }
    }
};

__device__ __forceinline__ void finish(const float (&sum)[MINE], const Args &args, const Beside &beside, int partial,
                                       int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int m = beside.row + half * 8;
        float squares = 0;
        bool is_real = m < args.num_rows;
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            int n = beside.column + j * 8, i = j * 4 + half * 2;
            long long place = (long long)m * N + n;
            float2 value = finished(sum[i], sum[i + 1], beside.scale[half], args, n);
            if constexpr (SILU) {
                float2 up = finished(sum[i + MINE / 2], sum[i + MINE / 2 + 1], beside.scale[half], args, N + n);
                value.x = __fdividef(value.x, 1.f + __expf(-value.x)) * up.x;
                value.y = __fdividef(value.y, 1.f + __expf(-value.y)) * up.y;
            }
            if (!is_real) { continue; }
            if constexpr (RESIDUAL) {
                u32 old = beside.residual[half * EIGHTS + j];
                u32 total = pack(low_of(old) + value.x, high_of(old) + value.y);
                float2 gain = load_pair(args.gain_n + n);
                float a = low_of(total), b = high_of(total);
                *(u32 *)(args.residual_mn + place) = total;
                *(u32 *)(args.gained_mn + place) = pack(a * gain.x, b * gain.y);
                squares += a * a + b * b;
            } else if constexpr (WIDE_OUT) {
                *(float2 *)((float *)args.y_mn + place) = value;
            } else {
                *(u32 *)((u16 *)args.y_mn + place) = pack(value.x, value.y);
            }
        }
        if constexpr (RESIDUAL) {
            squares = sum_of_four(squares);
            if ((lane & 3) == 0 && is_real) { args.squares_out[partial * BUCKET + m] = squares; }
        }
    }
}

__device__ __forceinline__ void consume(const Args &args, Ring ring, Place at, Work work) {
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    int inside = group * 64 + thread / 32 * 16 + lane / 4;
#if PDL
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
    float acc[REGS];
    for (int tile = work.cluster; tile < work.tiles; tile += work.clusters) {
        int row = work.m_tile(tile, at) * ROWS + inside, n_tile = work.n_tile(tile, at);
        Beside beside(args, row, n_tile * COLUMNS + at.ck * (COLUMNS / CK), lane);
        STAMP(2) long long first = 0;
        multiply(acc, ring, at, group, thread, first);
        STAMP(4) if (threadIdx.x == 0) { args.stamps[blockIdx.x * 8 + 3] = first; }
        float sum[MINE];
        add_parts(acc, sum, ring.base, at, group, thread);
        finish(sum, args, beside, n_tile * CK + at.ck, lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) char memory[];
    STAMP(0)
    u32 base = (shared_address(memory) + 1023) & ~1023u, rank = blockIdx.x % CLUSTER;
    Ring ring = {base, base + STAGES * SLOT_BYTES, base + STAGES * (SLOT_BYTES + 8), 0, 0};
    Place at = {(int)rank % CM, (int)rank / CM % CN, (int)rank / PEERS};
    int m_groups = (args.num_rows + ROWS * CM - 1) / (ROWS * CM);
    Work work = {(int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER, m_groups, m_groups * (N_TILES / CN)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init_barrier(ring.full + i * 8, 1);
            init_barrier(ring.empty + i * 8, CONSUMERS * PEERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    meet_cluster();
    STAMP(1)
    if (threadIdx.x >= 128 * CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 128 * CONSUMERS) { produce(&x_map, &w_map, ring, at, work); }
        __syncwarp();
        if (CK > 1) { meet_cluster(); }  // with the consumers' in add_parts; a program has one tile then
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(args, ring, at, work);
    }
    STAMP(5)
    meet_cluster();
    STAMP(6)  // shared memory must outlive what others still do in it
}
