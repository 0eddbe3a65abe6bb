// The copying CTAs: other ranks' parts of the first operand, through shared memory, into the local buffer.
//
// Pairs of threads take turns, an item each: one loads, one stores and publishes. Nothing here waits for another CTA, so
// the products that wait for the copies always get them.
#pragma once

#include "plan.cuh"
#include "ptx.cuh"

namespace hf_cp {

// A chunk is 32 rows of 1024 bytes, described in units of four bytes: the copy engine takes its time by the row, so rows
// are long.
constexpr int kUnitBytes = 4, kChunkRows = 32, kChunkColumns = 256;
constexpr int kChunkBytes = kChunkRows * kChunkColumns * kUnitBytes;
constexpr int kMaxChunkSlots = 6;

// Calls `visit(block, column, row)`, relative to the block, for every chunk of an item.
template <int kTileM, int kElementBytes, class Visit>
__device__ __forceinline__ void for_each_chunk(KernelParams const& p, Item const& item, Visit&& visit) {
  constexpr int kColumns = kChunkColumns * kUnitBytes / kElementBytes;
  int const row_begin = item.row_tile * kTileM, row_end = min(row_begin + kTileM, p.m);
  int const column_begin = p.order.group_begin[item.group], column_end = p.order.group_begin[item.group + 1];
  for (int block = 0; block < p.block_count; ++block) {
    Range const range = p.block_range[block];
    int const rows_end = min(row_end, range.row + range.rows) - range.row;
    int const columns_end = min(column_end, range.column + range.columns) - range.column;
    for (int row = max(row_begin, range.row) - range.row; row < rows_end; row += kChunkRows) {
      for (int column = max(column_begin, range.column) - range.column; column < columns_end; column += kColumns) {
        visit(block, column * kElementBytes / kUnitBytes, row);
      }
    }
  }
}

__device__ __forceinline__ void delay_at_random(uint64_t epoch, uint32_t salt) {
  uint32_t x = (static_cast<uint32_t>(epoch) * 2654435761u) ^ (salt * 2246822519u) ^ (blockIdx.x * 3266489917u);
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  if (x % 8 == 0) __nanosleep(x % 20000);
}

template <int kTileM, int kElementBytes, int kSlots>
__device__ __forceinline__ void copy_items(
    KernelParams const& p, uint64_t epoch, char* ring, uint64_t* full, uint64_t* empty) {
  // Publishing an item waits until it has been written, and for a barrier of the whole device: meanwhile the other
  // pairs of a loading and a storing thread, each with slots of its own, go on.
  constexpr int kPairSlots = 2, kPairs = kSlots / kPairSlots;
  Order const& o = p.order;
  int const warp = threadIdx.x / 32, pair = warp % kPairs;
  if (threadIdx.x % 32 != 0 || warp >= 2 * kPairs) return;
  ring += pair * kPairSlots * kChunkBytes;
  full += pair * kPairSlots;
  empty += pair * kPairSlots;
  int const first = blockIdx.x + pair * o.copy_ctas, stride = o.copy_ctas * kPairs;
  int slot = 0;
  uint32_t phase = 0;
  auto advance = [&] {
    if (++slot == kPairSlots) {
      slot = 0;
      phase ^= 1;
    }
  };
  Item item;
  if (warp < kPairs) {
    for (int i = first; item_at(o, i, item); i += stride) {
      if (p.test_mode & 2) delay_at_random(epoch, i);
      for_each_chunk<kTileM, kElementBytes>(p, item, [&](int block, int column, int row) {
        barrier_wait(empty + slot, phase ^ 1);
        barrier_arrive_expect(full + slot, kChunkBytes);
        tensor_load(ring + slot * kChunkBytes, p.sources + block, full + slot, column, row, item.batch);
        advance();
      });
    }
  } else {
    for (int i = first; item_at(o, i, item); i += stride) {
      int previous = -1;
      for_each_chunk<kTileM, kElementBytes>(p, item, [&](int block, int column, int row) {
        barrier_wait(full + slot, phase);
        tensor_store(p.gathered + block, shared_address(ring + slot * kChunkBytes), column, row, item.batch);
        bulk_commit();
        if (previous >= 0) {
          bulk_wait_read<1>();
          barrier_arrive(empty + previous);
        }
        previous = slot;
        advance();
      });
      bulk_wait_read<0>();
      if (previous >= 0) barrier_arrive(empty + previous);
      bulk_wait<0>();
      fence_proxy_async_global();
      store_release_gpu(p.flags + flag_index(o, item.batch, item.row_tile) + item.group, epoch);
    }
    uint32_t const last = o.copy_ctas * kPairs - 1;
    if (count_and_wrap(p.copied_count, last) == last) store_release_gpu(p.all_copied, epoch);
  }
}

}  // namespace hf_cp
