// The ops as chains of kernels. Kernels that move rows never wait; those between them do: one warp, or one block of
// route.
#include <cstddef>

#include "context.h"

namespace epbuf::cuda {
namespace {

// The steps that belong to the wanted phases.
std::uint32_t steps_of(Phases phases, std::uint32_t first, std::uint32_t second, std::uint32_t third = 0) {
  return ((phases & 1) ? first : 0) | ((phases & 2) ? second : 0) | ((phases & 4) ? third : 0);
}

void launch_steps(const CudaContext& context, SignalKernel k, std::uint32_t steps, std::uint64_t stream) {
  if (steps == 0) return;
  k.steps = steps;
  launch_signal(k, context.target(stream));
}

// A route or dispatch; those that repeat come after combine backward, and after a refusal there.
template <typename Call>
KernelCall forward_call(const CudaContext& context, Op op, const Call& call) {
  constexpr std::uint32_t kAfterCombineBackward = 4;
  KernelCall k = context.kernel_call(op, call);
  if (call.repeats != 0) k.order += kAfterCombineBackward;
  return k;
}

PagesKernel pages_kernel(const CudaContext& context, const KernelCall& kernel_call, bool takes) {
  const Geometry& g = context.geometry();
  PagesKernel k{};
  k.call = kernel_call;
  k.counters = context.own(context.arena().stash_counters);
  k.free_pages = context.own(context.arena().stash_free);
  k.table = context.own(context.frame(kernel_call.frame).stash_table);
  k.num_rows = context.last_offs(kernel_call.frame);
  k.num_pages = g.stash.num_pages;
  k.page_rows = g.stash.page_rows;
  k.takes = takes ? 1 : 0;
  return k;
}

StashKernel stash_kernel(const CudaContext& context, const KernelCall& kernel_call, bool restores) {
  const Geometry& g = context.geometry();
  const PushTarget rows = context.received(kernel_call.frame, kernel_call.workspace);
  StashKernel k{};
  k.call = kernel_call;
  k.pages = context.own(context.arena().stash_pages);
  k.table = context.own(context.frame(kernel_call.frame).stash_table);
  k.num_rows = context.last_offs(kernel_call.frame);
  k.page_bytes = g.stash.page_bytes;
  k.page_rows = g.stash.page_rows;
  k.restores = restores ? 1 : 0;
  k.parts[0] = {context.own(rows.rows), 0, context.row_bytes(rows.format)};
  if (rows.scales >= 0) k.parts[1] = {context.own(rows.scales), g.stash.scales_offset, rows.format.scale_row_bytes};
  if (rows.row_scales >= 0) k.parts[2] = {context.own(rows.row_scales), g.stash.row_scales_offset, sizeof(float)};
  return k;
}

KernelIds ids_of(const CudaContext& context, const RouteCall& call) {
  KernelIds ids{};
  ids.num_topk = context.geometry().num_topk;
  if (call.refusal != kRefusalNone) return ids;
  ids.topk_idx = call.topk_idx;
  ids.live_tokens = call.live_tokens;
  ids.row_stride = call.topk_idx_row_stride;
  ids.topk_idx_bytes = call.topk_idx_bytes;
  ids.live_tokens_bytes = call.live_tokens_bytes;
  ids.num_tokens = call.num_tokens;
  return ids;
}

RouteCountKernel count_kernel(const CudaContext& context, const RouteCall& call) {
  RouteCountKernel k{};
  k.call = forward_call(context, kOpRoute, call);
  k.ids = ids_of(context, call);
  k.route_scratch = context.own(context.forward(call.workspace).route_scratch);
  k.bad_ids = context.words().bad_ids(call.workspace);
  k.num_experts = context.geometry().num_experts;
  k.chunk_tokens = static_cast<std::int32_t>(context.geometry().route_chunk_tokens);
  return k;
}

RouteSlotsKernel slots_kernel(const CudaContext& context, const RouteCall& call) {
  RouteSlotsKernel k{};
  k.call = forward_call(context, kOpRoute, call);
  k.ids = ids_of(context, call);
  k.route_scratch = context.own(context.forward(call.workspace).route_scratch);
  k.route_base = context.own(context.forward(call.workspace).route_base);
  k.slot_map = context.own(context.frame(call.frame).slot_map);
  k.capacity_rows = context.geometry().capacity_rows;
  k.num_experts = context.geometry().num_experts;
  k.num_local_experts = context.geometry().num_local_experts;
  k.chunk_tokens = static_cast<std::int32_t>(context.geometry().route_chunk_tokens);
  return k;
}

// A refusing rank that holds no workspace writes to none.
void add_workspace(const CudaContext& context, std::int32_t workspace, RouteExchangeKernel* k) {
  if (workspace < 0) return;
  const ForwardOffsets& forward = context.forward(workspace);
  k->route_scratch = context.own(forward.route_scratch);
  k->route_base = context.own(forward.route_base);
  k->bad_ids = context.words().bad_ids(workspace);
}

// Where a frame's zones, demand and overflow are written, and what they follow from beside the counts.
template <typename Kernel>
void add_zones(const CudaContext& context, std::int32_t index, Kernel* k) {
  const Geometry& g = context.geometry();
  const FrameOffsets& frame = context.frame(index);
  k->frame_counters = context.frame_counters(index);
  k->offs = context.own(frame.offs);
  k->counts = context.own(frame.counts);
  k->overflow = context.own(frame.overflow);
  k->slot_map = context.own(frame.slot_map);
  k->capacity_rows = g.capacity_rows;
  k->num_experts = g.num_experts;
  k->num_local_experts = g.num_local_experts;
  k->expert_alignment = g.expert_alignment;
}

RouteExchangeKernel exchange_kernel(const CudaContext& context, const RouteCall& call) {
  const FrameOffsets& frame = context.frame(call.frame);
  RouteExchangeKernel k{};
  k.call = forward_call(context, kOpRoute, call);
  k.ids = ids_of(context, call);
  add_workspace(context, call.workspace, &k);
  add_zones(context, call.frame, &k);
  k.count_cells = frame.count_cells;
  k.arrived_cells = frame.arrived_cells;
  k.chunk_tokens = static_cast<std::int32_t>(context.geometry().route_chunk_tokens);
  k.repeats = call.repeats;
  return k;
}

SignalKernel signal(const CudaContext& context, const KernelCall& call, Phase phase, std::int64_t cells) {
  SignalKernel k{};
  k.call = call;
  k.phase = phase;
  k.cells = cells;
  k.frame_counters = context.frame_counters(call.frame);
  return k;
}

// ACK and the ARRIVED of gradients: a refusal was said before.
SignalKernel unrefusing(SignalKernel k, Phase phase, std::int64_t cells) {
  k.call.refusal = kRefusalNone;
  k.phase = phase;
  k.cells = cells;
  return k;
}

void add_stash(const CudaContext& context, const FrameOffsets& frame, SignalKernel* k) {
  k->stash_table = context.own(frame.stash_table);
  k->overflow = context.own(frame.overflow);
}

SignalKernel backward_signal(const CudaContext& context, const KernelCall& call, Phase phase, std::int64_t cells) {
  SignalKernel k = signal(context, call, phase, cells);
  k.epoch = context.backward_use(call.workspace);
  k.ack_use = context.backward_last_ready(call.workspace);
  k.ack_phase = kPhaseGradAck;
  k.ack_cells = context.backward(call.workspace).grad_ack_cells;
  return k;
}

void push(const CudaContext& context, const KernelCall& kernel_call, const DispatchCall& call,
          const PushTarget& target) {
  const Geometry& g = context.geometry();
  const FrameOffsets& frame = context.frame(call.frame);
  PushKernel k{};
  k.call = kernel_call;
  k.rows = call.rows;
  k.row_stride_bytes = call.row_stride_bytes;
  k.weights = call.topk_weights;
  k.weights_row_stride = call.topk_weights_row_stride;
  k.slot_map = context.own(frame.slot_map);
  k.offs = context.own(frame.offs);
  k.valid = context.own(frame.counts) + sizeof(std::int64_t) * static_cast<std::uint64_t>(g.num_local_experts);
  k.rows_region = target.rows;
  k.weights_region = target.weights;
  k.row_bytes = context.row_bytes(target.format);
  k.num_tokens = call.num_tokens;
  k.num_topk = g.num_topk;
  k.num_local_experts = g.num_local_experts;
  k.hidden = g.hidden;
  k.format = target.format;
  k.scales = call.scales;
  k.row_scales = call.row_scales;
  k.scales_row_stride_bytes = call.scales_row_stride_bytes;
  k.scales_region = target.scales;
  k.row_scales_region = target.row_scales;
  k.wire_region = target.wire_rows;
  k.wire = target.wire;
  k.max_tokens = g.max_tokens_per_rank;
  k.shares_slots = context.shares_slots() ? 1 : 0;
  if (is_quantised(target.format) && call.scales == 0) {
    return launch_encode(k, context.dtype(), context.max_padding_rows(), context.target(call.stream));
  }
  launch_push(k, context.max_padding_rows(), context.target(call.stream));
}

WireKernel wire_kernel(const CudaContext& context, const KernelCall& kernel_call, std::int64_t wire_rows,
                       const WireFormat& format) {
  WireKernel k{};
  k.call = kernel_call;
  k.slot_map = context.frame(kernel_call.frame).slot_map;
  k.wire = context.own(wire_rows);
  k.wire_format = format;
  k.max_tokens = context.geometry().max_tokens_per_rank;
  k.num_topk = context.geometry().num_topk;
  return k;
}

// Rows that have arrived once go to their slots.
void expand(const CudaContext& context, const KernelCall& kernel_call, const DispatchCall& call,
            const PushTarget& target) {
  if (target.wire_rows < 0) return;
  WireKernel k = wire_kernel(context, kernel_call, target.wire_rows, target.wire);
  k.rows = context.own(target.rows);
  k.row_bytes = context.row_bytes(target.format);
  if (target.scales >= 0) {
    k.scales = context.own(target.scales);
    k.scale_bytes = target.format.wire_row_bytes;
  }
  launch_expand(k, context.target(call.stream));
}

// Scales that have arrived row by row become tiles.
void tile(const CudaContext& context, const KernelCall& kernel_call, const DispatchCall& call,
          const PushTarget& target) {
  if (target.tiles < 0) return;
  TileKernel k{};
  k.call = kernel_call;
  k.wire = context.own(target.scales);
  k.tiles = context.own(target.tiles);
  k.num_rows = context.last_offs(call.frame);
  k.wire_row_bytes = target.format.wire_row_bytes;
  k.scale_row_bytes = target.format.scale_row_bytes;
  launch_tile(k, context.geometry().capacity_rows, context.target(call.stream));
}

// What is left to do here once all ranks' rows have arrived.
void put_in_place(const CudaContext& context, const KernelCall& kernel_call, const DispatchCall& call,
                  const PushTarget& target) {
  expand(context, kernel_call, call, target);
  tile(context, kernel_call, call, target);
}

// `staged_weights` 0: the weights of the call are factors of its rows.
void stage(const CudaContext& context, const KernelCall& kernel_call, const CombineCall& call,
           std::uint64_t staged_rows, std::uint64_t staged_weights) {
  const bool has_weights = staged_weights != 0 && call.weights_source != kSourceWindow;
  if (call.refusal != kRefusalNone || (call.rows_source == kSourceWindow && !has_weights)) return;
  StageKernel k{};
  k.call = kernel_call;
  k.rows = call.rows;
  k.row_stride_bytes = call.row_stride_bytes;
  if (staged_weights == 0 && call.weights_source == kSourceTensor) k.factors = call.weights;
  k.weights = call.weights;
  k.staged_rows = staged_rows;
  k.staged_weights = staged_weights;
  k.num_rows = context.last_offs(call.frame);
  k.row_bytes = context.geometry().token_row_bytes;
  k.rows_source = call.rows_source;
  k.weights_source = call.weights_source;
  launch_stage(k, context.dtype(), context.geometry().capacity_rows, context.target(call.stream));
}

// Where the rows of a combine, or of a dispatch backward, lie in every window; -1: no weights travel, no sums.
struct PulledRows {
  std::int64_t rows, weights, wire_rows;
  const WireFormat& wire;
};

// The sums of own rows for the peers.
void add(const CudaContext& context, const KernelCall& kernel_call, const CombineCall& call, const PulledRows& from) {
  if (context.geometry().adds_by_rank == 0 || call.refusal != kRefusalNone) return;
  WireKernel k = wire_kernel(context, kernel_call, from.wire_rows, from.wire);
  k.rows = context.own(from.rows);
  k.row_bytes = context.geometry().token_row_bytes;
  launch_add(k, context.dtype(), context.target(call.stream));
}

void pull(const CudaContext& context, const KernelCall& kernel_call, const CombineCall& call, const PulledRows& from) {
  if (call.refusal != kRefusalNone || (call.out == 0 && call.out_weights == 0)) return;
  PullKernel k{};
  k.call = kernel_call;
  k.slot_map = context.own(context.frame(call.frame).slot_map);
  k.out = call.out;
  k.out_row_stride_bytes = call.out_row_stride_bytes;
  if (from.weights >= 0) k.out_weights = call.out_weights;
  k.rows_region = from.rows;
  k.weights_region = from.weights;
  k.row_bytes = context.geometry().token_row_bytes;
  k.num_tokens = call.num_tokens;
  k.num_topk = context.geometry().num_topk;
  if (context.geometry().adds_by_rank == 0) return launch_pull(k, context.dtype(), context.target(call.stream));
  k.max_tokens = context.geometry().max_tokens_per_rank;
  k.wire_region = from.wire_rows;
  k.wire_row_bytes = from.wire.row_bytes;
  launch_pull_by_rank(k, context.dtype(), context.target(call.stream));
}

}  // namespace

// Phases: publish COUNT; await it, lay the zones and slots; when refused, await ARRIVED.
void issue_route(const CudaContext& context, const RouteCall& call, Phases phases) {
  const bool refuses = call.refusal != kRefusalNone;
  EPBUF_CHECK(refuses || call.workspace >= 0, "route without a workspace and without a refusal");
  if (!refuses) context.check_num_tokens(call.num_tokens);
  const Target target = context.target(call.stream);
  RouteExchangeKernel exchange = exchange_kernel(context, call);
  exchange.steps = steps_of(phases, kRoutePublish, kRouteAwait, kRouteAwaitRefused);
  const bool is_small = fits_fused_route(exchange, target);
  if (phases == kAllPhases && !refuses && is_small) return launch_route_fused(exchange, target);
  if ((phases & 1) && !refuses) launch_route_count(count_kernel(context, call), target);
  launch_route_exchange(exchange, target);
  if ((phases & 2) && !refuses) launch_route_slots(slots_kernel(context, call), target);
}

void issue_count_ids(const CudaContext& context, const RouteCall& call, std::uint64_t sent_ids,
                     std::uint64_t count_row) {
  context.check_num_tokens(call.refusal == kRefusalNone ? call.num_tokens : 0);
  CountIdsKernel k{};
  k.call = context.kernel_call(kOpRoute, call);
  k.ids = ids_of(context, call);
  k.sent_ids = sent_ids;
  k.count_row = count_row;
  k.num_experts = context.geometry().num_experts;
  launch_count_ids(k, context.target(call.stream));
}

void issue_summarise(const CudaContext& context, const SummariseCall& call) {
  context.check_num_tokens(call.num_tokens);
  SummariseKernel k{};
  k.call = context.kernel_call(kOpRoute, call.frame, -1);
  k.call.mirror = call.mirror;
  add_zones(context, call.frame, &k);
  k.count_rows = call.count_rows;
  k.sent_ids = call.sent_ids;
  k.num_slots = call.num_tokens * context.geometry().num_topk;
  launch_summarise(k, context.target(call.stream));
}

// Phases: push, publish ARRIVED; await it, expand rows that came once, tile scales. ARRIVED carries the refusal of a
// rank that found its rows unusable only now, or that it has too few pages of the stash.
void issue_dispatch(const CudaContext& context, const DispatchCall& call, Phases phases) {
  context.check_rows(call, context.geometry().recv);
  const FrameOffsets& frame = context.frame(call.frame);
  const KernelCall kernel_call = forward_call(context, kOpDispatch, call);
  SignalKernel arrived = signal(context, kernel_call, kPhaseArrived, frame.arrived_cells);
  arrived.epoch = arrived.frame_counters + offsetof(FrameCounters, round);
  const bool moves = call.refusal == kRefusalNone, stashes = frame.stash_table >= 0;
  if (stashes) add_stash(context, frame, &arrived);
  if ((phases & 1) && moves && stashes) {
    launch_pages(pages_kernel(context, kernel_call, true), context.target(call.stream));
  }
  if ((phases & 1) && moves) push(context, kernel_call, call, context.forward_target(call));
  const std::uint32_t set_open = call.repeats != 0 ? 0 : kSignalSetOpen;
  launch_steps(context, arrived,
               steps_of(phases, kSignalBegin | kSignalPublish, kSignalAwait | kSignalJudge | set_open), call.stream);
  if ((phases & 2) && moves) put_in_place(context, kernel_call, call, context.forward_target(call));
}

// Phases: stage, add for the peers, publish READY; await it, pull, or when refused publish ACK; when refused, await
// ACK. In a plan with a stash ACK is always published, behind the pull: rows may come back before the next COUNT says
// that it is over.
void issue_combine(const CudaContext& context, const CombineCall& call, Phases phases) {
  context.check_sources(call);
  const ForwardOffsets& forward = context.forward(call.workspace);
  const KernelCall kernel_call = context.kernel_call(kOpCombine, call);
  SignalKernel ready = signal(context, kernel_call, kPhaseReady, forward.ready_cells);
  ready.epoch = context.forward_use(call.workspace);
  ready.ack_phase = kPhaseAck;
  ready.ack_cells = forward.ack_cells;
  const PulledRows from{forward.expert_out, -1, forward.wire_rows, context.geometry().wire};
  const bool says_ack = context.restores_rows();
  const std::uint32_t publish_refused = says_ack ? 0 : kSignalPublishRefused;
  const std::uint32_t await_refused = says_ack ? 0 : kSignalAwaitRefused;
  if (phases & 1) stage(context, kernel_call, call, context.own(forward.expert_out), 0);
  if (phases & 1) add(context, kernel_call, call, from);
  launch_steps(context, ready,
               steps_of(phases, kSignalBegin | kSignalAdvance | kSignalPublish,
                        kSignalAwait | kSignalJudge | publish_refused, await_refused),
               call.stream);
  if (phases & 2) pull(context, kernel_call, call, from);
  if (!says_ack) return;
  SignalKernel ack = unrefusing(ready, kPhaseAck, forward.ack_cells);
  launch_steps(context, ack, steps_of(phases, 0, kSignalPublish, kSignalAwaitRefused), call.stream);
}

// Phases: await ACK, publish GO; await it, push, publish ARRIVED; await it, expand, tile.
void issue_combine_backward(const CudaContext& context, const DispatchCall& call, Phases phases) {
  context.check_rows(call, context.geometry().grad);
  const BackwardOffsets& backward = context.backward(call.workspace);
  const KernelCall kernel_call = context.kernel_call(kOpCombineBackward, call);
  const SignalKernel go = backward_signal(context, kernel_call, kPhaseGo, backward.go_cells);
  const std::uint32_t note_open = call.expects_open != 0 ? kSignalExpectOpen : 0;
  launch_steps(context, go,
               steps_of(phases, kSignalBegin | kSignalAwaitAck | kSignalAdvance | kSignalPublish,
                        kSignalAwait | kSignalJudge | note_open),
               call.stream);
  const bool moves = call.refusal == kRefusalNone;
  if ((phases & 2) && moves) push(context, kernel_call, call, context.backward_target(call));
  launch_steps(context, unrefusing(go, kPhaseGradArrived, backward.grad_arrived_cells),
               steps_of(phases, 0, kSignalPublish, kSignalAwait), call.stream);
  if ((phases & 4) && moves) put_in_place(context, kernel_call, call, context.backward_target(call));
}

// Phases: begin the use if no combine backward did, stage, add for the peers, publish READY; await it, pull, publish
// ACK; when refused, await ACK.
void issue_dispatch_backward(const CudaContext& context, const CombineCall& call, Phases phases) {
  context.check_sources(call);
  const BackwardOffsets& backward = context.backward(call.workspace);
  const KernelCall kernel_call = context.kernel_call(kOpDispatchBackward, call);
  const SignalKernel ready = backward_signal(context, kernel_call, kPhaseGradReady, backward.grad_ready_cells);
  const PulledRows from{backward.grad_recv_tokens, backward.grad_recv_topk_weights, backward.grad_wire_rows,
                        context.geometry().grad_wire};
  const std::uint32_t begin = call.begins_use != 0 ? 0 : kSignalBegin;
  const std::uint32_t clear_open = call.clears_open != 0 ? kSignalClearOpen : 0;
  if ((phases & 1) && call.begins_use != 0) {
    launch_steps(context, ready, kSignalBegin | kSignalAwaitAck | kSignalAdvance, call.stream);
  }
  if (phases & 1) {
    stage(context, kernel_call, call, context.own(backward.grad_recv_tokens),
          context.own(backward.grad_recv_topk_weights));
    add(context, kernel_call, call, from);
  }
  launch_steps(context, ready, steps_of(phases, begin | kSignalPublish | kSignalMarkReady, kSignalAwait | kSignalJudge),
               call.stream);
  if (phases & 2) pull(context, kernel_call, call, from);
  launch_steps(context, unrefusing(ready, kPhaseGradAck, backward.grad_ack_cells),
               steps_of(phases, 0, kSignalPublish | clear_open, kSignalAwaitRefused), call.stream);
}

void issue_weight_grad(const CudaContext& context, const WeightGradCall& call) {
  WeightGradKernel k{};
  context.frame(call.frame);
  k.call = context.kernel_call(kOpCombineBackward, call.frame, call.workspace);
  k.expert_out = call.expert_out;
  k.expert_out_row_stride_bytes = call.expert_out_row_stride_bytes;
  k.weights = call.weights;
  k.grad_weights = call.grad_weights;
  k.grad_rows = call.grad_rows != 0 ? call.grad_rows : context.own(context.backward(call.workspace).grad_expert_out);
  k.num_rows = context.last_offs(call.frame);
  k.row_bytes = context.geometry().token_row_bytes;
  launch_weight_grad(k, context.dtype(), context.geometry().capacity_rows, context.target(call.stream));
}

void issue_decode(const CudaContext& context, const DecodeCall& call) {
  const Geometry& g = context.geometry();
  const RowFormat& format = call.is_grad != 0 ? g.grad : g.recv;
  EPBUF_CHECK(is_quantised(format), "rows of format ", format.format, " were to be decoded");
  DecodeKernel k{};
  k.call = context.kernel_call(call.is_grad != 0 ? kOpCombineBackward : kOpDispatch, call.frame, call.workspace);
  k.data = call.data;
  k.scales = call.scales;
  k.row_scales = call.row_scales;
  k.out = call.out;
  k.row_stride_bytes = call.row_stride_bytes;
  k.scales_row_stride_bytes = call.scales_row_stride_bytes;
  k.out_row_bytes = g.token_row_bytes;
  k.num_live_rows = context.last_offs(call.frame);
  k.num_rows = call.num_rows;
  k.hidden = g.hidden;
  k.format = format;
  launch_decode(k, context.dtype(), context.target(call.stream));
}

// Not an op of its own: it belongs to the combine or the combine backward before it. The readers of the workspace are
// awaited before rows come back: the frame has all of it from then on, and with several streams a peer may still pull.
void issue_stash(const CudaContext& context, const StashCall& call) {
  context.check_stash(call);
  const bool restores = call.move == kRestoreRows;
  const KernelCall kernel_call =
      context.kernel_call(restores ? kOpCombineBackward : kOpCombine, call.frame, call.workspace);
  const Target target = context.target(call.stream);
  if (restores) {
    SignalKernel ack = signal(context, kernel_call, kPhaseAck, context.forward(call.workspace).ack_cells);
    ack.epoch = ack.ack_use = context.forward_use(call.workspace);
    ack.ack_phase = kPhaseAck;
    ack.ack_cells = ack.cells;
    launch_steps(context, ack, kSignalAwaitAck, call.stream);
  }
  if (call.move != kStashNothing) {
    launch_stash(stash_kernel(context, kernel_call, restores), context.geometry().capacity_rows, target);
  }
  if (call.returns_pages != 0) launch_pages(pages_kernel(context, kernel_call, false), target);
}

}  // namespace epbuf::cuda
