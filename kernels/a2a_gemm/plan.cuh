// What the host hands over, and what it makes of it for the kernel. `Spec` and the structs in it are mirrored field by
// field in plan.py; `hf_cp_spec_bytes` lets Python check that both agree.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "order.cuh"

namespace hf_cp {

constexpr int kMaxRanks = 8;
constexpr int kMaxSections = 3;
constexpr int kMaxSegments = 3 * kMaxRanks;
constexpr int kMaxBlocks = 3 * kMaxRanks;

// A matrix `[batch, rows, columns]` with contiguous columns. Strides in bytes, multiples of 16, as is the address.
struct MatrixSpec {
  uint64_t address;
  int64_t row_stride, batch_stride;
  int32_t columns, rows, batches, unused;
};

// Part of the gathered operand that comes from one rank: rows and columns from (row, column) on, as large as `source`.
struct BlockSpec {
  MatrixSpec source;
  int32_t column, row;
};

// Part of the product that goes to one place: rows and columns from (row, column) on, as large as `target`.
struct SegmentSpec {
  MatrixSpec target;
  int32_t column, row, section, unused;
};

struct Spec {
  // M x K x batches. With blocks, this is the buffer that they are gathered in.
  MatrixSpec a;
  // Row sections of the second operand, each [n, K] (or [K, n] if the variant says so). Batch l of the product reads
  // batch l / b_batch_divisor.
  MatrixSpec b[kMaxSections];
  SegmentSpec segments[kMaxSegments];
  BlockSpec blocks[kMaxBlocks];
  // First column of each group and, last, K.
  int32_t group_begin[kMaxGroups + 1];
  int32_t sections, segment_count, block_count, group_count, b_batch_divisor;
  // The block that lies on this device, which products read where it is, or -1.
  int32_t own_block;
  // The group that the copies and the products start with.
  int32_t first_group;
  // Row tiles of a window, in clusters; copying CTAs, all CTAs; row-tile-by-column-tile pairs left to the copying CTAs.
  int32_t window, copy_ctas, ctas, tail_pairs;
  // Device memory: the epoch; a flag per [batch][row tile][group]; the flag for all; the counter behind it; null where
  // there are no blocks. `report` is host memory that the device can write.
  uint64_t epoch, flags, all_copied, copied_count, report;
  // fp32 device scalars multiplied into the product, the second one a section, or null.
  uint64_t scale_a, scale_b[kMaxSections];
  uint64_t timeout_ns;
  // For tests, bits: 1 leaves out the wait for the copies, 2 delays copies and products at random.
  int32_t test_mode;
};

// Written by whoever waited too long; read by the host. `kind` 0: nothing happened.
struct Report {
  uint64_t kind, rank, place, expected, seen;
};
enum ReportKind : uint64_t { kCopyMissing = 1, kRankMissing = 2 };

struct Range {
  int column, row, columns, rows;
};

// A segment as ordinary stores see it. Strides in bytes.
struct Target {
  char* address;
  int64_t row_stride, batch_stride;
};

struct alignas(128) KernelParams {
  CUtensorMap a;
  CUtensorMap own;
  CUtensorMap b[kMaxSections];
  CUtensorMap segments[kMaxSegments];
  CUtensorMap sources[kMaxBlocks];
  CUtensorMap gathered[kMaxBlocks];
  Range segment_range[kMaxSegments];
  Range block_range[kMaxBlocks];
  Target target[kMaxSegments];
  Order order;
  int section_tile_end[kMaxSections], section_column[kMaxSections];
  int section_segment_begin[kMaxSections + 1];
  // Where a section has segments that begin inside a box of 64 rows or columns: see store_across_edges.
  int section_has_edges[kMaxSections];
  // Columns of `a` that products read from `own`, whole K steps and all rows; none if both are 0.
  int own_begin, own_end;
  int m, sections, block_count, b_batch_divisor, test_mode;
  uint64_t const* epoch;
  uint64_t* flags;
  uint64_t* all_copied;
  uint32_t* copied_count;
  Report* report;
  float const* scale_a;
  float const* scale_b[kMaxSections];
  uint64_t timeout_ns;
};

}  // namespace hf_cp
