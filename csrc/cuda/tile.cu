// Scales that have arrived row by row, into the 128x4 tiles that block-scaled GEMMs read. Local.
#include "chain.cuh"
#include "kernels.h"
#include "record.cuh"
#include "rows.cuh"

namespace epbuf::cuda {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kBlocksPerSm = 4;
constexpr std::int64_t kWarpsPerBlock = kThreads / kWarpSize;
constexpr std::int32_t kPartVecs = 2;  // 16-byte vectors of scales of one row that a warp tiles: a sector
constexpr std::int32_t kGroups = 4;    // rows whose words are neighbours in a tile: l, l + 32, ..
constexpr std::int32_t kGroupRows = static_cast<std::int32_t>(kTileRows) / kGroups;

// Shapes: wire [C, W] uint8, W a multiple of 16; tiles [C / 128, S / 4, 32, 4, 4] uint8, S a multiple of 4: out, below
// offs[-1]. Of 128 rows a warp makes neighbouring tiles; lane l reads the rows l, l + 32, l + 64 and l + 96, whose
// words are neighbours in a tile.
//
// Example, S = 8: the scales 4 to 7 of row 33 go to byte 532 (formats.h, blocked_scale_offset), behind those of row 1.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) tile_kernel(const __grid_constant__ TileKernel k) {
  await_previous();
  release_next();
  if (warp_stops(k.call)) return;

  const GridWarp warp;
  const std::int64_t num_vecs = k.wire_row_bytes / kVecBytes;
  const std::int64_t num_parts = (num_vecs + kPartVecs - 1) / kPartVecs;
  const std::int64_t num_items = *at<const std::int32_t>(k.num_rows) / kTileRows * num_parts;
  for (std::int64_t item = warp.index; item < num_items; item += warp.num) {
    const std::int64_t row = item / num_parts * kTileRows + warp.lane;
    const std::int64_t begin = item % num_parts * kPartVecs;
    uint4 vecs[kPartVecs][kGroups];
#pragma unroll
    for (std::int32_t v = 0; v < kPartVecs; ++v) {
#pragma unroll
      for (std::int32_t group = 0; group < kGroups; ++group) {
        const auto* from = at<const uint4>(k.wire, (row + kGroupRows * group) * k.wire_row_bytes) + begin + v;
        if (begin + v < num_vecs) vecs[v][group] = load_vec(from);
      }
    }
#pragma unroll
    for (std::int32_t v = 0; v < kPartVecs; ++v) {
      const uint4(&rows)[kGroups] = vecs[v];
      const uint4 tiles[4] = {{rows[0].x, rows[1].x, rows[2].x, rows[3].x},
                              {rows[0].y, rows[1].y, rows[2].y, rows[3].y},
                              {rows[0].z, rows[1].z, rows[2].z, rows[3].z},
                              {rows[0].w, rows[1].w, rows[2].w, rows[3].w}};
#pragma unroll
      for (std::int32_t i = 0; i < 4; ++i) {
        const std::int64_t scale = (begin + v) * kVecBytes + i * kTileScales;
        if (scale >= k.scale_row_bytes) continue;
        store_vec(at<uint4>(k.tiles, blocked_scale_offset(row, scale, k.scale_row_bytes)), tiles[i]);
      }
    }
  }
}

}  // namespace

void launch_tile(const TileKernel& kernel, std::int64_t max_rows, const Target& target) {
  const std::int64_t num_parts = (kernel.wire_row_bytes / kVecBytes + kPartVecs - 1) / kPartVecs;
  const std::int64_t num_warps = max_rows / kTileRows * num_parts;
  const std::uint32_t num_blocks = target.fit((num_warps + kWarpsPerBlock - 1) / kWarpsPerBlock, kBlocksPerSm);
  launch("tile_kernel", tile_kernel, {num_blocks, kThreads}, kernel, target.stream);
}

void load_tile() { load("tile_kernel", tile_kernel); }

}  // namespace epbuf::cuda
