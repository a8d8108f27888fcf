// Route: counts to every peer, and from the R x E matrix every slot, zone and overflow without another word.
#include <algorithm>
#include <array>

#include "context.h"
#include "slot.h"

namespace epbuf {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The caller's topk_idx [T, K], int32 or int64, of which the first `num_live` rows count.
class TopkIds {
 public:
  TopkIds(const RouteCall& call, std::int32_t num_topk)
      : base_(call.topk_idx),
        row_stride_(call.topk_idx_row_stride),
        wide_(call.topk_idx_bytes == 8),
        num_topk_(num_topk) {
    num_live_ = call.live_tokens == 0 ? call.num_tokens : std::clamp<std::int64_t>(live(call), 0, call.num_tokens);
  }

  std::int64_t num_live() const { return num_live_; }

  std::int64_t at(std::int64_t token, std::int32_t k) const {
    const std::int64_t index = token * row_stride_ + k;
    return load(base_, index, wide_);
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::int64_t token = 0; token < num_live_; ++token) {
      for (std::int32_t k = 0; k < num_topk_; ++k) visit(token, k, at(token, k));
    }
  }

 private:
  static std::int64_t load(std::uint64_t base, std::int64_t index, bool wide) {
    return wide ? reinterpret_cast<const std::int64_t*>(base)[index]
                : reinterpret_cast<const std::int32_t*>(base)[index];
  }

  static std::int64_t live(const RouteCall& call) { return load(call.live_tokens, 0, call.live_tokens_bytes == 8); }

  std::uint64_t base_;
  std::int64_t row_stride_;
  bool wide_;
  std::int32_t num_topk_;
  std::int64_t num_live_;
};

// This rank's row of the R x E matrix and its header.
struct OwnCounts {
  std::vector<std::uint32_t> per_expert;             // [E]
  std::array<std::uint32_t, kCountHeader> header{};  // indexed by CountHeader
};

OwnCounts refused_counts(const Geometry& g, std::uint32_t refusal) {
  OwnCounts own{std::vector<std::uint32_t>(static_cast<std::size_t>(g.num_experts)), {}};
  own.header[kHeaderRefusal] = refusal;
  return own;
}

void note_bad_id(std::int64_t token, std::int32_t k, std::int64_t id, OwnCounts* own) {
  if (own->header[kHeaderNumBadIds]++ != 0) return;
  own->header[kHeaderBadToken] = static_cast<std::uint32_t>(token);
  own->header[kHeaderBadTopk] = static_cast<std::uint32_t>(k);
  own->header[kHeaderBadValueLow] = static_cast<std::uint32_t>(id);
  own->header[kHeaderBadValueHigh] = static_cast<std::uint32_t>(id >> 32);
}

OwnCounts count_ids(const Geometry& g, const TopkIds& ids) {
  OwnCounts own = refused_counts(g, kRefusalNone);
  own.header[kHeaderNumTokens] = static_cast<std::uint32_t>(ids.num_live());
  ids.for_each([&](std::int64_t token, std::int32_t k, std::int64_t id) {
    if (id >= g.num_experts) note_bad_id(token, k, id, &own);
    if (id >= 0 && id < g.num_experts) ++own.per_expert[static_cast<std::size_t>(id)];
  });
  return own;
}

// The R x (E + header) cells of a frame: written row by row by the peers, read after the wait for COUNT.
class CountMatrix {
 public:
  CountMatrix(const Context& context, std::int32_t frame)
      : windows_(context.windows()),
        offset_(context.frame(frame).count_cells),
        num_experts_(context.geometry().num_experts) {}

  std::int64_t cells_per_rank() const { return num_experts_ + kCountHeader; }

  Awaited awaited(std::uint32_t round) const {
    return {kPhaseCount, windows_.own<const Cell>(offset_), cells_per_rank(), round};
  }

  void publish(const OwnCounts& own, std::uint32_t round) const {
    fence_release_system();
    for (std::int32_t peer = 0; peer < windows_.num_ranks(); ++peer) {
      Cell* cells = windows_.at<Cell>(peer, offset_) + windows_.rank() * cells_per_rank();
      for (const std::uint32_t count : own.per_expert) store_fenced_system(cells++, {round, count});
      for (const std::uint32_t word : own.header) store_fenced_system(cells++, {round, word});
    }
  }

  std::int64_t count(std::int32_t rank, std::int64_t expert) const { return value(rank, expert); }
  std::uint32_t header(std::int32_t rank, std::uint32_t word) const { return value(rank, num_experts_ + word); }

  BadIds bad_ids(std::int32_t rank) const {
    const std::uint64_t high = header(rank, kHeaderBadValueHigh);
    const auto bad_value = static_cast<std::int64_t>(high << 32 | header(rank, kHeaderBadValueLow));
    return {header(rank, kHeaderNumBadIds), bad_value, rank, static_cast<std::int32_t>(header(rank, kHeaderBadToken)),
            static_cast<std::int32_t>(header(rank, kHeaderBadTopk))};
  }

  // Rows that ranks [0, end) send to `expert`.
  std::int64_t sum_below(std::int32_t end, std::int64_t expert) const {
    std::int64_t total = 0;
    for (std::int32_t rank = 0; rank < end; ++rank) total += count(rank, expert);
    return total;
  }

 private:
  std::uint32_t value(std::int32_t rank, std::int64_t index) const {
    return load_relaxed_system(windows_.own<const Cell>(offset_) + rank * cells_per_rank() + index).value;
  }

  const Windows& windows_;
  std::int64_t offset_;
  std::int64_t num_experts_;
};

// The regions that a round fills, and the facts of its zones.
class Router {
 public:
  Router(Context& context, const RouteCall& call)
      : context_(context), g_(context.geometry()), call_(call), counts_(context, call.frame) {
    const FrameOffsets& frame = context.frame(call.frame);
    slot_map_ = context.windows().own<std::int64_t>(frame.slot_map);
    offs_ = context.windows().own<std::int32_t>(frame.offs);
    kept_ = context.windows().own<std::int64_t>(frame.counts);
    overflow_ = context.windows().own<float>(frame.overflow);
    next_row_ = context.windows().own<std::int64_t>(context.forward(call.workspace).route_base);
  }

  void run(const TopkIds& ids, Outcome* outcome) {
    for (std::int32_t rank = 0; rank < g_.num_ranks; ++rank) note_demand(rank, lay_zones(rank), outcome);
    outcome->overflow = outcome->max_demand_rows > g_.capacity_rows ? 1 : 0;
    write_slots(ids);
    write_overflow(*outcome);
    sum_bad_ids(outcome);
  }

 private:
  // Zones of `rank`, one after the other; the first row of this rank's share in each. Returns the rank's demand.
  std::int64_t lay_zones(std::int32_t rank) {
    std::int64_t start = 0;
    for (std::int32_t j = 0; j < g_.num_local_experts; ++j) {
      const std::int64_t expert = static_cast<std::int64_t>(rank) * g_.num_local_experts + j;
      const std::int64_t count = counts_.sum_below(g_.num_ranks, expert);
      next_row_[expert] = start + counts_.sum_below(g_.rank, expert);
      if (rank == g_.rank) write_zone(j, start, count);
      start += round_up(count, g_.expert_alignment);
    }
    return start;
  }

  // Rows at or past the capacity are dropped by position, padding rows included.
  void write_zone(std::int32_t j, std::int64_t start, std::int64_t count) {
    const std::int64_t capacity = g_.capacity_rows;
    const std::int64_t end = start + round_up(count, g_.expert_alignment);
    offs_[j] = static_cast<std::int32_t>(std::min(end, capacity));
    kept_[j] = std::min(end, capacity) - std::min(start, capacity);
    kept_[g_.num_local_experts + j] = std::min(count, std::max<std::int64_t>(0, capacity - start));
  }

  void note_demand(std::int32_t rank, std::int64_t demand, Outcome* outcome) {
    if (rank == g_.rank) kept_[2 * g_.num_local_experts] = demand;
    if (demand <= outcome->max_demand_rows) return;
    outcome->max_demand_rows = demand;
    outcome->max_demand_rank = rank;
  }

  void write_slots(const TopkIds& ids) {
    const std::int64_t num_slots = static_cast<std::int64_t>(call_.num_tokens) * g_.num_topk;
    std::fill(slot_map_ + ids.num_live() * g_.num_topk, slot_map_ + num_slots, kNoSlot);
    ids.for_each([&](std::int64_t token, std::int32_t k, std::int64_t id) {
      slot_map_[token * g_.num_topk + k] = take_slot(id);
    });
  }

  std::int64_t take_slot(std::int64_t id) {
    if (id < 0 || id >= g_.num_experts) return kNoSlot;
    const std::int64_t row = next_row_[id]++;
    return row < g_.capacity_rows ? pack_slot({static_cast<std::int32_t>(id / g_.num_local_experts), row}) : kNoSlot;
  }

  void write_overflow(const Outcome& outcome) {
    *overflow_ = outcome.overflow != 0 ? 1.0f : 0.0f;
    if (call_.repeats != 0) return;
    if (outcome.overflow != 0) context_.control().record_overflow(outcome.max_demand_rows, outcome.max_demand_rank);
    std::int64_t& peak = context_.frame_counters(call_.frame).demand_peak_rows;
    peak = std::max(peak, outcome.max_demand_rows);
  }

  // Over all ranks; the first of the lowest rank that has one is the one that is named.
  void sum_bad_ids(Outcome* outcome) {
    BadIds all{};
    for (std::int32_t rank = g_.num_ranks - 1; rank >= 0; --rank) {
      const BadIds bad = counts_.bad_ids(rank);
      if (bad.num == 0) continue;
      const std::uint64_t num = all.num + bad.num;
      all = bad;
      all.num = num;
    }
    if (all.num == 0 || call_.repeats != 0) return;
    context_.control().record_bad_ids(all);
    outcome->num_bad_ids = all.num;
    outcome->bad_rank = all.rank;
    outcome->bad_token = all.token;
    outcome->bad_topk = all.topk;
    outcome->bad_value = all.value;
  }

  Context& context_;
  const Geometry& g_;
  const RouteCall& call_;
  CountMatrix counts_;
  std::int64_t* slot_map_;  // [T, K]
  std::int32_t* offs_;      // [L]
  std::int64_t* kept_;      // tokens_per_expert [L], valid_tokens_per_expert [L], total_recv_tokens
  float* overflow_;
  std::int64_t* next_row_;  // [E] route_base: the row that this rank's next token for an expert takes
};

bool find_refusal(Context& context, const OpState& op, const CountMatrix& counts, Outcome* outcome) {
  for (std::int32_t rank = 0; rank < context.geometry().num_ranks; ++rank) {
    const std::uint32_t refusal = counts.header(rank, kHeaderRefusal);
    if (refusal == kRefusalNone) continue;
    context.record_refusal(op, rank, refusal, outcome);
    return true;
  }
  return false;
}

}  // namespace

void check_route(const Context& context, const RouteCall& call) {
  context.frame(call.frame);
  EPBUF_CHECK(call.refusal != kRefusalNone || call.workspace >= 0, "route without a workspace and without a refusal");
  if (call.workspace >= 0) context.forward(call.workspace);
  if (call.refusal == kRefusalNone) context.check_num_tokens(call.num_tokens);
}

Status run_route(Context& context, const OpState& op, const RouteCall& call, Outcome* outcome) {
  const std::uint32_t round = ++context.frame_counters(call.frame).round;
  const bool refuses = call.refusal != kRefusalNone;
  const CountMatrix counts(context, call.frame);
  const TopkIds ids(refuses ? RouteCall{} : call, context.geometry().num_topk);
  counts.publish(refuses ? refused_counts(context.geometry(), call.refusal) : count_ids(context.geometry(), ids),
                 round);
  EPBUF_TRY(context.waiter().await(op, counts.awaited(round)));
  EPBUF_TRY(context.waiter().compare_progress(op, counts.awaited(round)));
  if (find_refusal(context, op, counts, outcome)) {
    EPBUF_TRY(context.exchange(op, {kPhaseArrived, context.frame(call.frame).arrived_cells, round, 0}));
    return kRefused;
  }
  Router(context, call).run(ids, outcome);
  return kOk;
}

}  // namespace epbuf
