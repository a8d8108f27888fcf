// The plain structs shared by Python, the host engine and the CUDA kernels.
// No size arithmetic lives here: offsets come from epbuf/plan.py, one struct field per region of the plan.
// Addresses and streams are 64-bit integers, offsets are bytes from the start of a rank's window.
#pragma once

#include <cstdint>

namespace epbuf {

// One 8-byte signal. It lives in the window of the rank that polls it; exactly one rank writes it.
struct alignas(8) Cell {
  std::uint32_t epoch;
  std::uint32_t value;
};

constexpr std::uint32_t kCountHeader = 8;  // cells of a COUNT row that follow its E counts, indexed by CountHeader
enum CountHeader : std::uint32_t {
  kHeaderRefusal = 0,      // Refusal, 0: none
  kHeaderNumBadIds = 1,    // ids >= E on this rank
  kHeaderBadToken = 2,     // token index of the first of them
  kHeaderBadTopk = 3,      // its k
  kHeaderBadValueLow = 4,  // the id itself
  kHeaderBadValueHigh = 5,
  kHeaderNumTokens = 6,  // live tokens of this rank
  kHeaderReserved = 7,
};

// Where engines whose kernels are not ours gather counts instead, a row of a rank is int64 [E + 8]: ids that mean no
// expert, E counts, and behind column E these. COUNT's cells have room for it.
enum CountColumn : std::uint32_t {
  kColumnNumBadIds = 1,  // ids >= E
  kColumnRefusal = 2,    // Refusal, 0: none
  kColumnBadToken = 3,   // of the first bad id: token index, k, the id itself
  kColumnBadTopk = 4,
  kColumnBadValue = 5,
};

enum Op : std::uint32_t {
  kOpNone = 0,
  kOpRoute = 1,
  kOpDispatch = 2,
  kOpCombine = 3,
  kOpCombineBackward = 4,
  kOpDispatchBackward = 5,
};

enum Phase : std::uint32_t {
  kPhaseNone = 0,
  kPhaseCount = 1,
  kPhaseArrived = 2,
  kPhaseReady = 3,
  kPhaseAck = 4,
  kPhaseGo = 5,
  kPhaseGradArrived = 6,
  kPhaseGradReady = 7,
  kPhaseGradAck = 8,
};

enum Status : std::uint32_t {
  kOk = 0,
  kRefused = 1,   // some rank refused; the round is complete on every rank and nothing moved
  kTimeout = 2,   // a peer's cell did not come within timeout_us; the arena is poisoned
  kMismatch = 3,  // a peer issued another (op, frame, workspace) as the same call; poisoned
  kAborted = 4,   // a peer abandoned the arena; poisoned
  kPoisoned = 5,  // the arena was poisoned before this call; nothing was done
};

// Why a rank refuses. Travels in COUNT's header, ARRIVED, READY and GO. 0 means "no refusal".
enum Refusal : std::uint32_t {
  kRefusalNone = 0,
  kRefusalArgument = 1,
  kRefusalDtype = 2,
  kRefusalShape = 3,
  kRefusalDevice = 4,
  kRefusalStrides = 5,
  kRefusalAlignment = 6,
  kRefusalTooManyTokens = 7,
  kRefusalOverlap = 8,
  kRefusalCallOrder = 9,
  kRefusalLease = 10,
  kRefusalWorkspace = 11,
  kRefusalCopiedRegion = 12,
  kRefusalInternal = 13,
  kRefusalRepeatedExpert = 14,  // only of engines whose kernels are not ours
};

// In the value of ARRIVED beside the refusal: the rank had too few pages of the stash for what it received.
constexpr std::uint32_t kStashFull = 1u << 31;

// PROGRESS packs what a rank is doing into a cell: epoch = call number, value = op | frame | workspace.
constexpr std::uint32_t kProgressOpShift = 28;
constexpr std::uint32_t kProgressOpMask = 7;
constexpr std::uint32_t kProgressUnchecked = 1u << 31;  // the op may overlap others of its rank: equal to any other
constexpr std::uint32_t kProgressFrameShift = 14;
constexpr std::uint32_t kProgressIndexMask = 0x3FFF;
constexpr std::uint32_t kAnyWorkspace = 0x3FFF;  // a refusing rank that holds no workspace; compares equal to all

// ABORT's value: why the sender gave up (Status, or the caller's reason), and whom it blames (rank + 1; 0: nobody), so
// that every rank names the rank that is missing and not the first one that noticed.
constexpr std::uint32_t kAbortReasonMask = 0xFF;
constexpr std::uint32_t kAbortBlameShift = 8;

// slot_map entries: destination rank in the upper half, row in the lower half; kNoSlot: dropped or no expert.
constexpr std::uint32_t kSlotRankShift = 32;
constexpr std::int64_t kNoSlot = -1;

// The first failure of this rank, written once, read by the host.
struct ErrorRecord {
  std::uint32_t status;  // Status
  std::uint32_t op;      // Op of this rank's call
  std::uint32_t phase;   // Phase that waited
  std::int32_t peer;     // rank whose cell was awaited
  std::uint32_t call;    // this rank's call number
  std::uint32_t frame;
  std::uint32_t workspace;
  std::uint32_t expected_epoch;
  std::uint32_t seen_epoch;
  std::uint32_t peer_call;      // the peer's PROGRESS at that moment
  std::uint32_t peer_progress;  // packed as above
  std::uint32_t reserved;
};

// Region `control`, one per rank, zeroed in Arena.open.
struct Control {
  std::uint32_t poisoned;  // Status of the failure, 0 while healthy
  std::uint32_t call;      // ops issued on this rank
  ErrorRecord error;
  std::uint64_t num_refusals;
  std::int32_t refusing_rank;  // of the latest refusal
  std::uint32_t refusal;       // Refusal
  std::uint32_t refused_op;    // Op
  std::uint32_t bad_topk;
  std::uint64_t num_overflows;  // dispatches in which some rank overflowed
  std::uint64_t num_early_reuses;
  std::uint64_t num_bad_ids;  // summed over ranks and rounds
  std::int64_t bad_value;     // the first bad id of the latest round with any: rank, token, k (bad_topk), value
  std::int32_t bad_rank;
  std::int32_t bad_token;
  std::uint64_t staged_bytes;
  std::int64_t max_demand_rows;  // of the latest overflow, the largest demand and the lowest rank that has it
  std::int32_t max_demand_rank;
  std::int32_t stash_rank;            // of the latest stash overflow, the lowest rank that had too few pages
  std::uint64_t num_stash_overflows;  // dispatches in which some rank had
};

// Region `frame_counters`, one per frame.
struct FrameCounters {
  std::uint32_t round;  // rounds begun on this frame; COUNT and ARRIVED carry it
  std::uint32_t open;   // OPEN word: 1 from dispatch to the first dispatch backward of its ticket
  std::int64_t demand_peak_rows;
};

// Region `forward_counters`, one per forward workspace. READY and ACK carry `use`.
struct ForwardCounters {
  std::uint32_t use;  // READYs published by this rank
  std::uint32_t reserved;
};

// Region `backward_counters`, one per backward workspace. GO, ARRIVED, READY and ACK carry `use`.
struct BackwardCounters {
  std::uint32_t use;         // uses begun (GO, or a dispatch backward without one)
  std::uint32_t last_ready;  // the last use whose READY this rank published; ACK is awaited for it
};

// Region `stash_counters`. The numbers of free pages are those of region `stash_free` from `num_taken` on.
struct StashCounters {
  std::uint32_t lock;       // held by the kernel that takes or returns pages; on the host unused
  std::int32_t num_taken;   // pages that frames have
  std::int32_t num_wanted;  // pages that they would have if there were enough
  std::int32_t peak_pages;  // the most that were wanted at once
};

// Region `stash_table`, one per frame that stashes: the numbers of its pages follow, in the order of the rows.
struct StashTable {
  std::int32_t num_pages;
  std::int32_t num_wanted;
};

// -1 (stash_*): the plan has none.
struct ArenaOffsets {
  std::int64_t control, abort_cells, progress_cells, frame_counters, forward_counters, backward_counters;
  std::int64_t stash_counters, stash_free, stash_pages;
};

struct FrameOffsets {
  std::int64_t count_cells, arrived_cells, slot_map, offs, counts, overflow, recv_topk_weights;
  std::int64_t recv_tokens, recv_scales, recv_row_scales;  // -1 when the plan keeps them in the forward workspace
  std::int64_t stash_table;                                // -1 when received rows are not stashed
};

struct ForwardOffsets {
  std::int64_t ready_cells, ack_cells, route_base, route_scratch, expert_out;
  std::int64_t recv_tokens, recv_scales, recv_row_scales;  // -1 when the plan keeps them in the frame
  std::int64_t recv_scales_wire;                           // -1 when scales are received where they lie
  std::int64_t wire_rows;                                  // -1 when every row crosses on its own, both ways
};

struct BackwardOffsets {
  std::int64_t go_cells, grad_arrived_cells, grad_ready_cells, grad_ack_cells;
  std::int64_t grad_expert_out, grad_expert_out_scales, grad_expert_out_row_scales;
  std::int64_t grad_expert_out_scales_wire;  // -1 when scales are received where they lie
  std::int64_t grad_recv_tokens, grad_recv_topk_weights;
  std::int64_t grad_wire_rows;  // -1 when every row crosses on its own, both ways
};

constexpr std::int32_t kMaxTopk = 64;

enum TokenDtype : std::int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

enum Format : std::int32_t { kSame = 0, kMxfp8 = 1, kFp8Block128 = 2, kNvfp4 = 3, kRaw = 4 };

// How rows of one direction travel and lie in the receive regions. kSame ignores the sizes: rows of token_row_bytes.
struct RowFormat {
  std::int32_t format;           // Format
  std::int32_t is_blocked;       // scales lie in 128x4 tiles (formats.h), else row by row; they travel row by row
  std::int64_t row_bytes;        // data of a row
  std::int64_t scale_row_bytes;  // block scales of a row where they lie, padding included; 0: none
  std::int64_t wire_row_bytes;   // and as they travel: a multiple of 16
  std::int64_t scale_bytes;      // block scales of a row without it
};

// Rows of `wire_rows` [R * T, row_bytes]: that of token t of rank r is r * max_tokens_per_rank + t. It holds a row as
// it travels, data and block scales, or the sum of the token's rows on the region's rank (wire.h).
struct WireFormat {
  std::int64_t row_bytes;      // from one row to the next
  std::int64_t scales_offset;  // from the start of a row
};

// The pages of the stash. A page holds data, then block scales, then row scales of `page_rows` rows, as they lie in the
// receive regions.
struct StashFormat {
  std::int32_t num_pages, page_rows;
  std::int64_t page_bytes;
  std::int64_t scales_offset, row_scales_offset;  // from the start of a page
};

// What every op of an arena has in common.
struct Geometry {
  std::int32_t rank, num_ranks, num_experts, num_local_experts, num_topk, hidden;
  std::int32_t expert_alignment, max_tokens_per_rank;
  std::int32_t token_dtype;  // TokenDtype
  std::int32_t max_num_sms;  // 0: no limit
  std::int64_t capacity_rows;
  std::int64_t token_row_bytes;     // hidden * itemsize
  std::int64_t route_chunk_tokens;  // tokens per row of route_scratch
  std::uint64_t timeout_us;
  RowFormat recv;  // of dispatch
  RowFormat grad;  // of combine backward
  StashFormat stash;
  WireFormat wire, grad_wire;  // of wire_rows and of grad_wire_rows
  std::int32_t dedups;         // dispatch and combine backward use them
  std::int32_t adds_by_rank;   // combine and dispatch backward do
};

// Where a call's rows come from.
enum Source : std::uint32_t {
  kSourceTensor = 0,  // an ordinary tensor: stage (or push) it from `rows`
  kSourceWindow = 1,  // the producer wrote into our region: nothing to stage
  kSourceZero = 2,    // a missing gradient: rows of zeros
};

// COUNT: publish E counts, await everybody's, compute slots, zones and overflow.
struct RouteCall {
  std::int32_t frame, workspace;  // workspace -1: a refusing rank that holds none
  std::uint32_t refusal;          // Refusal of this rank
  std::uint32_t check_progress;   // 0: the plan has several workspaces, so that ops of the arena may overlap
  std::uint64_t stream;
  std::uint64_t topk_idx;            // [T, K] int32 or int64
  std::int64_t topk_idx_row_stride;  // elements
  std::int32_t topk_idx_bytes;       // 4 or 8
  std::int32_t num_tokens;           // T
  std::uint64_t live_tokens;         // address of [1] int32/int64, or 0: all T are live
  std::int32_t live_tokens_bytes;    // 4 or 8
  std::uint32_t repeats;             // the same tokens once more, inside combine backward: counts nothing again
};

// Local, where other kernels move rows: zones, counts, overflow and records from the rows that all ranks gathered, and
// -1 in sent_ids for rows that the capacity drops.
struct SummariseCall {
  std::int32_t frame;
  std::int32_t num_tokens;  // T
  std::uint64_t stream;
  std::uint64_t count_rows;  // int64 [R, E + 8], see CountColumn
  std::uint64_t sent_ids;    // int64 [T, K]
  std::uint64_t mirror;      // pinned Control to mirror records to
};

// Push rows into the peers' slots, zero own padding (data, scales and row scales), publish and await ARRIVED.
// Rows are encoded on the way, unless the format is kSame or kRaw or `scales` says that they are encoded already: then
// `rows` are [T, row_bytes], `scales` [T, scale_bytes] row by row whatever the layout, `row_scales` [T] float32
// (nvfp4). Forward: frame's round, recv_tokens. Backward (combine backward): ACK, GO, grad_expert_out of `workspace`.
struct DispatchCall {
  std::int32_t frame, workspace;
  std::uint32_t refusal;
  std::uint32_t check_progress;
  std::uint64_t stream;
  std::uint64_t rows;  // [T, H], or encoded; 0: rows of zeros
  std::int64_t row_stride_bytes;
  std::uint64_t scales, row_scales;  // of an encoded input; 0 otherwise
  std::int64_t scales_row_stride_bytes;
  std::uint64_t topk_weights;            // [T, K] float32; 0: ones (forward), unused (backward)
  std::int64_t topk_weights_row_stride;  // elements
  std::int32_t num_tokens;               // T
  std::uint32_t expects_open;            // backward: count an early reuse when OPEN is clear
  std::uint32_t repeats;                 // the frame has the weights, and OPEN stays as it is
  std::uint32_t reserved;
};

// Stage rows below offs[-1] (times weights), publish and await READY, pull; publish ACK where somebody awaits it.
// Forward: expert_out of the forward workspace -> y. Backward (dispatch backward): grad_recv_* -> dx, dw.
struct CombineCall {
  std::int32_t frame, workspace;
  std::uint32_t refusal;
  std::uint32_t check_progress;
  std::uint64_t stream;
  std::uint64_t rows;  // [C, H]
  std::int64_t row_stride_bytes;
  std::uint32_t rows_source;     // Source
  std::uint32_t weights_source;  // Source; forward: kSourceTensor multiplies rows by `weights`, kSourceZero: no weights
  std::uint64_t weights;         // [C] float32, contiguous: forward factors, backward the gradient of recv_topk_weights
  std::uint64_t out;             // [T, H]; 0: this rank does not need it (backward of a frozen input)
  std::int64_t out_row_stride_bytes;
  std::uint64_t out_weights;  // backward: [T, K] float32 contiguous; 0: not needed
  std::int32_t num_tokens;    // T
  std::uint32_t begins_use;   // backward: no combine backward began this use: await ACK and begin it here
  std::uint32_t clears_open;  // backward: first dispatch backward of its ticket
  std::uint32_t reserved;
};

// Local, after combine backward of a weighted combine: for rows below offs[-1]
//   grad_weights[row] = <expert_out[row], g[row]>, then g[row] *= weights[row] in place; g is grad_expert_out, or
//   `grad_rows` when gradients travel encoded.
struct WeightGradCall {
  std::int32_t frame, workspace;
  std::uint64_t stream;
  std::uint64_t expert_out;  // [C, H] token dtype, as given to combine
  std::int64_t expert_out_row_stride_bytes;
  std::uint64_t weights;       // [C] float32
  std::uint64_t grad_weights;  // [C] float32, written below offs[-1]
  std::uint64_t grad_rows;     // [C, H] token dtype, contiguous; 0: grad_expert_out of the workspace
};

// Local: rows below offs[-1] and num_rows, from a quantised format back to the token dtype. Other rows are not read.
struct DecodeCall {
  std::int32_t frame, workspace;
  std::uint64_t stream;
  std::uint64_t data, scales, row_scales;  // as they lie in the receive regions
  std::int64_t row_stride_bytes, scales_row_stride_bytes;
  std::uint64_t out;  // [num_rows, H], contiguous
  std::int64_t num_rows;
  std::uint32_t is_grad;  // in which format: 0 that of dispatch, 1 that of combine backward
  std::uint32_t reserved;
};

enum StashMove : std::uint32_t {
  kStashNothing = 0,
  kStashRows = 1,    // received rows below offs[-1] into the pages that the frame's dispatch took
  kRestoreRows = 2,  // back, once the readers of the workspace are done; zeros for rows that had no page
};

// Local, at the end of combine and of combine backward.
struct StashCall {
  std::int32_t frame, workspace;  // where dispatch put the rows
  std::uint64_t stream;
  std::uint32_t move;           // StashMove
  std::uint32_t returns_pages;  // then give the frame's pages back
};

// What a host call answers at once. On CUDA only `status` kPoisoned is known at the call; the rest is read by check().
struct Outcome {
  std::uint32_t status;  // Status
  std::int32_t refusing_rank;
  std::uint32_t refusal;   // Refusal
  std::uint32_t overflow;  // 1: some rank's demand exceeds capacity_rows; of dispatch: some rank lacks pages
  std::int64_t max_demand_rows;
  std::int32_t max_demand_rank;
  std::int32_t bad_rank;      // first bad id of the lowest rank that has one
  std::uint64_t num_bad_ids;  // over all ranks
  std::int64_t bad_value;
  std::int32_t bad_token, bad_topk;
  std::int32_t stash_rank;  // the lowest rank that lacks pages of the stash
  std::uint32_t reserved;
};

// Fields that end in `_region` or `_cells`, and those of ArenaOffsets, are offsets in every rank's window. All other
// 64-bit unsigned fields are addresses in this process, 0 where nothing is there.

// What every kernel knows of its rank, its arena and its call.
struct KernelCall {
  std::uint64_t peers;    // uint64 [R]: base of every rank's window
  std::uint64_t mirror;   // Control in pinned memory, which the host reads without a synchronisation
  std::uint64_t lock;     // uint32: guards Control's records and the mirror
  std::uint64_t refused;  // uint32 of the frame: `order` of a refused round, 0: none. Later ones do nothing
  std::uint64_t timeout_us;
  std::uint64_t window;  // peers[rank]
  std::int64_t control, abort_cells, progress_cells;
  std::int32_t rank, num_ranks;
  std::int32_t frame, workspace;
  std::uint32_t op;  // Op
  std::uint32_t refusal;
  std::uint32_t check_progress;
  std::uint32_t order;  // in the life of a dispatch: route 1, dispatch 2, combine 3, combine backward 4, route and
                        // dispatch that repeat 5 and 6, dispatch backward 7
};

// The routing of a call's tokens, as in RouteCall.
struct KernelIds {
  std::uint64_t topk_idx, live_tokens;
  std::int64_t row_stride;  // elements
  std::int32_t topk_idx_bytes, live_tokens_bytes;
  std::int32_t num_tokens, num_topk;
};

// route, first of three: one block counts the experts of one chunk of tokens.
struct RouteCountKernel {
  KernelCall call;
  KernelIds ids;
  std::uint64_t route_scratch;  // int32 [chunks, E]: out, counts of the chunk
  std::uint64_t bad_ids;        // uint64 [2]: ids >= E so far, the lowest token * K + k among them
  std::int32_t num_experts, chunk_tokens;
};

// What RouteExchangeKernel does, in this order. The engine asks for all of it in one launch; tests with virtual ranks
// ask for one step at a time, each on all ranks before the next.
constexpr std::uint32_t kRoutePublish = 1;       // publish COUNT; many tokens: turn route_scratch into prefixes
constexpr std::uint32_t kRouteAwait = 2;         // await COUNT, lay the zones; refused: publish ARRIVED
constexpr std::uint32_t kRouteAwaitRefused = 4;  // refused: await ARRIVED

// route, second of three: one block that talks to the peers. Or, for few tokens, all of route, by a cluster.
struct RouteExchangeKernel {
  KernelCall call;
  KernelIds ids;
  std::uint64_t route_scratch, bad_ids;
  std::uint64_t route_base;      // int64 [E]: out, the slot of this rank's first token for each expert
  std::uint64_t frame_counters;  // FrameCounters
  std::uint64_t offs, counts, overflow;
  std::uint64_t slot_map;  // int64 [T, K]: out, when few tokens make the other two kernels unnecessary
  std::int64_t count_cells, arrived_cells;
  std::int64_t capacity_rows;
  std::int32_t num_experts, num_local_experts, expert_alignment, chunk_tokens;
  std::uint32_t steps;
  std::uint32_t repeats;  // count no overflow, no peak and no bad id
};

// route, third: one block turns the ids of one chunk into slots.
struct RouteSlotsKernel {
  KernelCall call;
  KernelIds ids;
  std::uint64_t route_scratch, route_base, slot_map;
  std::int64_t capacity_rows;
  std::int32_t num_experts, num_local_experts, chunk_tokens;
  std::uint32_t reserved;
};

// Instead of these three where other kernels move rows: before ranks gather their rows of counts ...
struct CountIdsKernel {
  KernelCall call;
  KernelIds ids;
  std::uint64_t sent_ids;   // int64 [T, K]: out, -1 for what is not sent
  std::uint64_t count_row;  // int64 [E + 8]: out, see CountColumn
  std::int32_t num_experts;
  std::uint32_t reserved;
};

// ... and after it.
struct SummariseKernel {
  KernelCall call;
  std::uint64_t count_rows;      // int64 [R, E + 8]
  std::uint64_t frame_counters;  // FrameCounters
  std::uint64_t offs, counts, overflow;
  std::uint64_t sent_ids;  // int64 [T, K]: on an overflow -1 for rows at or past the capacity
  std::uint64_t slot_map;  // int64 [T, K]: then out, the slots
  std::int64_t capacity_rows;
  std::int32_t num_experts, num_local_experts, expert_alignment;
  std::int32_t num_slots;  // T * K
};

// What SignalKernel does, in this order.
constexpr std::uint32_t kSignalBegin = 1;             // number the call, publish PROGRESS
constexpr std::uint32_t kSignalAwaitAck = 2;          // await `ack_cells` = *ack_use
constexpr std::uint32_t kSignalAdvance = 4;           // ++*epoch
constexpr std::uint32_t kSignalPublish = 8;           // publish {*epoch, refusal} in `cells`
constexpr std::uint32_t kSignalMarkReady = 16;        // *ack_use = *epoch
constexpr std::uint32_t kSignalAwait = 32;            // await `cells` = *epoch
constexpr std::uint32_t kSignalJudge = 64;            // a refusal among `cells`: record it, mark the frame
constexpr std::uint32_t kSignalPublishRefused = 128;  // refused: publish {*epoch, 0} in `ack_cells`
constexpr std::uint32_t kSignalAwaitRefused = 256;    // refused: await `ack_cells` = *epoch
constexpr std::uint32_t kSignalExpectOpen = 512;      // unless refused: count an early reuse when OPEN is clear
constexpr std::uint32_t kSignalSetOpen = 1024;        // unless refused: OPEN = 1
constexpr std::uint32_t kSignalClearOpen = 2048;      // unless refused: OPEN = 0

// The one warp that talks to the peers before and after rows move.
struct SignalKernel {
  KernelCall call;
  std::uint64_t epoch;           // uint32: round of the frame or use of the workspace
  std::uint64_t ack_use;         // uint32
  std::uint64_t frame_counters;  // FrameCounters
  std::int64_t cells, ack_cells;
  std::uint32_t phase, ack_phase;  // Phase of `cells` and of `ack_cells`
  std::uint32_t steps;
  std::uint32_t reserved;
  std::uint64_t stash_table;  // StashTable of the frame; 0: it stashes nothing
  std::uint64_t overflow;     // float32 of the frame: 1 as well when pages are missing
};

// dispatch and combine backward: rows into the peers' slots, zeros into the own padding.
struct PushKernel {
  KernelCall call;
  std::uint64_t rows;  // [T, H]; 0: zeros
  std::int64_t row_stride_bytes;
  std::uint64_t weights;  // [T, K] float32; 0: ones
  std::int64_t weights_row_stride;
  std::uint64_t slot_map, offs;
  std::uint64_t valid;                       // int64 [L]: valid_tokens_per_expert
  std::int64_t rows_region, weights_region;  // weights_region -1: no weights travel
  std::int64_t row_bytes;                    // in the region
  std::int32_t num_tokens, num_topk, num_local_experts;
  std::int32_t num_splits;  // warps that share a row
  std::int32_t hidden, reserved;
  RowFormat format;
  std::uint64_t scales, row_scales;  // of rows that are encoded already; 0 otherwise
  std::int64_t scales_row_stride_bytes;
  std::int64_t scales_region, row_scales_region;  // -1: none travel
  std::int64_t wire_region;                       // wire_rows; -1: every row goes to its slot
  WireFormat wire;
  std::int32_t max_tokens;     // rows of slot_map, for peers that read it: those behind num_tokens say "no slot"
  std::uint32_t shares_slots;  // they do
};

// dispatch and combine backward, after the round: rows of wire_rows into their slots on this rank. combine and dispatch
// backward, before it: the sums of rows of this rank into wire_rows.
struct WireKernel {
  KernelCall call;
  std::int64_t slot_map;  // region [T, K] int64, read at the peers
  std::uint64_t wire;     // wire_rows of this rank
  WireFormat wire_format;
  std::uint64_t rows;    // recv_tokens or grad_expert_out; expert_out or grad_recv_tokens
  std::uint64_t scales;  // of the first two; 0: none
  std::int64_t row_bytes;
  std::int64_t scale_bytes;  // of a row as it travels
  std::int32_t max_tokens, num_topk;
  std::int32_t num_splits;  // warps that share a row
  std::uint32_t reserved;
};

// Scales of received rows, as they travelled, into 128x4 tiles.
struct TileKernel {
  KernelCall call;
  std::uint64_t wire, tiles;
  std::uint64_t num_rows;                        // int32: offs[-1], a multiple of 128
  std::int64_t wire_row_bytes, scale_row_bytes;  // multiples of 16 and of 4
};

// Rows of a receive region below offs[-1] and num_rows, back to the token dtype.
struct DecodeKernel {
  KernelCall call;
  std::uint64_t data, scales, row_scales, out;
  std::int64_t row_stride_bytes, scales_row_stride_bytes, out_row_bytes;
  std::uint64_t num_live_rows;  // int32: offs[-1]
  std::int64_t num_rows;
  std::int32_t hidden, reserved;
  RowFormat format;
};

// combine and dispatch backward: own rows below offs[-1] into the window.
struct StageKernel {
  KernelCall call;
  std::uint64_t rows;
  std::int64_t row_stride_bytes;
  std::uint64_t factors;  // [C] float32 that multiply the rows; 0: none
  std::uint64_t weights;  // [C] float32, copied to staged_weights
  std::uint64_t staged_rows, staged_weights;
  std::uint64_t num_rows;  // int32: offs[-1]
  std::int64_t row_bytes;
  std::uint32_t rows_source, weights_source;  // Source
  std::int32_t num_splits;
  std::uint32_t reserved;
};

// combine and dispatch backward: the sum of each token's rows at the peers, and their weights.
struct PullKernel {
  KernelCall call;
  std::uint64_t slot_map;
  std::uint64_t out;  // [T, H]; 0: not wanted
  std::int64_t out_row_stride_bytes;
  std::uint64_t out_weights;  // [T, K] float32; 0: not wanted
  std::int64_t rows_region, weights_region;
  std::int64_t row_bytes;
  std::int32_t num_tokens, num_topk;
  std::int32_t num_splits;  // warps that share a row
  std::int32_t max_tokens;
  std::int64_t wire_region;  // wire_rows, where sums by rank lie; -1: rows are added in k order
  std::int64_t wire_row_bytes;
};

// The backward of a weighted combine's multiplication, in place on grad_expert_out.
struct WeightGradKernel {
  KernelCall call;
  std::uint64_t expert_out;
  std::int64_t expert_out_row_stride_bytes;
  std::uint64_t weights, grad_weights;
  std::uint64_t grad_rows;  // this rank's grad_expert_out
  std::uint64_t num_rows;   // int32: offs[-1]
  std::int64_t row_bytes;
};

// dispatch, and after rows were stashed or restored: the frame returns its pages and, for `takes`, takes new ones.
struct PagesKernel {
  KernelCall call;
  std::uint64_t counters, free_pages, table;  // StashCounters; int32 [num_pages]; StashTable
  std::uint64_t num_rows;                     // int32: offs[-1]
  std::int32_t num_pages, page_rows;
  std::uint32_t takes;
  std::uint32_t reserved;
};

// One part of the rows: data, block scales or row scales, in both places in the order of the rows.
struct StashPart {
  std::uint64_t region;      // of rows as they were received
  std::int64_t page_offset;  // from the start of a page
  std::int64_t row_bytes;    // 0: no such part
};

// combine and combine backward: received rows below offs[-1] into the frame's pages, or back.
struct StashKernel {
  KernelCall call;
  std::uint64_t pages, table;  // uint8 [num_pages, page_bytes]; StashTable
  std::uint64_t num_rows;      // int32: offs[-1]
  std::int64_t page_bytes;
  std::int32_t page_rows;
  std::uint32_t restores;
  StashPart parts[3];
};

// Poison this rank's arena and tell the peers.
struct AbortKernel {
  KernelCall call;
  std::uint32_t reason;
  std::uint32_t reserved;
};

}  // namespace epbuf
