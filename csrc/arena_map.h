// Where everything of an arena lies, and what a call may ask of it: the same for both engines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "layout.h"

namespace epbuf {

inline bool is_quantised(const RowFormat& format) { return format.format != kSame && format.format != kRaw; }

// Where pushed rows land in every window; -1 where nothing of the kind travels. `tiles`: where scales that came row by
// row are tiled once all have arrived; -1: they stay as they are. `wire_rows`: where rows for several slots of a rank
// land; -1: every row goes to its slot.
struct PushTarget {
  const RowFormat& format;
  const WireFormat& wire;
  std::int64_t rows, scales, row_scales, weights, tiles, wire_rows;
};

class ArenaMap {
 public:
  // Throws NativeError when sizes contradict each other.
  ArenaMap(const Geometry& geometry, const ArenaOffsets& arena, std::vector<FrameOffsets> frames,
           std::vector<ForwardOffsets> forwards, std::vector<BackwardOffsets> backwards, std::size_t num_windows);

  const Geometry& geometry() const { return geometry_; }
  const ArenaOffsets& arena() const { return arena_; }
  std::size_t num_frames() const { return frames_.size(); }
  std::size_t num_forwards() const { return forwards_.size(); }

  const FrameOffsets& frame(std::int32_t index) const;
  const ForwardOffsets& forward(std::int32_t index) const;
  const BackwardOffsets& backward(std::int32_t index) const;

  std::int64_t row_bytes(const RowFormat& format) const;                  // data of one row
  PushTarget received(std::int32_t frame, std::int32_t workspace) const;  // where a dispatch puts rows, without weights
  PushTarget forward_target(const DispatchCall& call) const;
  PushTarget backward_target(const DispatchCall& call) const;

  // Whether peers read slot_map: every row of it says where a token goes, or that there is none.
  bool shares_slots() const { return geometry_.dedups != 0 || geometry_.adds_by_rank != 0; }

  // Whether rows of some layer come back from a stash, which waits for ACK: every combine publishes it then.
  bool restores_rows() const { return geometry_.stash.num_pages != 0; }

  // All throw NativeError.
  void check_num_tokens(std::int32_t num_tokens) const;
  void check_rows(const DispatchCall& call, const RowFormat& format) const;
  void check_sources(const CombineCall& call) const;
  void check_stash(const StashCall& call) const;

 private:
  Geometry geometry_;
  ArenaOffsets arena_;
  std::vector<FrameOffsets> frames_;
  std::vector<ForwardOffsets> forwards_;
  std::vector<BackwardOffsets> backwards_;
};

}  // namespace epbuf
