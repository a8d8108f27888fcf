// The stash: pages that hold received rows from combine to combine backward, one pool for all frames of the rank.
#include <algorithm>
#include <cstring>

#include "context.h"

namespace epbuf {
namespace {

// The pages of one frame. Free ones lie in a stack: its numbers from `num_taken` on.
class FramePages {
 public:
  FramePages(const Context& context, std::int32_t frame)
      : format_(context.geometry().stash),
        counters_(*context.windows().own<StashCounters>(context.arena().stash_counters)),
        free_(context.windows().own<std::int32_t>(context.arena().stash_free)),
        pages_(context.windows().own<std::byte>(context.arena().stash_pages)),
        table_(*context.windows().own<StashTable>(context.frame(frame).stash_table)),
        numbers_(reinterpret_cast<std::int32_t*>(&table_ + 1)) {}

  // False: there are fewer than the rows need; the frame has what there is.
  bool take(std::int64_t num_rows) {
    table_.num_wanted = static_cast<std::int32_t>((num_rows + format_.page_rows - 1) / format_.page_rows);
    table_.num_pages = std::min(table_.num_wanted, format_.num_pages - counters_.num_taken);
    std::copy_n(free_ + counters_.num_taken, table_.num_pages, numbers_);
    counters_.num_taken += table_.num_pages;
    counters_.num_wanted += table_.num_wanted;
    counters_.peak_pages = std::max(counters_.peak_pages, counters_.num_wanted);
    return table_.num_pages == table_.num_wanted;
  }

  void give_back() {
    counters_.num_taken -= table_.num_pages;
    counters_.num_wanted -= table_.num_wanted;
    std::copy_n(numbers_, table_.num_pages, free_ + counters_.num_taken);
    table_ = {0, 0};
  }

  // Null: the frame has no such page.
  std::byte* page(std::int64_t index) const {
    return index < table_.num_pages ? pages_ + numbers_[index] * format_.page_bytes : nullptr;
  }

 private:
  const StashFormat& format_;
  StashCounters& counters_;
  std::int32_t* free_;
  std::byte* pages_;
  StashTable& table_;
  std::int32_t* numbers_;
};

// One part of the received rows: where it lies, and where in a page.
struct Part {
  std::int64_t region;  // -1: the payload has none
  std::int64_t page_offset;
  std::int64_t row_bytes;
};

void move_part(const Context& context, const StashCall& call, const FramePages& pages, const Part& part) {
  const std::int64_t num_rows = context.num_live_rows(call.frame);
  const std::int64_t page_rows = context.geometry().stash.page_rows;
  for (std::int64_t first = 0; part.region >= 0 && first < num_rows; first += page_rows) {
    const auto num_bytes = static_cast<std::size_t>(std::min(page_rows, num_rows - first) * part.row_bytes);
    std::byte* rows = context.windows().own<std::byte>(part.region) + first * part.row_bytes;
    std::byte* page = pages.page(first / page_rows);
    if (page == nullptr) {
      if (call.move == kRestoreRows) std::memset(rows, 0, num_bytes);
    } else if (call.move == kRestoreRows) {
      std::memcpy(rows, page + part.page_offset, num_bytes);
    } else {
      std::memcpy(page + part.page_offset, rows, num_bytes);
    }
  }
}

void move_rows(const Context& context, const StashCall& call, const FramePages& pages) {
  const PushTarget rows = context.received(call.frame, call.workspace);
  const StashFormat& format = context.geometry().stash;
  move_part(context, call, pages, {rows.rows, 0, context.row_bytes(rows.format)});
  move_part(context, call, pages, {rows.scales, format.scales_offset, rows.format.scale_row_bytes});
  move_part(context, call, pages, {rows.row_scales, format.row_scales_offset, sizeof(float)});
}

}  // namespace

bool take_pages(const Context& context, std::int32_t frame) {
  FramePages pages(context, frame);
  pages.give_back();
  return pages.take(context.num_live_rows(frame));
}

void check_stash(const Context& context, const StashCall& call) { context.check_stash(call); }

// Readers of the workspace are awaited before rows come back: the frame has all of it from then on. Not an op of its
// own: it has the number of the one that it belongs to, and compares no PROGRESS.
Status run_stash(const Context& context, const StashCall& call) {
  const OpState op{kOpCombineBackward, call.frame, call.workspace, false, context.control().snapshot().call};
  if (call.move == kRestoreRows) EPBUF_TRY(context.await_ack(op, call.workspace));
  FramePages pages(context, call.frame);
  if (call.move != kStashNothing) move_rows(context, call, pages);
  if (call.returns_pages != 0) pages.give_back();
  return kOk;
}

}  // namespace epbuf
