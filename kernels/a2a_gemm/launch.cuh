// Host side of a variant: a Spec becomes tensor maps and a launch configuration once, then runs many times.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "gemm.cuh"

namespace hf_cp {

struct Message {
  char* text;
  int length;

  int operator()(int code, char const* format, ...) const {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, length, format, arguments);
    va_end(arguments);
    return code;
  }
};

inline decltype(&cuTensorMapEncodeTiled) encoder() {
  static decltype(&cuTensorMapEncodeTiled) const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

inline int encode(CUtensorMap* map, MatrixSpec const& matrix, CUtensorMapDataType type, int columns_per_unit,
                  int box_columns, int box_rows, CUtensorMapSwizzle swizzle, char const* name, int index,
                  Message const& message) {
  cuuint64_t const sizes[3] = {
      static_cast<cuuint64_t>(matrix.columns / columns_per_unit), static_cast<cuuint64_t>(matrix.rows),
      static_cast<cuuint64_t>(matrix.batches)};
  cuuint64_t const strides[2] = {
      static_cast<cuuint64_t>(matrix.row_stride),
      static_cast<cuuint64_t>(matrix.batches == 1 ? matrix.row_stride : matrix.batch_stride)};
  cuuint32_t const box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  cuuint32_t const steps[3] = {1, 1, 1};
  CUresult const result = encoder()(
      map, type, 3, reinterpret_cast<void*>(matrix.address), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return 0;
  return message(
      1, "%s[%d] cannot be described to the copy engine (CUDA driver error %d): address %#llx, columns %d, rows %d, "
      "batches %d, row stride %lld, batch stride %lld bytes; addresses and strides must be multiples of 16 bytes",
      name, index, static_cast<int>(result), static_cast<unsigned long long>(matrix.address), matrix.columns,
      matrix.rows, matrix.batches, static_cast<long long>(matrix.row_stride),
      static_cast<long long>(matrix.batch_stride));
}

template <class V>
struct Plan {
  KernelParams params;
  int ctas;

  static int make(Spec const& spec, Plan& plan, Message const& message) {
    KernelParams& p = plan.params;
    constexpr bool kBytes = V::kElementBytes == 1;
    constexpr auto kType = kBytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    constexpr auto kPlain = CU_TENSOR_MAP_SWIZZLE_NONE, kSwizzled = CU_TENSOR_MAP_SWIZZLE_128B;
    if (encoder() == nullptr) return message(1, "the CUDA driver has no cuTensorMapEncodeTiled: it must be 12.0 or newer");
    if (spec.ctas % V::kCluster || spec.copy_ctas % V::kCluster || spec.ctas <= spec.copy_ctas) {
      return message(
          1, "ctas=%d and copy_ctas=%d must be multiples of the cluster size %d, with at least one cluster between them",
          spec.ctas, spec.copy_ctas, V::kCluster);
    }
    if (spec.block_count > 0 && spec.copy_ctas == 0) {
      return message(1, "copy_ctas=0 must be at least %d where %d blocks are gathered", V::kCluster, spec.block_count);
    }

    if (encode(&p.a, spec.a, kType, 1, V::kTileK, V::kTileM, kSwizzled, "a", 0, message)) return 1;
    int column = 0, segment = 0, tiles_n = 0;
    for (int i = 0; i < spec.sections; ++i) {
      int const columns = V::kRowsAreK ? spec.b[i].columns : spec.b[i].rows;
      int const box_rows = V::kRowsAreK ? V::kTileK : V::kLoadColumns;
      if (encode(p.b + i, spec.b[i], kType, 1, V::kRowsAreK ? 64 : V::kTileK, box_rows, kSwizzled, "b", i, message)) {
        return 1;
      }
      p.section_column[i] = column;
      column += columns;
      tiles_n += (columns + V::kTileN - 1) / V::kTileN;
      p.section_tile_end[i] = tiles_n;
      p.section_segment_begin[i] = segment;
      while (segment < spec.segment_count && spec.segments[segment].section == i) ++segment;
      p.section_segment_begin[i + 1] = segment;
    }
    if (segment != spec.segment_count) return message(1, "segments must be sorted by section");
    for (int i = 0; i < spec.segment_count; ++i) {
      SegmentSpec const& s = spec.segments[i];
      if (encode(p.segments + i, s.target, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 1, V::kBoxColumns, 64,
                 V::kBoxColumns == 64 ? kSwizzled : CU_TENSOR_MAP_SWIZZLE_64B, "segment", i, message)) {
        return 1;
      }
      p.segment_range[i] = {s.column, s.row, s.target.columns, s.target.rows};
      p.target[i] = {reinterpret_cast<char*>(s.target.address), s.target.row_stride, s.target.batch_stride};
      // Boxes of the product start at multiples of 64 rows, and of a box's columns in their section.
      if (s.row % 64 != 0 || (s.column - p.section_column[s.section]) % V::kBoxColumns != 0) p.section_has_edges[s.section] = 1;
    }
    constexpr int kUnit = kUnitBytes / V::kElementBytes;
    for (int i = 0; i < spec.block_count; ++i) {
      BlockSpec const& b = spec.blocks[i];
      MatrixSpec local = b.source;
      local.address = spec.a.address + b.row * spec.a.row_stride + static_cast<int64_t>(b.column) * V::kElementBytes;
      local.row_stride = spec.a.row_stride;
      local.batch_stride = spec.a.batch_stride;
      if (encode(p.sources + i, b.source, CU_TENSOR_MAP_DATA_TYPE_UINT32, kUnit, kChunkColumns, kChunkRows, kPlain,
                 "block", i, message) ||
          encode(p.gathered + i, local, CU_TENSOR_MAP_DATA_TYPE_UINT32, kUnit, kChunkColumns, kChunkRows, kPlain,
                 "gathered block", i, message)) {
        return 1;
      }
      p.block_range[i] = {b.column, b.row, b.source.columns, b.source.rows};
    }
    p.own = p.a;
    p.own_begin = p.own_end = 0;
    if (spec.own_block >= 0 && spec.own_block < spec.block_count) {
      BlockSpec const& own = spec.blocks[spec.own_block];
      int const end = own.column + own.source.columns;
      // A step across its edge would need both, so such a block is read from the gathered operand alone.
      if (own.row == 0 && own.source.rows == spec.a.rows && own.column % V::kTileK == 0 &&
          (end % V::kTileK == 0 || end == spec.a.columns)) {
        if (encode(&p.own, own.source, kType, 1, V::kTileK, V::kTileM, kSwizzled, "own block", 0, message)) return 1;
        p.own_begin = own.column;
        p.own_end = end;
      }
    }
    Order& o = p.order;
    o.tiles_m = (spec.a.rows + V::kTileM - 1) / V::kTileM;
    o.tiles_n = tiles_n;
    o.batches = spec.a.batches;
    o.cluster = V::kCluster;
    o.window = std::max(1, std::min(spec.window, pairs_m(o)));
    o.copy_ctas = spec.copy_ctas;
    o.ctas = spec.ctas;
    o.main_pairs = pairs(o) - std::min(pairs(o), spec.copy_ctas > 0 ? spec.tail_pairs : 0);
    o.group_count = spec.group_count;
    o.first_group = spec.first_group;
    std::copy(spec.group_begin, spec.group_begin + kMaxGroups + 1, o.group_begin);
    o.tile_k = V::kTileK;
    o.k_tiles = (spec.a.columns + V::kTileK - 1) / V::kTileK;
    // The first step that lies in the first group as a whole; one that straddles its start comes last.
    o.first_k_tile =
        spec.block_count > 0 ? (spec.group_begin[spec.first_group] + V::kTileK - 1) / V::kTileK % o.k_tiles : 0;
    if (p.own_end > 0) {
      // Nobody waits for the copy of the own block: it comes last.
      while (o.group_begin[o.first_group] < p.own_end && o.first_group < o.group_count) ++o.first_group;
      o.first_group %= o.group_count;
    }
    p.m = spec.a.rows;
    p.sections = spec.sections;
    p.block_count = spec.block_count;
    p.b_batch_divisor = spec.b_batch_divisor;
    p.test_mode = spec.test_mode;
    p.epoch = reinterpret_cast<uint64_t const*>(spec.epoch);
    p.flags = reinterpret_cast<uint64_t*>(spec.flags);
    p.all_copied = reinterpret_cast<uint64_t*>(spec.all_copied);
    p.copied_count = reinterpret_cast<uint32_t*>(spec.copied_count);
    p.report = reinterpret_cast<Report*>(spec.report);
    p.scale_a = reinterpret_cast<float const*>(spec.scale_a);
    for (int i = 0; i < kMaxSections; ++i) p.scale_b[i] = reinterpret_cast<float const*>(spec.scale_b[i]);
    p.timeout_ns = spec.timeout_ns;
    plan.ctas = spec.ctas;

    // Product CTAs wait for copying CTAs, so all of them must be resident together.
    cudaError_t error = cudaFuncSetAttribute(
        fused_kernel<V>, cudaFuncAttributeMaxDynamicSharedMemorySize, V::kSharedBytes);
    if (error != cudaSuccess) return message(1, "this kernel does not run here: %s", cudaGetErrorString(error));
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = plan.configuration(nullptr, attributes);
    config.numAttrs = 1;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, fused_kernel<V>, &config);
    if (error != cudaSuccess) return message(1, "this kernel does not run here: %s", cudaGetErrorString(error));
    if (spec.ctas > clusters * V::kCluster) {
      return message(
          1, "ctas=%d cannot be resident together: this device takes %d clusters of %d, give ctas=%d or less", spec.ctas,
          clusters, V::kCluster, clusters * V::kCluster);
    }
    return 0;
  }

  cudaLaunchConfig_t configuration(cudaStream_t stream, cudaLaunchAttribute* attributes) const {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {V::kCluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(V::kThreads);
    config.dynamicSmemBytes = V::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    // Where nobody waits for anybody, the grid need not be resident as a whole.
    config.numAttrs = params.order.copy_ctas > 0 ? 2 : 1;
    return config;
  }

  cudaError_t run(cudaStream_t stream) const {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t const config = configuration(stream, attributes);
    return cudaLaunchKernelEx(&config, fused_kernel<V>, params);
  }
};

}  // namespace hf_cp

#define HF_CP_EXPORT_VARIANT(V)                                                                                  \
  extern "C" int hf_cp_spec_bytes() { return sizeof(hf_cp::Spec); }                                              \
  extern "C" void hf_cp_variant(int* out) {                                                                      \
    int const values[] = {V::kTileM,  V::kTileN,       V::kTileK,   V::kCluster,                                 \
                          V::kStages, V::kSharedBytes, V::kThreads, V::kElementBytes};                           \
    std::copy(values, values + 8, out);                                                                          \
  }                                                                                                              \
  extern "C" int hf_cp_create(hf_cp::Spec const* spec, void** plan, char* text, int length) {                    \
    auto* made = new hf_cp::Plan<V>();                                                                           \
    int const code = hf_cp::Plan<V>::make(*spec, *made, hf_cp::Message{text, length});                           \
    if (code != 0) {                                                                                             \
      delete made;                                                                                               \
      return code;                                                                                               \
    }                                                                                                            \
    *plan = made;                                                                                                \
    return 0;                                                                                                    \
  }                                                                                                              \
  extern "C" int hf_cp_run(void* plan, void* stream) {                                                           \
    return static_cast<hf_cp::Plan<V>*>(plan)->run(static_cast<cudaStream_t>(stream));                           \
  }                                                                                                              \
  extern "C" void hf_cp_destroy(void* plan) { delete static_cast<hf_cp::Plan<V>*>(plan); }                       \
  extern "C" char const* hf_cp_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
