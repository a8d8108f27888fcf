// Drives the host protocol with virtual ranks on threads and checks every value, under the sanitizers (`make
// sanitize`).
//
// Inputs are small integers, so that every dtype and every order of additions gives the same result. The layout is the
// driver's own, unlike plan.py's, with guard bytes behind each region: a write outside a region is found even though it
// stays inside the window. Ranks share no barrier but the protocol.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "host/convert.h"
#include "host/engine.h"
#include "host/slot.h"

namespace epbuf {
namespace {

template <typename... Parts>
void expect(bool condition, const Parts&... what) {
  if (condition) return;
  std::fprintf(stderr, "driver: %s\n", concat(what...).c_str());
  std::_Exit(1);
}

struct Shape {
  std::int32_t ranks, tokens, topk, hidden, local_experts, alignment;
  std::int64_t capacity;
  TokenDtype dtype = kFp32;
  bool save_recv = true;  // false: rows are stashed in pages
  std::uint64_t timeout_us = 60000000;
  bool by_wire = false;  // tokens cross once for each rank, both ways
  std::int32_t frames = 2, workspaces = 2;

  std::int32_t experts() const { return ranks * local_experts; }
  std::int64_t row_bytes() const { return static_cast<std::int64_t>(hidden) * (dtype == kFp32 ? 4 : 2); }
  std::int32_t pages_per_frame() const { return static_cast<std::int32_t>((capacity + kPageRows - 1) / kPageRows); }
  std::int32_t num_pages() const { return save_recv ? 0 : frames * pages_per_frame(); }

  static constexpr std::int32_t kPageRows = 4;
};

class Layout {
 public:
  static constexpr std::int64_t kGuardBytes = 64;
  static constexpr int kGuard = 0xA5;

  std::int64_t add(std::int64_t nbytes) {
    const std::int64_t offset = (nbytes_ + 63) / 64 * 64;
    nbytes_ = offset + nbytes + kGuardBytes;
    guards_.push_back(offset + nbytes);
    return offset;
  }

  std::int64_t nbytes() const { return nbytes_; }
  const std::vector<std::int64_t>& guards() const { return guards_; }

 private:
  std::int64_t nbytes_ = 0;
  std::vector<std::int64_t> guards_;
};

class Bed {
 public:
  explicit Bed(const Shape& shape) : shape_(shape) {
    lay_arena();
    for (std::int32_t f = 0; f < shape.frames; ++f) frames_.push_back(lay_frame());
    for (std::int32_t w = 0; w < shape.workspaces; ++w) forwards_.push_back(lay_forward());
    for (std::int32_t v = 0; v < shape.workspaces; ++v) backwards_.push_back(lay_backward());
    for (std::int32_t rank = 0; rank < shape.ranks; ++rank) make_window();
    for (std::int32_t rank = 0; rank < shape.ranks; ++rank) make_engine(rank);
  }

  ~Bed() {
    for (const auto& window : windows_) check_guards(window.get());
  }

  const Shape& shape() const { return shape_; }
  HostEngine& engine(std::int32_t rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  const FrameOffsets& frame(std::int32_t f) const { return frames_[static_cast<std::size_t>(f)]; }
  const ForwardOffsets& forward(std::int32_t w) const { return forwards_[static_cast<std::size_t>(w)]; }
  const BackwardOffsets& backward(std::int32_t v) const { return backwards_[static_cast<std::size_t>(v)]; }

  template <typename T>
  T* at(std::int32_t rank, std::int64_t offset) {
    return reinterpret_cast<T*>(window(rank) + offset);
  }

  std::int64_t recv_tokens(std::int32_t f, std::int32_t w) const {
    return shape_.save_recv ? frame(f).recv_tokens : forward(w).recv_tokens;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  std::int64_t cells(std::int64_t per_rank = 1) { return layout_.add(shape_.ranks * per_rank * 8); }
  std::int64_t rows() { return layout_.add(shape_.capacity * shape_.row_bytes()); }
  std::int64_t wire_rows() {
    return shape_.by_wire ? layout_.add(shape_.ranks * shape_.tokens * shape_.row_bytes()) : -1;
  }

  void lay_arena() {
    arena_ = {layout_.add(sizeof(Control)),
              cells(),
              cells(),
              layout_.add(shape_.frames * 16),
              layout_.add(shape_.workspaces * 8),
              layout_.add(shape_.workspaces * 8),
              layout_.add(sizeof(StashCounters)),
              layout_.add(shape_.num_pages() * 4),
              layout_.add(shape_.num_pages() * Shape::kPageRows * shape_.row_bytes())};
  }

  FrameOffsets lay_frame() {
    const std::int64_t num_slots = static_cast<std::int64_t>(shape_.tokens) * shape_.topk;
    FrameOffsets frame{};
    frame.count_cells = cells(shape_.experts() + kCountHeader);
    frame.arrived_cells = cells();
    frame.slot_map = layout_.add(num_slots * 8);
    frame.offs = layout_.add(shape_.local_experts * 4);
    frame.counts = layout_.add((2 * shape_.local_experts + 1) * 8);
    frame.overflow = layout_.add(4);
    frame.recv_topk_weights = layout_.add(shape_.capacity * 4);
    frame.recv_tokens = shape_.save_recv ? rows() : -1;
    frame.stash_table = shape_.save_recv ? -1 : layout_.add(8 + shape_.pages_per_frame() * 4);
    return frame;
  }

  ForwardOffsets lay_forward() {
    ForwardOffsets forward{};
    forward.ready_cells = cells();
    forward.ack_cells = cells();
    forward.route_base = layout_.add(shape_.experts() * 8);
    forward.expert_out = rows();
    forward.recv_tokens = shape_.save_recv ? -1 : rows();
    forward.wire_rows = wire_rows();
    return forward;
  }

  BackwardOffsets lay_backward() {
    BackwardOffsets backward{};
    backward.go_cells = cells();
    backward.grad_arrived_cells = cells();
    backward.grad_ready_cells = cells();
    backward.grad_ack_cells = cells();
    backward.grad_expert_out = rows();
    backward.grad_recv_tokens = rows();
    backward.grad_recv_topk_weights = layout_.add(shape_.capacity * 4);
    backward.grad_wire_rows = wire_rows();
    return backward;
  }

  void make_window() {
    const auto nbytes = static_cast<std::size_t>((layout_.nbytes() + 255) / 256 * 256);
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(256, nbytes));
    std::memset(memory, 0, nbytes);
    for (const std::int64_t guard : layout_.guards()) std::memset(memory + guard, Layout::kGuard, Layout::kGuardBytes);
    auto* free_pages = reinterpret_cast<std::int32_t*>(memory + arena_.stash_free);
    for (std::int32_t page = 0; page < shape_.num_pages(); ++page) free_pages[page] = page;
    windows_.emplace_back(memory);
  }

  void make_engine(std::int32_t rank) {
    std::vector<std::uint64_t> peers;
    for (const auto& window : windows_) peers.push_back(reinterpret_cast<std::uint64_t>(window.get()));
    engines_.push_back(std::make_unique<HostEngine>(geometry(rank), arena_, frames_, forwards_, backwards_, peers));
  }

  Geometry geometry(std::int32_t rank) const {
    Geometry g{};
    g.rank = rank;
    g.num_ranks = shape_.ranks;
    g.num_experts = shape_.experts();
    g.num_local_experts = shape_.local_experts;
    g.num_topk = shape_.topk;
    g.hidden = shape_.hidden;
    g.expert_alignment = shape_.alignment;
    g.max_tokens_per_rank = shape_.tokens;
    g.token_dtype = shape_.dtype;
    g.capacity_rows = shape_.capacity;
    g.token_row_bytes = shape_.row_bytes();
    g.timeout_us = shape_.timeout_us;
    g.stash = {shape_.num_pages(), Shape::kPageRows, Shape::kPageRows * shape_.row_bytes(), 0, 0};
    g.dedups = g.adds_by_rank = shape_.by_wire ? 1 : 0;
    g.wire = g.grad_wire = {shape_.row_bytes(), 0};
    return g;
  }

  void check_guards(const std::byte* memory) const {
    for (const std::int64_t guard : layout_.guards()) {
      for (std::int64_t i = 0; i < Layout::kGuardBytes; ++i) {
        expect(memory[guard + i] == std::byte{Layout::kGuard}, "byte ", i, " behind the region that ends at ", guard);
      }
    }
  }

  std::byte* window(std::int32_t rank) { return windows_[static_cast<std::size_t>(rank)].get(); }

  Shape shape_;
  Layout layout_;
  ArenaOffsets arena_{};
  std::vector<FrameOffsets> frames_;
  std::vector<ForwardOffsets> forwards_;
  std::vector<BackwardOffsets> backwards_;
  std::vector<std::unique_ptr<std::byte, Free>> windows_;
  std::vector<std::unique_ptr<HostEngine>> engines_;
};

// One thread per rank; returns when all are done.
void on_all_ranks(std::int32_t num_ranks, const std::function<void(std::int32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Small integers, so that sums of products stay exact in bf16.
float input_value(std::uint32_t round, std::int32_t rank, std::int64_t token, std::int64_t h) {
  return static_cast<float>((round + 5 * static_cast<std::uint32_t>(rank) + 3 * token + h) % 7) - 3.0f;
}

struct Batch {
  std::int32_t num_tokens, num_live;
  std::vector<std::int64_t> ids;  // [T, K]
  std::vector<float> weights;     // [T, K]
};

enum class Routing { kUniform, kOneExpert, kNone, kHoles, kBadIds, kDuplicates, kNumKinds };

std::int64_t draw_id(std::mt19937& random, const Shape& shape, Routing kind) {
  const auto expert = static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(shape.experts()));
  const bool odd = random() % 4 == 0;
  switch (kind) {
    case Routing::kOneExpert:
      return shape.experts() - 1;
    case Routing::kNone:
      return -1;
    case Routing::kHoles:
      return odd ? -1 - expert : expert;
    case Routing::kBadIds:
      return odd ? shape.experts() + expert * 0x100000001 : expert;
    case Routing::kDuplicates:
      return expert % 2;
    default:
      return expert;
  }
}

Batch make_batch(const Shape& shape, std::uint32_t round, std::int32_t rank) {
  std::mt19937 random(round * 131 + static_cast<std::uint32_t>(rank));
  const auto kind = static_cast<Routing>(round % static_cast<std::uint32_t>(Routing::kNumKinds));
  Batch batch{};
  batch.num_tokens = static_cast<std::int32_t>(random() % (static_cast<std::uint32_t>(shape.tokens) + 1));
  if (round % 3 == 0) batch.num_tokens = shape.tokens;
  batch.num_live = round % 2 == 0 ? batch.num_tokens : batch.num_tokens / 2;
  for (std::int32_t i = 0; i < batch.num_tokens * shape.topk; ++i) {
    batch.ids.push_back(draw_id(random, shape, kind));
    batch.weights.push_back(static_cast<float>(random() % 3));
  }
  return batch;
}

// Who fills a row. src -1: padding.
struct Origin {
  std::int32_t src, token, k;
};

// The routing of a round, worked out one row at a time.
class Model {
 public:
  Model(const Shape& shape, std::uint32_t round) : shape_(shape), round_(round) {
    for (std::int32_t rank = 0; rank < shape.ranks; ++rank) {
      batches.push_back(make_batch(shape, round, rank));
      slots.emplace_back(batches.back().ids.size(), kNoSlot);
    }
    for (std::int32_t rank = 0; rank < shape.ranks; ++rank) fill_rank(rank);
  }

  bool overflow() const {
    bool any = false;
    for (const std::int64_t demand : demands) any = any || demand > shape_.capacity;
    return any;
  }

  std::uint64_t num_bad_ids() const {
    std::uint64_t num = 0;
    for (const Batch& batch : batches) {
      for (std::int32_t i = 0; i < batch.num_live * shape_.topk; ++i)
        num += batch.ids[static_cast<std::size_t>(i)] >= shape_.experts();
    }
    return num;
  }

  float weight(Origin o) const { return batches[static_cast<std::size_t>(o.src)].weights[slot_index(o.token, o.k)]; }
  std::size_t slot_index(std::int32_t token, std::int32_t k) const {
    return static_cast<std::size_t>(token * shape_.topk + k);
  }

  std::vector<Batch> batches;                    // of each rank
  std::vector<std::vector<std::int64_t>> slots;  // of each rank [T, K]
  std::vector<std::vector<Origin>> rows;         // of each rank, up to the capacity
  std::vector<std::vector<std::int32_t>> offs;   // of each rank [L]
  std::vector<std::int64_t> demands;             // of each rank

 private:
  void fill_rank(std::int32_t rank) {
    std::vector<Origin> all;
    offs.emplace_back();
    for (std::int32_t j = 0; j < shape_.local_experts; ++j) {
      fill_zone(rank * shape_.local_experts + j, &all);
      offs.back().push_back(
          static_cast<std::int32_t>(std::min<std::int64_t>(static_cast<std::int64_t>(all.size()), shape_.capacity)));
    }
    demands.push_back(static_cast<std::int64_t>(all.size()));
    all.resize(static_cast<std::size_t>(offs.back().back()));
    for (std::size_t row = 0; row < all.size(); ++row) note_slot(rank, row, all[row]);
    rows.push_back(std::move(all));
  }

  void fill_zone(std::int64_t expert, std::vector<Origin>* all) const {
    for (std::int32_t src = 0; src < shape_.ranks; ++src) {
      const Batch& batch = batches[static_cast<std::size_t>(src)];
      for (std::int32_t i = 0; i < batch.num_live * shape_.topk; ++i) {
        if (batch.ids[static_cast<std::size_t>(i)] == expert) all->push_back({src, i / shape_.topk, i % shape_.topk});
      }
    }
    while (all->size() % static_cast<std::size_t>(shape_.alignment) != 0) all->push_back({-1, 0, 0});
  }

  void note_slot(std::int32_t rank, std::size_t row, Origin origin) {
    if (origin.src < 0) return;
    slots[static_cast<std::size_t>(origin.src)][slot_index(origin.token, origin.k)] =
        pack_slot({rank, static_cast<std::int64_t>(row)});
  }

  Shape shape_;
  std::uint32_t round_;
};

float load_elem(TokenDtype dtype, const std::byte* base, std::int64_t i) {
  if (dtype == kBf16) return to_float(reinterpret_cast<const Bf16*>(base)[i]);
  if (dtype == kFp16) return to_float(reinterpret_cast<const Fp16*>(base)[i]);
  return reinterpret_cast<const float*>(base)[i];
}

void store_elem(TokenDtype dtype, std::byte* base, std::int64_t i, float value) {
  if (dtype == kBf16) {
    reinterpret_cast<Bf16*>(base)[i] = from_float<Bf16>(value);
  } else if (dtype == kFp16) {
    reinterpret_cast<Fp16*>(base)[i] = from_float<Fp16>(value);
  } else {
    reinterpret_cast<float*>(base)[i] = value;
  }
}

// Rows of the token dtype, poisoned with NaN.
class Rows {
 public:
  Rows(const Shape& shape, std::int64_t num_rows)
      : dtype_(shape.dtype),
        hidden_(shape.hidden),
        row_bytes_(shape.row_bytes()),
        bytes_(static_cast<std::size_t>(num_rows * row_bytes_), std::byte{0xFF}) {}

  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(bytes_.data()); }

  template <typename Value>
  void fill_row(std::int64_t row, Value value) {
    for (std::int64_t h = 0; h < hidden_; ++h) store_elem(dtype_, bytes_.data() + row * row_bytes_, h, value(h));
  }

  const std::byte* row(std::int64_t index) const { return bytes_.data() + index * row_bytes_; }

 private:
  TokenDtype dtype_;
  std::int64_t hidden_, row_bytes_;
  std::vector<std::byte> bytes_;
};

class Rank {
 public:
  Rank(Bed& bed, std::int32_t rank, std::uint32_t round)
      : bed_(bed),
        shape_(bed.shape()),
        rank_(rank),
        round_(round),
        model_(shape_, round),
        x_(shape_, shape_.tokens),
        y_(shape_, shape_.tokens),
        dx_(shape_, shape_.tokens),
        dw_(static_cast<std::size_t>(shape_.tokens * shape_.topk), -1.0f),
        live_(batch().num_live) {
    for (std::int32_t t = 0; t < batch().num_tokens; ++t)
      x_.fill_row(t, [&](std::int64_t h) { return input(rank_, t, h); });
  }

  // Forward of one layer; the expert with local index j multiplies its rows by j + 1.
  void forward(std::int32_t f, std::int32_t w) {
    check_route(bed_.engine(rank_).route(route_call(f, w)), f);
    expect_ok(bed_.engine(rank_).dispatch(dispatch_call(f, w, x_)), "dispatch");
    check_received(f, w);
    run_combine(f, w);
    workspace_ = w;
    if (!shape_.save_recv) move_rows(f, kStashRows, false);
  }

  void backward(std::int32_t f, std::int32_t v) {
    const bool has_combine_backward = round_ % 4 < 2;
    if (has_combine_backward) run_combine_backward(f, v);
    if (has_combine_backward && !shape_.save_recv) check_restored(f);
    run_dispatch_backward(f, v, has_combine_backward);
  }

  RouteCall route_call(std::int32_t f, std::int32_t w) const {
    RouteCall call{};
    call.frame = f;
    call.workspace = w;
    call.check_progress = 1;
    call.topk_idx = reinterpret_cast<std::uint64_t>(batch().ids.data());
    call.topk_idx_row_stride = shape_.topk;
    call.topk_idx_bytes = 8;
    call.num_tokens = batch().num_tokens;
    call.live_tokens = reinterpret_cast<std::uint64_t>(&live_);
    call.live_tokens_bytes = 8;
    return call;
  }

  DispatchCall dispatch_call(std::int32_t f, std::int32_t w, const Rows& rows) const {
    DispatchCall call{};
    call.frame = f;
    call.workspace = w;
    call.check_progress = 1;
    call.rows = rows.address();
    call.row_stride_bytes = shape_.row_bytes();
    call.topk_weights = reinterpret_cast<std::uint64_t>(batch().weights.data());
    call.topk_weights_row_stride = shape_.topk;
    call.num_tokens = batch().num_tokens;
    call.expects_open = 1;
    return call;
  }

  CombineCall combine_call(std::int32_t f, std::int32_t w, const Rows& rows, const Rows& out) const {
    CombineCall call{};
    call.frame = f;
    call.workspace = w;
    call.check_progress = 1;
    call.rows = rows.address();
    call.row_stride_bytes = shape_.row_bytes();
    call.rows_source = kSourceTensor;
    call.weights_source = kSourceZero;
    call.out = out.address();
    call.out_row_stride_bytes = shape_.row_bytes();
    call.num_tokens = batch().num_tokens;
    call.clears_open = 1;
    return call;
  }

  const Rows& x() const { return x_; }
  const Rows& y() const { return y_; }

 private:
  const Batch& batch() const { return model_.batches[static_cast<std::size_t>(rank_)]; }
  const std::vector<Origin>& rows() const { return model_.rows[static_cast<std::size_t>(rank_)]; }
  float input(std::int32_t rank, std::int64_t token, std::int64_t h) const {
    return input_value(round_, rank, token, h);
  }

  std::int32_t zone_of(std::int32_t rank, std::int64_t row) const {
    std::int32_t j = 0;
    while (model_.offs[static_cast<std::size_t>(rank)][static_cast<std::size_t>(j)] <= row) ++j;
    return j;
  }

  void expect_ok(const Outcome& outcome, const char* op) const {
    const ErrorRecord error = bed_.engine(rank_).control().error;
    expect(outcome.status == kOk, op, " of round ", round_, " on rank ", rank_, ": status ", outcome.status, ", phase ",
           error.phase, ", peer ", error.peer);
  }

  template <typename Value>
  void expect_row(const std::byte* row, const char* what, std::int64_t index, Value value) const {
    for (std::int64_t h = 0; h < shape_.hidden; ++h) {
      const float found = load_elem(shape_.dtype, row, h);
      expect(found == value(h), what, "[", index, ", ", h, "] on rank ", rank_, " in round ", round_, " is ", found,
             ", not ", value(h));
    }
  }

  void check_route(const Outcome& outcome, std::int32_t f) {
    expect_ok(outcome, "route");
    expect((outcome.overflow != 0) == model_.overflow(), "overflow of round ", round_);
    expect(outcome.num_bad_ids == model_.num_bad_ids(), "num_bad_ids of round ", round_, " is ", outcome.num_bad_ids);
    const auto& slots = model_.slots[static_cast<std::size_t>(rank_)];
    const auto* slot_map = bed_.at<std::int64_t>(rank_, bed_.frame(f).slot_map);
    for (std::size_t i = 0; i < slots.size(); ++i) expect(slot_map[i] == slots[i], "slot ", i, " of round ", round_);
    const auto& offs = model_.offs[static_cast<std::size_t>(rank_)];
    for (std::size_t j = 0; j < offs.size(); ++j)
      expect(bed_.at<std::int32_t>(rank_, bed_.frame(f).offs)[j] == offs[j], "offs ", j);
    const auto* counts = bed_.at<std::int64_t>(rank_, bed_.frame(f).counts);
    expect(counts[2 * shape_.local_experts] == model_.demands[static_cast<std::size_t>(rank_)], "total_recv_tokens");
  }

  void check_received(std::int32_t f, std::int32_t w) {
    const auto* weights = bed_.at<float>(rank_, bed_.frame(f).recv_topk_weights);
    for (std::size_t row = 0; row < rows().size(); ++row) {
      const Origin o = rows()[row];
      const auto index = static_cast<std::int64_t>(row);
      expect_row(bed_.at<std::byte>(rank_, bed_.recv_tokens(f, w)) + index * shape_.row_bytes(), "recv_tokens", index,
                 [&](std::int64_t h) { return o.src < 0 ? 0.0f : input(o.src, o.token, h); });
      expect(weights[row] == (o.src < 0 ? 0.0f : model_.weight(o)), "recv_topk_weights[", row, "] in round ", round_);
    }
  }

  void move_rows(std::int32_t f, StashMove move, bool returns_pages) {
    StashCall call{};
    call.frame = f;
    call.workspace = workspace_;
    call.move = move;
    call.returns_pages = returns_pages ? 1 : 0;
    expect_ok(bed_.engine(rank_).stash(call), "stash");
  }

  // Twice, as with a graph that is retained. Without a combine backward the pages wait for the frame's next dispatch.
  void check_restored(std::int32_t f) {
    for (const bool is_last : {false, true}) {
      std::byte* received = bed_.at<std::byte>(rank_, bed_.recv_tokens(f, workspace_));
      std::memset(received, 0xFF, rows().size() * static_cast<std::size_t>(shape_.row_bytes()));
      move_rows(f, kRestoreRows, is_last);
      check_received(f, workspace_);
    }
  }

  // Odd rounds write into the window and are not weighted.
  void run_combine(std::int32_t f, std::int32_t w) {
    const bool weighted = round_ % 2 == 0;
    Rows expert_out(shape_, shape_.capacity);
    for (std::size_t row = 0; row < rows().size(); ++row) {
      const Origin o = rows()[row];
      const auto scale = static_cast<float>(zone_of(rank_, static_cast<std::int64_t>(row)) + 1);
      expert_out.fill_row(static_cast<std::int64_t>(row),
                          [&](std::int64_t h) { return o.src < 0 ? 0.0f : scale * input(o.src, o.token, h); });
    }
    CombineCall call = combine_call(f, w, expert_out, y_);
    if (weighted) {
      call.weights_source = kSourceTensor;
      call.weights = reinterpret_cast<std::uint64_t>(bed_.at<float>(rank_, bed_.frame(f).recv_topk_weights));
    } else {
      call.rows_source = kSourceWindow;
      std::memcpy(bed_.at<std::byte>(rank_, bed_.forward(w).expert_out), expert_out.row(0),
                  rows().size() * static_cast<std::size_t>(shape_.row_bytes()));
    }
    expect_ok(bed_.engine(rank_).combine(call), "combine");
    check_sums(y_, "y", [&](Origin o, Slot slot) {
      return (weighted ? model_.weight(o) : 1.0f) * static_cast<float>(zone_of(slot.rank, slot.row) + 1);
    });
  }

  // Each row of `out` is the token's input times the factors of its live slots.
  template <typename Factor>
  void check_sums(const Rows& out, const char* what, Factor factor) const {
    for (std::int32_t t = 0; t < batch().num_tokens; ++t) {
      float total = 0.0f;
      for (std::int32_t k = 0; k < shape_.topk; ++k) {
        const std::int64_t slot = model_.slots[static_cast<std::size_t>(rank_)][model_.slot_index(t, k)];
        if (slot != kNoSlot) total += factor(Origin{rank_, t, k}, unpack_slot(slot));
      }
      expect_row(out.row(t), what, t, [&](std::int64_t h) { return total * input(rank_, t, h); });
    }
  }

  // The output's gradient is x again, so grad_expert_out must look as recv_tokens did; then <x, x> and weights * x.
  void run_combine_backward(std::int32_t f, std::int32_t v) {
    expect_ok(bed_.engine(rank_).combine_backward(dispatch_call(f, v, x_)), "combine_backward");
    const std::byte* grad = bed_.at<std::byte>(rank_, bed_.backward(v).grad_expert_out);
    for (std::size_t row = 0; row < rows().size(); ++row) {
      const Origin o = rows()[row];
      const auto index = static_cast<std::int64_t>(row);
      expect_row(grad + index * shape_.row_bytes(), "grad_expert_out", index,
                 [&](std::int64_t h) { return o.src < 0 ? 0.0f : input(o.src, o.token, h); });
    }
    check_weight_grad(f, v);
  }

  void check_weight_grad(std::int32_t f, std::int32_t v) {
    std::vector<float> dots(static_cast<std::size_t>(shape_.capacity), -1.0f);
    const std::vector<std::byte> before(bed_.at<std::byte>(rank_, bed_.backward(v).grad_expert_out),
                                        bed_.at<std::byte>(rank_, bed_.backward(v).grad_expert_out) +
                                            rows().size() * static_cast<std::size_t>(shape_.row_bytes()));
    WeightGradCall call{};
    call.frame = f;
    call.workspace = v;
    call.expert_out = reinterpret_cast<std::uint64_t>(before.data());
    call.expert_out_row_stride_bytes = shape_.row_bytes();
    call.weights = reinterpret_cast<std::uint64_t>(bed_.at<float>(rank_, bed_.frame(f).recv_topk_weights));
    call.grad_weights = reinterpret_cast<std::uint64_t>(dots.data());
    expect_ok(bed_.engine(rank_).weight_grad(call), "weight_grad");
    for (std::size_t row = 0; row < rows().size(); ++row) check_dot(f, v, static_cast<std::int64_t>(row), dots[row]);
  }

  void check_dot(std::int32_t f, std::int32_t v, std::int64_t row, float found) {
    const Origin o = rows()[static_cast<std::size_t>(row)];
    const float weight = bed_.at<float>(rank_, bed_.frame(f).recv_topk_weights)[row];
    float dot = 0.0f;
    for (std::int64_t h = 0; h < shape_.hidden && o.src >= 0; ++h)
      dot += input(o.src, o.token, h) * input(o.src, o.token, h);
    expect(found == dot, "grad_weights[", row, "] is ", found, ", not ", dot);
    expect_row(bed_.at<std::byte>(rank_, bed_.backward(v).grad_expert_out) + row * shape_.row_bytes(),
               "weighted grad_expert_out", row,
               [&](std::int64_t h) { return o.src < 0 ? 0.0f : weight * input(o.src, o.token, h); });
  }

  // The gradient of a received row is the row times its zone's number plus one; every fifth round has none.
  void run_dispatch_backward(std::int32_t f, std::int32_t v, bool use_has_begun) {
    const bool is_missing = round_ % 5 == 4;
    Rows grad(shape_, shape_.capacity);
    std::vector<float> grad_weights(static_cast<std::size_t>(shape_.capacity), -1.0f);
    for (std::size_t row = 0; row < rows().size(); ++row) {
      const Origin o = rows()[row];
      const auto scale = static_cast<float>(zone_of(rank_, static_cast<std::int64_t>(row)) + 1);
      grad.fill_row(static_cast<std::int64_t>(row),
                    [&](std::int64_t h) { return o.src < 0 ? 0.0f : scale * input(o.src, o.token, h); });
      grad_weights[row] = static_cast<float>(row) + 1.0f;
    }
    CombineCall call = combine_call(f, v, grad, dx_);
    call.rows_source = is_missing ? kSourceZero : kSourceTensor;
    call.weights_source = is_missing ? kSourceZero : kSourceTensor;
    call.weights = reinterpret_cast<std::uint64_t>(grad_weights.data());
    call.out_weights = reinterpret_cast<std::uint64_t>(dw_.data());
    call.begins_use = use_has_begun ? 0 : 1;
    expect_ok(bed_.engine(rank_).dispatch_backward(call), "dispatch_backward");
    check_sums(dx_, "dx", [&](Origin, Slot slot) {
      return is_missing ? 0.0f : static_cast<float>(zone_of(slot.rank, slot.row) + 1);
    });
    check_weights_back(is_missing);
  }

  void check_weights_back(bool is_missing) const {
    const auto& slots = model_.slots[static_cast<std::size_t>(rank_)];
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const float row = is_missing || slots[i] == kNoSlot ? 0.0f : static_cast<float>(unpack_slot(slots[i]).row) + 1.0f;
      expect(dw_[i] == row, "dw[", i, "] in round ", round_, " is ", dw_[i], ", not ", row);
    }
  }

  Bed& bed_;
  const Shape& shape_;
  std::int32_t rank_;
  std::uint32_t round_;
  std::int32_t workspace_ = 0;  // of the forward
  Model model_;
  Rows x_, y_, dx_;
  std::vector<float> dw_;
  std::int64_t live_;
};

// Lets ranks drift apart: some rounds one of them sleeps.
void drift(std::int32_t rank, std::uint32_t round) {
  if ((round + static_cast<std::uint32_t>(rank)) % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// Two layers in flight on two frames: forward, forward, backward, backward; over the rounds each pair of workspaces,
// equal ones included. Where both backwards do without a combine backward, nothing but ACK stands between the pull of
// one and the staging of the other.
void run_rounds(Bed& bed, std::uint32_t num_rounds) {
  on_all_ranks(bed.shape().ranks, [&](std::int32_t rank) {
    for (std::uint32_t round = 0; round < num_rounds; round += 2) {
      Rank first(bed, rank, round), second(bed, rank, round + 1);
      const auto workspace = static_cast<std::int32_t>(round / 4 % 2);
      drift(rank, round);
      first.forward(0, 0);
      second.forward(1, workspace);
      drift(rank, round + 1);
      second.backward(1, 0);
      first.backward(0, workspace);
    }
    const Control control = bed.engine(rank).control();
    expect(control.num_early_reuses == 0, "early reuses on rank ", rank);
    expect(control.num_stash_overflows == 0, "pages were missing on rank ", rank);
  });
}

void test_rounds() {
  const Shape shapes[] = {
      {1, 8, 2, 8, 3, 1, 64},
      {2, 16, 2, 8, 2, 4, 96},
      {2, 9, 3, 1032, 1, 1, 20, kFp32},  // overflows; longer than a block of the accumulator
      {3, 7, 5, 40, 2, 8, 128, kBf16, false},
      {4, 8, 2, 24, 3, 1, 256, kFp16},
      {4, 5, 1, 8, 1, 16, 16, kBf16},
      {3, 12, 4, 16, 2, 4, 160, kFp32, true, 60000000, true},
      {2, 9, 3, 40, 2, 1, 20, kBf16, false, 60000000, true},  // overflows
  };
  for (const Shape& shape : shapes) {
    Bed bed(shape);
    run_rounds(bed, 60);
  }
}

// The gradient of every row is 1, then 2, then 1, ...; each token has two rows.
void pull_repeatedly(Bed& bed, std::int32_t rank, std::int32_t num_tokens) {
  const auto num_elems = static_cast<std::size_t>(bed.shape().capacity * bed.shape().hidden);
  const std::vector<float> ones(num_elems, 1.0f), twos(num_elems, 2.0f);
  std::vector<float> out(static_cast<std::size_t>(num_tokens * bed.shape().hidden));
  CombineCall call{};
  call.row_stride_bytes = call.out_row_stride_bytes = bed.shape().row_bytes();
  call.weights_source = kSourceZero;
  call.out = reinterpret_cast<std::uint64_t>(out.data());
  call.num_tokens = num_tokens;
  call.begins_use = 1;
  for (std::int32_t use = 0; use < 100; ++use) {
    call.rows = reinterpret_cast<std::uint64_t>((use % 2 == 0 ? ones : twos).data());
    expect(bed.engine(rank).dispatch_backward(call).status == kOk, "dispatch_backward ", use);
    const float expected = use % 2 == 0 ? 2.0f : 4.0f;
    for (const float found : out) expect(found == expected, "use ", use, " gave ", found, ", not ", expected);
  }
}

// Uses of one backward workspace in a row: rank 0 pulls many rows, the others one, so that they are ready to stage the
// next gradient while it still pulls this one.
void test_uses_in_a_row() {
  Bed bed({3, 64, 2, 256, 2, 1, 400});
  on_all_ranks(3, [&](std::int32_t rank) {
    const std::int32_t num_tokens = rank == 0 ? 64 : 1;
    std::vector<std::int64_t> ids(static_cast<std::size_t>(num_tokens) * 2);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 6);
    RouteCall route{};
    route.topk_idx = reinterpret_cast<std::uint64_t>(ids.data());
    route.topk_idx_row_stride = 2;
    route.topk_idx_bytes = 8;
    route.num_tokens = num_tokens;
    expect(bed.engine(rank).route(route).status == kOk, "route");
    pull_repeatedly(bed, rank, num_tokens);
  });
}

void test_concurrent_arenas() {
  const auto run = [](Shape shape) {
    Bed bed(shape);
    run_rounds(bed, 40);
  };
  std::thread other(run, Shape{2, 8, 2, 16, 2, 4, 128, kBf16});
  run({3, 8, 2, 8, 1, 1, 64});
  other.join();
}

// control() and progress() are for other threads too.
void test_watcher() {
  Bed bed({2, 8, 2, 8, 2, 1, 64});
  std::atomic<bool> done{false};
  std::thread watcher([&] {
    while (!done.load())
      expect(bed.engine(0).control().poisoned == kOk && bed.engine(1).progress().size() == 2, "watcher");
  });
  run_rounds(bed, 40);
  done.store(true);
  watcher.join();
}

void expect_refused(const Outcome& outcome, std::int32_t refusing_rank, const char* op) {
  expect(outcome.status == kRefused && outcome.refusing_rank == refusing_rank && outcome.refusal == kRefusalDtype, op,
         " should be refused by rank ", refusing_rank, ", found status ", outcome.status, " by ",
         outcome.refusing_rank);
}

// Each op refused once by `refuser`, in the order of a step, with what an op needs before it.
void refuse_each(Bed& bed, std::int32_t rank, std::int32_t refuser, std::uint32_t round) {
  HostEngine& engine = bed.engine(rank);
  const Rank side(bed, rank, round);
  const std::uint32_t refusal = rank == refuser ? kRefusalDtype : kRefusalNone;
  RouteCall route = side.route_call(0, rank == refuser ? -1 : 0);
  route.refusal = refusal;
  expect_refused(engine.route(route), refuser, "route");
  DispatchCall push = side.dispatch_call(0, 0, side.x());
  expect(engine.route(side.route_call(0, 0)).status == kOk, "route after a refusal");
  push.refusal = refusal;
  expect_refused(engine.dispatch(push), refuser, "dispatch");
  const Rows rows(bed.shape(), bed.shape().capacity);
  CombineCall pull = side.combine_call(0, 0, rows, side.y());
  pull.refusal = refusal;
  expect_refused(engine.combine(pull), refuser, "combine");
  expect_refused(engine.combine_backward(push), refuser, "combine_backward");
  pull.begins_use = 1;
  expect_refused(engine.dispatch_backward(pull), refuser, "dispatch_backward");
  expect(engine.control().num_refusals == 5 * (static_cast<std::uint64_t>(refuser) + 1), "num_refusals");
}

void test_refusals() {
  Bed bed({3, 6, 2, 8, 2, 4, 64});
  on_all_ranks(3, [&](std::int32_t rank) {
    for (std::int32_t refuser = 0; refuser < 3; ++refuser) refuse_each(bed, rank, refuser, 0);
  });
  run_rounds(bed, 20);
}

// Refusals of every kind between rounds whose tokens cross once for each rank.
void test_refusals_by_wire() {
  Bed bed({3, 6, 2, 8, 2, 4, 64, kFp32, true, 60000000, true});
  on_all_ranks(3, [&](std::int32_t rank) {
    for (std::int32_t refuser = 0; refuser < 3; ++refuser) refuse_each(bed, rank, refuser, 0);
  });
  run_rounds(bed, 20);
}

void expect_failed(HostEngine& engine, const Outcome& outcome, Status status, Phase phase, std::int32_t peer) {
  const Control control = engine.control();
  expect(outcome.status == status && control.poisoned == status && control.error.phase == phase &&
             control.error.peer == peer,
         "status ", outcome.status, ", phase ", control.error.phase, ", peer ", control.error.peer, "; expected ",
         status, ", ", phase, ", ", peer);
}

// Rank 1 brings another frame, then (a new arena) another workspace, then another op; every rank says so, none by
// time-out.
void test_mismatch() {
  const std::function<Outcome(HostEngine&, const Rank&)> others[] = {
      [](HostEngine& engine, const Rank& side) { return engine.route(side.route_call(1, 0)); },
      [](HostEngine& engine, const Rank& side) { return engine.route(side.route_call(0, 1)); },
      [](HostEngine& engine, const Rank& side) { return engine.combine(side.combine_call(0, 0, side.x(), side.y())); }};
  for (const auto& other : others) {
    Bed bed({3, 6, 2, 8, 2, 1, 64});
    on_all_ranks(3, [&](std::int32_t rank) {
      HostEngine& engine = bed.engine(rank);
      const Rank side(bed, rank, 0);
      const Outcome outcome = rank == 1 ? other(engine, side) : engine.route(side.route_call(0, 0));
      expect(outcome.status == kMismatch && engine.control().poisoned == kMismatch, "rank ", rank, ": status ",
             outcome.status);
      expect(rank == 1 || engine.control().error.peer == 1, "rank ", rank, " blames ", engine.control().error.peer);
      expect(engine.route(side.route_call(0, 0)).status == kPoisoned, "a poisoned arena does nothing");
    });
  }
}

// The last rank does not come, or stops after route; the others name it and the phase. When it comes it is told.
void test_timeout() {
  for (const bool routes : {false, true}) {
    Bed bed({4, 6, 2, 8, 2, 1, 64, kFp32, true, 300000});
    on_all_ranks(4, [&](std::int32_t rank) {
      HostEngine& engine = bed.engine(rank);
      const Rank side(bed, rank, 0);
      if (rank == 3 && !routes) return;
      Outcome outcome = engine.route(side.route_call(0, 0));
      if (rank == 3) return;
      if (routes) outcome = engine.dispatch(side.dispatch_call(0, 0, side.x()));
      expect_failed(engine, outcome, kTimeout, routes ? kPhaseArrived : kPhaseCount, 3);
    });
    const Rank late(bed, 3, 0);
    HostEngine& engine = bed.engine(3);
    const Outcome outcome =
        routes ? engine.dispatch(late.dispatch_call(0, 0, late.x())) : engine.route(late.route_call(0, 0));
    expect_failed(engine, outcome, kAborted, kPhaseNone, 0);
  }
}

// Rank 0 gives up while the others wait for it.
void test_abort() {
  Bed bed({3, 6, 2, 8, 2, 1, 64});
  on_all_ranks(3, [&](std::int32_t rank) {
    HostEngine& engine = bed.engine(rank);
    const Rank side(bed, rank, 0);
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (rank == 0) engine.abort(kAborted);
    const Outcome outcome = engine.route(side.route_call(0, 0));
    if (rank == 0) return expect(outcome.status == kPoisoned, "after abort: status ", outcome.status);
    expect(outcome.status == kAborted && engine.control().error.peer == 0, "rank ", rank, ": status ", outcome.status);
  });
}

}  // namespace
}  // namespace epbuf

int main() {
  const std::pair<const char*, void (*)()> scenarios[] = {
      {"rounds", epbuf::test_rounds},
      {"uses in a row", epbuf::test_uses_in_a_row},
      {"concurrent arenas", epbuf::test_concurrent_arenas},
      {"watcher", epbuf::test_watcher},
      {"refusals", epbuf::test_refusals},
      {"refusals by wire", epbuf::test_refusals_by_wire},
      {"mismatch", epbuf::test_mismatch},
      {"time-out", epbuf::test_timeout},
      {"abort", epbuf::test_abort},
  };
  for (const auto& [name, run] : scenarios) {
    run();
    std::printf("driver: %s ok\n", name);
    std::fflush(stdout);
  }
  return 0;
}
