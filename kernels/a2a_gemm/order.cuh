// Which copies and tiles are whose, and in which order: pure arithmetic, for the device, the host and the tests.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HF_CP_ANYWHERE __host__ __device__ __forceinline__
#else
#define HF_CP_ANYWHERE inline
#endif

namespace hf_cp {

// One lane of a warp reads one group's flag, and the last lane the flag that says that all have been copied.
constexpr int kMaxGroups = 31;

struct Order {
  // Row tiles, column tiles and batches of the product; `cluster` CTAs take neighbouring row tiles of a column tile.
  int32_t tiles_m, tiles_n, batches, cluster;
  // Row tiles, in clusters, that are copied and multiplied together.
  int32_t window;
  // CTAs that copy first, and all CTAs. Copying ones share the last tiles, from cluster tile `main_pairs` on.
  int32_t copy_ctas, ctas, main_pairs;
  // Column groups that the copies publish: first columns and, last, the number of columns.
  int32_t group_count, first_group;
  int32_t group_begin[kMaxGroups + 1];
  // Steps of `tile_k` columns, and the one that the products start with.
  int32_t k_tiles, first_k_tile, tile_k;
};

// Columns of the second operand that one load brings, of the `share` of a tile's that a CTA loads. With K as rows a box
// is as wide as the swizzle; otherwise columns are a box's rows, of which the copy engine takes 256 at most.
HF_CP_ANYWHERE constexpr int columns_of_a_load(int share, bool rows_are_k) {
  if (rows_are_k) return 64;
  return share > 256 ? share / 2 : share;
}

HF_CP_ANYWHERE int least(int a, int b) { return a < b ? a : b; }

HF_CP_ANYWHERE int pairs_m(Order const& o) { return (o.tiles_m + o.cluster - 1) / o.cluster; }

HF_CP_ANYWHERE int pairs(Order const& o) { return pairs_m(o) * o.tiles_n * o.batches; }

struct Item {
  int32_t batch, row_tile, group;
};

// Copy `index` of all: [batch][window][group, from first_group on][row tile of the window]. CTA c of the copying ones
// takes c, c + copy_ctas, ....
HF_CP_ANYWHERE bool item_at(Order const& o, int index, Item& item) {
  int const per_batch = o.tiles_m * o.group_count, window_tiles = o.window * o.cluster;
  item.batch = index / per_batch;
  if (item.batch >= o.batches) return false;
  int const rest = index - item.batch * per_batch;
  int const window = rest / (window_tiles * o.group_count);
  int const in_window = least(window_tiles, o.tiles_m - window * window_tiles);
  int const offset = rest - window * window_tiles * o.group_count;
  item.group = (o.first_group + offset / in_window) % o.group_count;
  item.row_tile = window * window_tiles + offset % in_window;
  return true;
}

// Flags are [batch][row tile][group].
HF_CP_ANYWHERE int64_t flag_index(Order const& o, int batch, int row_tile) {
  return (static_cast<int64_t>(batch) * o.tiles_m + row_tile) * o.group_count;
}

struct Tile {
  int32_t batch, row_tile, column_tile;
};

// Cluster tile `pair` of all: windows of rows and, in a window, column tile after column tile, so that a wave of CTAs
// covers a block of the product about as high as wide, and rows are needed in the order in which they are copied.
HF_CP_ANYWHERE Tile tile_at(Order const& o, int pair, int rank_in_cluster) {
  int const rows = pairs_m(o), per_batch = rows * o.tiles_n;
  int const batch = pair / per_batch;
  int const rest = pair - batch * per_batch;
  int const window = rest / (o.window * o.tiles_n);
  int const in_window = least(o.window, rows - window * o.window);
  int const offset = rest - window * o.window * o.tiles_n;
  int const row_pair = window * o.window + offset % in_window;
  return {batch, row_pair * o.cluster + rank_in_cluster, offset / in_window};
}

// The cluster tiles of one CTA.
struct Walk {
  int32_t first, stride, end;
};

HF_CP_ANYWHERE Walk walk_of(Order const& o, int cta) {
  int const cluster = cta / o.cluster, copy_clusters = o.copy_ctas / o.cluster;
  if (cluster < copy_clusters) return {o.main_pairs + cluster, copy_clusters, pairs(o)};
  return {cluster - copy_clusters, o.ctas / o.cluster - copy_clusters, o.main_pairs};
}

// The K steps of a tile, from first_k_tile on and around, and the groups that each needs beside those of the ones before.
struct Steps {
  int32_t k_tile, group, covered;
};

HF_CP_ANYWHERE void enter(Order const& o, int k_tile, Steps& steps) {
  steps.k_tile = k_tile;
  steps.group = 0;
  while (steps.group + 1 < o.group_count && o.group_begin[steps.group + 1] <= k_tile * o.tile_k) ++steps.group;
  steps.covered = o.group_begin[steps.group];
}

HF_CP_ANYWHERE Steps first_step(Order const& o) {
  Steps steps;
  enter(o, o.first_k_tile, steps);
  return steps;
}

// The next group that the current step needs and that no earlier step of this stretch did, or -1.
HF_CP_ANYWHERE int next_group(Order const& o, Steps& steps) {
  if (steps.group >= o.group_count || steps.covered >= (steps.k_tile + 1) * o.tile_k) return -1;
  steps.covered = o.group_begin[steps.group + 1];
  return steps.group++;
}

HF_CP_ANYWHERE void next_step(Order const& o, Steps& steps) {
  if (++steps.k_tile == o.k_tiles) enter(o, 0, steps);
}

}  // namespace hf_cp
