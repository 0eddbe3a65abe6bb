// One persistent grid: copying CTAs that become product CTAs when their copies are done, and product CTAs.
//
// A product CTA is a warp that loads and two warpgroups that multiply, each 64 rows of a 128-row tile. Two CTAs of a
// cluster take neighbouring row tiles of one column tile and load half of the second operand each, for both.
#pragma once

#include <cuda_bf16.h>

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "copy.cuh"
#include "plan.cuh"
#include "ptx.cuh"
#include "wide.cuh"

namespace hf_cp {

// The tensor instruction of a tile `kTileN` columns wide.
template <class Element, int kTileN, int kTileK, cute::GMMA::Major kMajorB>
constexpr auto choose_atom() {
  if constexpr (kTileN % 160 == 0) {
    static_assert(kMajorB == cute::GMMA::Major::K);
    if constexpr (sizeof(Element) == 1) {
      return Wgmma160E4m3{};
    } else {
      return Wgmma160Bf16{};
    }
  } else {
    return cute::GMMA::ss_op_selector<
        Element, Element, float, cute::Shape<cute::_128, cute::Int<kTileN>, cute::Int<kTileK>>, cute::GMMA::Major::K,
        kMajorB>();
  }
}

template <class Element_, int kTileN_, cute::GMMA::Major kMajorB_, int kCluster_, int kStages_>
struct Variant {
  using Element = Element_;
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kTileM = 128, kTileN = kTileN_, kTileK = 128 / kElementBytes;
  static constexpr cute::GMMA::Major kMajorB = kMajorB_;
  static constexpr bool kRowsAreK = kMajorB == cute::GMMA::Major::MN;
  static constexpr int kCluster = kCluster_, kStages = kStages_;
  static constexpr int kShareN = kTileN / kCluster, kLoadColumns = columns_of_a_load(kShareN, kRowsAreK);

  // Columns of the product that are stored at a time, as wide as the copy engine's swizzle: 128 or 64 bytes.
  static constexpr int kBoxColumns = kTileN % 64 == 0 ? 64 : 32, kBoxBytes = 64 * kBoxColumns * 2, kStoreBoxes = 2;
  static constexpr int kBytesA = kTileM * 128, kBytesB = kTileN * 128;
  static constexpr int kThreads = 384, kWarpgroup = 128;
  static constexpr int kRingBytes = kStages * (kBytesA + kBytesB);
  static constexpr int kStoreBytes = 2 * kStoreBoxes * kBoxBytes;
  static constexpr int kChunkSlots = kRingBytes / kChunkBytes < kMaxChunkSlots ? kRingBytes / kChunkBytes : kMaxChunkSlots;
  static constexpr int kBarriers = 2 * kStages + 2 * kMaxChunkSlots;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kStoreBytes + kBarriers * 8;
  static_assert(kTileN % kBoxColumns == 0, "a tile is stored in whole boxes");
  static_assert(
      kShareN % kLoadColumns == 0 && kLoadColumns % 8 == 0, "a CTA's share of the second operand is whole boxes");
  static_assert(kLoadColumns <= 256, "more rows than the copy engine takes in a box");
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper SM gives a block");

  using Atom = decltype(choose_atom<Element, kTileN, kTileK, kMajorB>());
  using Mma = decltype(cute::make_tiled_mma(Atom{}, cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  using LayoutA = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::Int<kTileM>, cute::Int<kTileK>, cute::Int<kStages>>{}));
  using AtomB = std::conditional_t<kRowsAreK, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                   cute::GMMA::Layout_K_SW128_Atom<Element>>;
  // With K as rows, boxes of 64 columns and all K rows of a tile lie one after another.
  using OrderB = std::conditional_t<kRowsAreK, cute::Step<cute::_2, cute::_1, cute::_3>,
                                    cute::Step<cute::_1, cute::_2, cute::_3>>;
  using LayoutB = decltype(cute::tile_to_shape(
      AtomB{}, cute::Shape<cute::Int<kTileN>, cute::Int<kTileK>, cute::Int<kStages>>{}, OrderB{}));
};

__device__ __forceinline__ int section_of(KernelParams const& p, int column_tile) {
  int section = 0;
  while (column_tile >= p.section_tile_end[section]) ++section;
  return section;
}

template <class V>
__device__ __forceinline__ int first_column(KernelParams const& p, int section, int column_tile) {
  int const begin = section == 0 ? 0 : p.section_tile_end[section - 1];
  return (column_tile - begin) * V::kTileN;
}

// Which groups of the current row tile have been copied, as the loading warp knows it. All its lanes call together.
class Copied {
 public:
  __device__ __forceinline__ Copied(KernelParams const& p, uint64_t epoch)
      : p_(p), epoch_(epoch), needed_(p.block_count > 0) {}

  // False once all of the operand is there, which one flag says.
  __device__ __forceinline__ bool needed() const { return needed_; }

  // `look`: read the flags at once; otherwise when the first is waited for.
  __device__ __forceinline__ void start_tile(Tile const& tile, bool look) {
    if (!needed_) return;
    mask_ = 0;
    if (tile.row_tile >= p_.order.tiles_m) {
      // The cluster's second CTA past the last row tile: it reads nothing but zeros.
      mask_ = ~0u;
    } else {
      row_ = flag_index(p_.order, tile.batch, tile.row_tile);
      if (look) poll();
    }
  }

  __device__ __forceinline__ void wait(int group) {
    if (mask_ >> group & 1) return;
    if (p_.test_mode & 1) {
      mask_ = ~0u;
      return;
    }
    uint64_t const start = nanoseconds();
    while (needed_ && !(mask_ >> group & 1)) {
      poll();
      if (nanoseconds() - start > p_.timeout_ns) {
        if (threadIdx.x % 32 == 0) {
          p_.report->place = row_ + group;
          p_.report->expected = epoch_;
          p_.report->seen = load_acquire_gpu(p_.flags + row_ + group);
          p_.report->kind = kCopyMissing;
          __threadfence_system();
        }
        needed_ = false;
      }
    }
  }

 private:
  // All flags of the row tile at once: one trip to the cache, however many groups.
  __device__ __forceinline__ void poll() {
    uint32_t const lane = threadIdx.x % 32;
    bool here = false;
    if (lane == 31) {
      here = load_acquire_gpu(p_.all_copied) >= epoch_;
    } else if (lane < static_cast<uint32_t>(p_.order.group_count)) {
      here = load_acquire_gpu(p_.flags + row_ + lane) >= epoch_;
    }
    uint32_t const seen = __ballot_sync(~0u, here);
    // What the lanes acquired is read by the copy engine next.
    if (seen & ~mask_) fence_proxy_async_global();
    mask_ = seen;
    if (seen >> 31) needed_ = false;
  }

  KernelParams const& p_;
  uint64_t epoch_;
  bool needed_;
  uint32_t mask_ = 0;
  int64_t row_ = 0;
};

template <class V>
__device__ __forceinline__ void load_tiles(
    KernelParams const& p, uint64_t epoch, uint32_t rank, char* ring, uint64_t* full, uint64_t* empty) {
  Order const& o = p.order;
  char* const shared_a = ring;
  char* const shared_b = ring + V::kStages * V::kBytesA;
  constexpr uint16_t kEveryone = (1 << V::kCluster) - 1;
  int stage = 0;
  uint32_t phase = 0;
  Copied copied(p, epoch);
  Walk const walk = walk_of(o, blockIdx.x);
  for (int pair = walk.first; pair < walk.end; pair += walk.stride) {
    Tile const tile = tile_at(o, pair, rank);
    int const section = section_of(p, tile.column_tile);
    CUtensorMap const* const map_b = p.b + section;
    int const column = first_column<V>(p, section, tile.column_tile) + rank * V::kShareN;
    int const batch_b = tile.batch / p.b_batch_divisor;
    if (p.test_mode & 2) delay_at_random(epoch, pair);
    Steps steps = first_step(o);
    int const first_k = steps.k_tile * V::kTileK;
    copied.start_tile(tile, !(first_k >= p.own_begin && first_k < p.own_end));
    for (int i = 0; i < o.k_tiles; ++i) {
      int const k = steps.k_tile * V::kTileK;
      bool const is_own = k >= p.own_begin && k < p.own_end;
      if (copied.needed()) {
        for (int group = next_group(o, steps); group >= 0; group = next_group(o, steps)) {
          if (!is_own) copied.wait(group);
        }
      }
      barrier_wait(empty + stage, phase ^ 1);
      if (cute::elect_one_sync()) {
        barrier_arrive_expect(full + stage, V::kBytesA + V::kBytesB);
        tensor_load(
            shared_a + stage * V::kBytesA, is_own ? &p.own : &p.a, full + stage, is_own ? k - p.own_begin : k,
            tile.row_tile * V::kTileM, tile.batch);
        char* const target = shared_b + stage * V::kBytesB + rank * V::kShareN * 128;
#pragma unroll
        for (int box = 0; box < V::kShareN / V::kLoadColumns; ++box) {
          char* const box_target = target + box * V::kLoadColumns * 128;
          int const from = column + box * V::kLoadColumns;
          int const x = V::kRowsAreK ? from : k, y = V::kRowsAreK ? k : from;
          if constexpr (V::kCluster == 1) {
            tensor_load(box_target, map_b, full + stage, x, y, batch_b);
          } else {
            tensor_load_multicast(box_target, map_b, full + stage, kEveryone, x, y, batch_b);
          }
        }
      }
      __syncwarp();
      if (++stage == V::kStages) {
        stage = 0;
        phase ^= 1;
      }
      next_step(o, steps);
    }
  }
}

// Where 16 bytes of a box's row lie: the copy engine's swizzle of 128 or 64 bytes.
template <int kColumns>
__device__ __forceinline__ uint32_t box_offset(uint32_t row, uint32_t chunk) {
  uint32_t const swizzled = kColumns == 64 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
  return row * kColumns * 2 + (swizzled << 4);
}

// Writes what of a box lies in segments that begin inside it: the copy engine's stores cannot start at negative
// coordinates. All threads of the warpgroup, 16 bytes each.
template <int kColumns>
__device__ __forceinline__ void store_across_edges(
    KernelParams const& p, int section, char const* box, int row, int column, int batch, int thread) {
  for (int s = p.section_segment_begin[section]; s < p.section_segment_begin[section + 1]; ++s) {
    Range const range = p.segment_range[s];
    int const x = column - range.column, y = row - range.row;
    if ((x >= 0 && y >= 0) || x >= range.columns || x <= -kColumns || y >= range.rows || y <= -64) continue;
    Target const target = p.target[s];
    for (int i = thread; i < 64 * kColumns / 8; i += 128) {
      int const box_row = i / (kColumns / 8), chunk = i % (kColumns / 8);
      int const to_row = y + box_row, to_column = x + chunk * 8;
      if (to_row < 0 || to_row >= range.rows || to_column < 0 || to_column >= range.columns) continue;
      uint4 const value = *reinterpret_cast<uint4 const*>(box + box_offset<kColumns>(box_row, chunk));
      *reinterpret_cast<uint4*>(target.address + batch * target.batch_stride + to_row * target.row_stride +
                                to_column * 2) = value;
    }
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}

template <class V>
__device__ __forceinline__ void multiply_tiles(
    KernelParams const& p, char* ring, char* store_boxes, uint64_t* full, uint64_t* empty) {
  using namespace cute;
  using Element = typename V::Element;
  int const thread = threadIdx.x % V::kWarpgroup;
  int const warpgroup = __shfl_sync(~0u, threadIdx.x / V::kWarpgroup - 1, 0);
  uint32_t const rank = V::kCluster == 1 ? 0 : cluster_rank();
  int const lane = threadIdx.x % 32, warp = thread / 32;

  Tensor shared_a = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(ring)), typename V::LayoutA{});
  Tensor shared_b =
      make_tensor(make_smem_ptr(reinterpret_cast<Element*>(ring + V::kStages * V::kBytesA)), typename V::LayoutB{});
  typename V::Mma mma;
  auto slice = mma.get_slice(make_layout(Int<2>{}, Int<V::kWarpgroup>{})(warpgroup));
  Tensor operand_a = slice.make_fragment_A(slice.partition_A(shared_a));
  Tensor operand_b = slice.make_fragment_B(slice.partition_B(shared_b));
  Tensor sums = partition_fragment_C(mma, Shape<Int<V::kTileM>, Int<V::kTileN>>{});

  // Where this lane's row of the four 8x8 tiles of a store lies in a box.
  char* const boxes = store_boxes + warpgroup * V::kStoreBoxes * V::kBoxBytes;
  uint32_t const box_row = warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
  uint32_t const box_chunk = lane / 16;

  auto release = [&](int stage) {
    if constexpr (V::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty + stage);
    } else {
      if (lane < V::kCluster) barrier_arrive_cluster(empty + stage, lane);
    }
  };

  int stage = 0;
  uint32_t phase = 0;
  int box_count = 0;
  Order const& o = p.order;
  Walk const walk = walk_of(o, blockIdx.x);
  for (int pair = walk.first; pair < walk.end; pair += walk.stride) {
    Tile const tile = tile_at(o, pair, rank);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int previous = -1;
    for (int i = 0; i < o.k_tiles; ++i) {
      barrier_wait(full + stage, phase);
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int k = 0; k < size<2>(operand_a); ++k) {
        cute::gemm(mma, operand_a(_, _, k, stage), operand_b(_, _, k, stage), sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      // One batch stays in flight; the stage of the one before has been read.
      warpgroup_wait<1>();
      warpgroup_fence_operand(sums);
      if (previous >= 0) release(previous);
      previous = stage;
      if (++stage == V::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release(previous);

    int const section = section_of(p, tile.column_tile);
    int const row = tile.row_tile * V::kTileM + warpgroup * 64;
    float scale = 1.0f;
    if (p.scale_a != nullptr) scale *= *p.scale_a;
    if (p.scale_b[section] != nullptr) scale *= *p.scale_b[section];
    int const tile_column = p.section_column[section] + first_column<V>(p, section, tile.column_tile);
    CUTE_UNROLL
    for (int box = 0; box < V::kTileN / V::kBoxColumns; ++box) {
      char* const box_memory = boxes + (box_count % V::kStoreBoxes) * V::kBoxBytes;
      uint32_t const buffer = shared_address(box_memory);
      ++box_count;
      if (thread == 0) bulk_wait_read<V::kStoreBoxes - 1>();
      named_barrier(1 + warpgroup, V::kWarpgroup);
      CUTE_UNROLL
      for (int j = 0; j < V::kBoxColumns / 16; ++j) {
        int const at = (box * V::kBoxColumns / 8 + j * 2) * 4;
        uint32_t const address = buffer + box_offset<V::kBoxColumns>(box_row, j * 2 + box_chunk);
        store_matrices(
            address, pack(sums(at) * scale, sums(at + 1) * scale), pack(sums(at + 2) * scale, sums(at + 3) * scale),
            pack(sums(at + 4) * scale, sums(at + 5) * scale), pack(sums(at + 6) * scale, sums(at + 7) * scale));
      }
      fence_proxy_async_shared();
      named_barrier(1 + warpgroup, V::kWarpgroup);
      int const column = tile_column + box * V::kBoxColumns;
      if (thread == 0) {
        for (int s = p.section_segment_begin[section]; s < p.section_segment_begin[section + 1]; ++s) {
          Range const range = p.segment_range[s];
          int const x = column - range.column, y = row - range.row;
          // Past the segment's end the copy engine writes nothing.
          if (x >= 0 && x < range.columns && y >= 0 && y < range.rows) {
            tensor_store(p.segments + s, buffer, x, y, tile.batch);
          }
        }
        bulk_commit();
      }
      if (p.section_has_edges[section]) {
        store_across_edges<V::kBoxColumns>(p, section, box_memory, row, column, tile.batch, thread);
      }
    }
  }
  // The products must have been written, here and at other ranks, before the grid may count as done.
  if (thread == 0) {
    bulk_wait<0>();
    fence_proxy_async();
  }
  __threadfence_system();
}

template <class V>
__global__ void __launch_bounds__(V::kThreads, 1) fused_kernel(__grid_constant__ KernelParams const p) {
  extern __shared__ char unaligned[];
  char* const ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  char* const store_boxes = ring + V::kRingBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(store_boxes + V::kStoreBytes);
  uint64_t* const empty = full + V::kStages;
  uint64_t* const copy_full = empty + V::kStages;
  uint64_t* const copy_empty = copy_full + kMaxChunkSlots;

  if (threadIdx.x == 0) {
    for (int i = 0; i < V::kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, V::kCluster * 8);
    }
    for (int i = 0; i < V::kChunkSlots; ++i) {
      barrier_init(copy_full + i, 1);
      barrier_init(copy_empty + i, 1);
    }
    barrier_init_fence();
    fence_proxy_async();
    prefetch_map(&p.a);
    prefetch_map(p.b);
  }
  __syncthreads();

  uint64_t const epoch = p.epoch == nullptr ? 0 : load_acquire_gpu(p.epoch);
  if (blockIdx.x < p.order.copy_ctas) {
    copy_items<V::kTileM, V::kElementBytes, V::kChunkSlots>(
        p, epoch, ring, copy_full, copy_empty);
    __syncthreads();
  }
  // No CTA writes into another's shared memory before the other has left its copies behind.
  if constexpr (V::kCluster > 1) cluster_sync();

  if (threadIdx.x < V::kWarpgroup) {
    release_registers<56>();
    if (threadIdx.x < 32) {
      load_tiles<V>(p, epoch, V::kCluster == 1 ? 0 : cluster_rank(), ring, full, empty);
    }
  } else {
    acquire_registers<224>();
    multiply_tiles<V>(p, ring, store_boxes, full, empty);
  }
  // No CTA ends while the other may still write into its shared memory.
  if constexpr (V::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace hf_cp
