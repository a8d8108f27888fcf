// The kernels, one launch_ function each: it owns grid, block and shared memory. All are asynchronous.
#pragma once

#include <cstdint>

#include "../layout.h"
#include "launch.h"

namespace epbuf::cuda {

void launch_route_count(const RouteCountKernel& kernel, const Target& target);
void launch_route_exchange(const RouteExchangeKernel& kernel, const Target& target);
void launch_route_slots(const RouteSlotsKernel& kernel, const Target& target);

// All of route in one launch, where shared memory holds the ids.
bool fits_fused_route(const RouteExchangeKernel& kernel, const Target& target);
void launch_route_fused(const RouteExchangeKernel& kernel, const Target& target);

// Instead of route, where other kernels move rows.
void launch_count_ids(const CountIdsKernel& kernel, const Target& target);
void launch_summarise(const SummariseKernel& kernel, const Target& target);

void launch_signal(const SignalKernel& kernel, const Target& target);
void launch_abort(const AbortKernel& kernel, const Target& target);
void launch_push(const PushKernel& kernel, std::int64_t max_padding_rows, const Target& target);
void launch_encode(const PushKernel& kernel, TokenDtype dtype, std::int64_t max_padding_rows, const Target& target);
void launch_tile(const TileKernel& kernel, std::int64_t max_rows, const Target& target);
void launch_expand(const WireKernel& kernel, const Target& target);
void launch_decode(const DecodeKernel& kernel, TokenDtype dtype, const Target& target);
void launch_stage(const StageKernel& kernel, TokenDtype dtype, std::int64_t max_rows, const Target& target);
void launch_pull(const PullKernel& kernel, TokenDtype dtype, const Target& target);
void launch_add(const WireKernel& kernel, TokenDtype dtype, const Target& target);
void launch_pull_by_rank(const PullKernel& kernel, TokenDtype dtype, const Target& target);
void launch_weight_grad(const WeightGradKernel& kernel, TokenDtype dtype, std::int64_t max_rows, const Target& target);
void launch_pages(const PagesKernel& kernel, const Target& target);
void launch_stash(const StashKernel& kernel, std::int64_t max_rows, const Target& target);

// Bytes of shared memory that a block needs.
std::size_t exchange_shared_bytes(std::int64_t num_experts, std::int64_t num_ranks);
std::size_t counts_shared_bytes(std::int64_t num_experts);
std::size_t slots_shared_bytes(std::int64_t num_experts, std::int64_t chunk_tokens, std::int64_t num_topk);

// Loads every variant of the family.
void load_route();
void load_route_exchange();
void load_route_fused();
void load_counts();
void load_signal();
void load_dispatch();
void load_encode();
void load_expand();
void load_tile();
void load_combine();
void load_by_rank();
void load_weight();
void load_stash();

}  // namespace epbuf::cuda
