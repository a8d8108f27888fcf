// Slots of one token, held by a warp, and which of them share a rank: what rows by wire are decided on (csrc/wire.h).
#pragma once

#include "../wire.h"
#include "rows.cuh"
#include "slot.cuh"
#include "sync.cuh"

namespace epbuf::cuda {

// What belongs to k is held by lane k % 32: as `low` below 32, else as `high`. Bit k: whether it is so for k.
__device__ __forceinline__ std::uint64_t ballot_topk(bool low, bool high) {
  return static_cast<std::uint64_t>(__ballot_sync(kAllLanes, high)) << kWarpSize | __ballot_sync(kAllLanes, low);
}

// What is held for k; the whole warp asks for the same one.
template <typename Held>
__device__ __forceinline__ Held held_for(std::int32_t k, Held low, Held high) {
  return __shfl_sync(kAllLanes, k < static_cast<std::int32_t>(kWarpSize) ? low : high, k % kWarpSize);
}

// kNoSlot beyond num_topk.
struct Slots {
  std::int64_t low = kNoSlot, high = kNoSlot;

  __device__ __forceinline__ static Slots load(const std::int64_t* of_token, std::int32_t num_topk,
                                               std::uint32_t lane) {
    Slots slots;
    if (static_cast<std::int32_t>(lane) < num_topk) slots.low = of_token[lane];
    if (static_cast<std::int32_t>(lane + kWarpSize) < num_topk) slots.high = of_token[lane + kWarpSize];
    return slots;
  }

  __device__ __forceinline__ std::int64_t at(std::int32_t k) const { return held_for(k, low, high); }

  // Bit k: slot k is on `rank`.
  __device__ __forceinline__ std::uint64_t on(std::int32_t rank) const {
    return ballot_topk(rank_of(low) == rank, rank_of(high) == rank);
  }
};

// How many slots are on the rank of one slot, and how many of these have a lower k.
struct Company {
  std::int32_t num = 0, before = 0;

  __device__ __forceinline__ void meet(bool is_same_rank, bool is_lower) {
    num += is_same_rank ? 1 : 0;
    before += is_same_rank && is_lower ? 1 : 0;
  }
};

struct Companies {
  Company low, high;

  __device__ __forceinline__ Companies(const Slots& slots, std::int32_t num_topk, std::uint32_t lane) {
    for (std::int32_t k = 0; k < num_topk; ++k) {
      const std::int32_t rank = rank_of(slots.at(k));
      low.meet(rank == rank_of(slots.low), k < static_cast<std::int32_t>(lane));
      high.meet(rank == rank_of(slots.high), k < static_cast<std::int32_t>(lane + kWarpSize));
    }
  }
};

// Where token `token` of rank `token_rank` lies in a region of rows by wire, from the start of the region.
__device__ __forceinline__ std::int64_t wire_offset(std::int32_t token_rank, std::int64_t token,
                                                    std::int32_t max_tokens, std::int64_t row_bytes) {
  return (static_cast<std::int64_t>(token_rank) * max_tokens + token) * row_bytes;
}

// Tokens of the peers, numbered: token t of the s-th other rank is s * max_tokens + t, and each is num_splits items.
struct PeerToken {
  std::int32_t rank;
  std::int64_t token;

  __device__ __forceinline__ PeerToken(const WireKernel& k, std::uint32_t item) {
    const std::uint32_t number = item / static_cast<std::uint32_t>(k.num_splits);
    const std::int32_t other = static_cast<std::int32_t>(number / static_cast<std::uint32_t>(k.max_tokens));
    rank = other + (other >= k.call.rank ? 1 : 0);
    token = number % static_cast<std::uint32_t>(k.max_tokens);
  }
};

__device__ __forceinline__ std::uint32_t num_peer_items(const WireKernel& k) {
  return static_cast<std::uint32_t>(k.call.num_ranks - 1) * static_cast<std::uint32_t>(k.max_tokens) *
         static_cast<std::uint32_t>(k.num_splits);
}

// Rows of this rank that the slots of a token are; -1: none.
struct RowsHere {
  std::int32_t low = -1, high = -1;

  // Bit k: slot k is here.
  __device__ __forceinline__ std::uint64_t mask() const { return ballot_topk(low >= 0, high >= 0); }
  __device__ __forceinline__ std::int64_t at(std::int32_t k) const { return held_for(k, low, high); }
};

// None beyond the last item. Asked for one item ahead: slots of a peer come from its memory.
__device__ __forceinline__ RowsHere rows_of_item(const WireKernel& k, std::uint32_t item, std::uint32_t lane) {
  if (item >= num_peer_items(k)) return {};
  const PeerToken from(k, item);
  const std::uint64_t window = at<const std::uint64_t>(k.call.peers)[from.rank];
  const Slots slots =
      Slots::load(at<const std::int64_t>(window, k.slot_map) + from.token * k.num_topk, k.num_topk, lane);
  return {rank_of(slots.low) == k.call.rank ? static_cast<std::int32_t>(slots.low) : -1,
          rank_of(slots.high) == k.call.rank ? static_cast<std::int32_t>(slots.high) : -1};
}

}  // namespace epbuf::cuda
