// The module epbuf._C: converts, releases the GIL, translates errors. What it exposes is typed in epbuf/_C.pyi.
#include "bindings.h"

#include <pybind11/native_enum.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "check.h"
#include "handle_table.h"
#include "host/engine.h"
#include "host/segment.h"

namespace py = pybind11;

namespace epbuf {
namespace {

// The package is looked up when the error is raised, so that the module imports nothing when it is loaded.
void translate_native_error(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const NativeError& native) {
    const py::object type = py::module_::import("epbuf.errors").attr("NativeError");
    py::set_error(type, native.what());
  }
}

template <typename Struct>
void bind_fields(py::class_<Struct>&) {}

template <typename Struct, typename Field, typename... Rest>
void bind_fields(py::class_<Struct>& cls, const char* name, Field Struct::* field, Rest... rest) {
  cls.def_readwrite(name, field);
  bind_fields(cls, rest...);
}

// `fields`: name, member, name, member, ...
template <typename Struct, typename... Fields>
py::class_<Struct> bind_struct(py::module_& m, const char* name, Fields... fields) {
  py::class_<Struct> cls(m, name);
  cls.def(py::init([] { return Struct{}; }));
  bind_fields(cls, fields...);
  return cls;
}

// A constructor from the values of some fields, the others 0: one call from Python instead of one per field, which is
// what the struct of an eager op would otherwise cost most.
template <typename Struct, typename... Field>
auto from_values(Field Struct::*... field) {
  return py::init([field...](Field... value) {
    Struct made{};
    ((made.*field = value), ...);
    return made;
  });
}

// Offsets of regions start as -1, "the plan has none": all bits set.
template <typename Struct, typename... Fields>
void bind_offsets(py::module_& m, const char* name, Fields... fields) {
  py::class_<Struct> cls(m, name);
  cls.def(py::init([] {
    Struct offsets;
    std::memset(&offsets, 0xFF, sizeof offsets);
    return offsets;
  }));
  bind_fields(cls, fields...);
}

void bind_control(py::module_& m) {
  using E = ErrorRecord;
  bind_struct<E>(m, "ErrorRecord", "status", &E::status, "op", &E::op, "phase", &E::phase, "peer", &E::peer, "call",
                 &E::call, "frame", &E::frame, "workspace", &E::workspace, "expected_epoch", &E::expected_epoch,
                 "seen_epoch", &E::seen_epoch, "peer_call", &E::peer_call, "peer_progress", &E::peer_progress);
  using C = Control;
  auto control = bind_struct<C>(
      m, "Control", "poisoned", &C::poisoned, "call", &C::call, "error", &C::error, "num_refusals", &C::num_refusals,
      "refusing_rank", &C::refusing_rank, "refusal", &C::refusal, "refused_op", &C::refused_op, "num_overflows",
      &C::num_overflows, "num_early_reuses", &C::num_early_reuses, "num_bad_ids", &C::num_bad_ids, "bad_value",
      &C::bad_value, "bad_rank", &C::bad_rank, "bad_token", &C::bad_token, "bad_topk", &C::bad_topk, "staged_bytes",
      &C::staged_bytes, "max_demand_rows", &C::max_demand_rows, "max_demand_rank", &C::max_demand_rank, "stash_rank",
      &C::stash_rank, "num_stash_overflows", &C::num_stash_overflows);
  control.def_static("at", [](std::uint64_t address) {
    C copy;
    std::memcpy(&copy, reinterpret_cast<const void*>(address), sizeof copy);
    return copy;
  });
}

void bind_counters(py::module_& m) {
  using F = FrameCounters;
  bind_struct<F>(m, "FrameCounters", "round", &F::round, "open", &F::open, "demand_peak_rows", &F::demand_peak_rows);
  bind_struct<ForwardCounters>(m, "ForwardCounters", "use", &ForwardCounters::use);
  using B = BackwardCounters;
  bind_struct<B>(m, "BackwardCounters", "use", &B::use, "last_ready", &B::last_ready);
}

void bind_layout(py::module_& m) {
  using A = ArenaOffsets;
  bind_offsets<A>(m, "ArenaOffsets", "control", &A::control, "abort_cells", &A::abort_cells, "progress_cells",
                  &A::progress_cells, "frame_counters", &A::frame_counters, "forward_counters", &A::forward_counters,
                  "backward_counters", &A::backward_counters, "stash_counters", &A::stash_counters, "stash_free",
                  &A::stash_free, "stash_pages", &A::stash_pages);
  using F = FrameOffsets;
  bind_offsets<F>(m, "FrameOffsets", "count_cells", &F::count_cells, "arrived_cells", &F::arrived_cells, "slot_map",
                  &F::slot_map, "offs", &F::offs, "counts", &F::counts, "overflow", &F::overflow, "recv_topk_weights",
                  &F::recv_topk_weights, "recv_tokens", &F::recv_tokens, "recv_scales", &F::recv_scales,
                  "recv_row_scales", &F::recv_row_scales, "stash_table", &F::stash_table);
  using W = ForwardOffsets;
  bind_offsets<W>(m, "ForwardOffsets", "ready_cells", &W::ready_cells, "ack_cells", &W::ack_cells, "route_base",
                  &W::route_base, "route_scratch", &W::route_scratch, "expert_out", &W::expert_out, "recv_tokens",
                  &W::recv_tokens, "recv_scales", &W::recv_scales, "recv_row_scales", &W::recv_row_scales,
                  "recv_scales_wire", &W::recv_scales_wire, "wire_rows", &W::wire_rows);
  using B = BackwardOffsets;
  bind_offsets<B>(m, "BackwardOffsets", "go_cells", &B::go_cells, "grad_arrived_cells", &B::grad_arrived_cells,
                  "grad_ready_cells", &B::grad_ready_cells, "grad_ack_cells", &B::grad_ack_cells, "grad_expert_out",
                  &B::grad_expert_out, "grad_expert_out_scales", &B::grad_expert_out_scales,
                  "grad_expert_out_row_scales", &B::grad_expert_out_row_scales, "grad_expert_out_scales_wire",
                  &B::grad_expert_out_scales_wire, "grad_recv_tokens", &B::grad_recv_tokens, "grad_recv_topk_weights",
                  &B::grad_recv_topk_weights, "grad_wire_rows", &B::grad_wire_rows);
}

void bind_geometry(py::module_& m) {
  using F = RowFormat;
  bind_struct<F>(m, "RowFormat", "format", &F::format, "is_blocked", &F::is_blocked, "row_bytes", &F::row_bytes,
                 "scale_row_bytes", &F::scale_row_bytes, "wire_row_bytes", &F::wire_row_bytes, "scale_bytes",
                 &F::scale_bytes);
  using S = StashFormat;
  bind_struct<S>(m, "StashFormat", "num_pages", &S::num_pages, "page_rows", &S::page_rows, "page_bytes", &S::page_bytes,
                 "scales_offset", &S::scales_offset, "row_scales_offset", &S::row_scales_offset);
  using W = WireFormat;
  bind_struct<W>(m, "WireFormat", "row_bytes", &W::row_bytes, "scales_offset", &W::scales_offset);
  using G = Geometry;
  bind_struct<G>(m, "Geometry", "rank", &G::rank, "num_ranks", &G::num_ranks, "num_experts", &G::num_experts,
                 "num_local_experts", &G::num_local_experts, "num_topk", &G::num_topk, "hidden", &G::hidden,
                 "expert_alignment", &G::expert_alignment, "max_tokens_per_rank", &G::max_tokens_per_rank,
                 "token_dtype", &G::token_dtype, "max_num_sms", &G::max_num_sms, "capacity_rows", &G::capacity_rows,
                 "token_row_bytes", &G::token_row_bytes, "route_chunk_tokens", &G::route_chunk_tokens, "timeout_us",
                 &G::timeout_us, "recv", &G::recv, "grad", &G::grad, "stash", &G::stash, "wire", &G::wire, "grad_wire",
                 &G::grad_wire, "dedups", &G::dedups, "adds_by_rank", &G::adds_by_rank);
}

void bind_calls(py::module_& m) {
  using R = RouteCall;
  bind_struct<R>(m, "RouteCall", "frame", &R::frame, "workspace", &R::workspace, "refusal", &R::refusal,
                 "check_progress", &R::check_progress, "stream", &R::stream, "topk_idx", &R::topk_idx,
                 "topk_idx_row_stride", &R::topk_idx_row_stride, "topk_idx_bytes", &R::topk_idx_bytes, "num_tokens",
                 &R::num_tokens, "live_tokens", &R::live_tokens, "live_tokens_bytes", &R::live_tokens_bytes, "repeats",
                 &R::repeats)
      .def(from_values(&R::frame, &R::workspace, &R::refusal, &R::check_progress, &R::stream, &R::topk_idx,
                       &R::topk_idx_row_stride, &R::topk_idx_bytes, &R::num_tokens));
  using Z = SummariseCall;
  bind_struct<Z>(m, "SummariseCall", "frame", &Z::frame, "num_tokens", &Z::num_tokens, "stream", &Z::stream,
                 "count_rows", &Z::count_rows, "sent_ids", &Z::sent_ids, "mirror", &Z::mirror);
  using D = DispatchCall;
  bind_struct<D>(m, "DispatchCall", "frame", &D::frame, "workspace", &D::workspace, "refusal", &D::refusal,
                 "check_progress", &D::check_progress, "stream", &D::stream, "rows", &D::rows, "row_stride_bytes",
                 &D::row_stride_bytes, "scales", &D::scales, "row_scales", &D::row_scales, "scales_row_stride_bytes",
                 &D::scales_row_stride_bytes, "topk_weights", &D::topk_weights, "topk_weights_row_stride",
                 &D::topk_weights_row_stride, "num_tokens", &D::num_tokens, "expects_open", &D::expects_open, "repeats",
                 &D::repeats)
      .def(from_values(&D::frame, &D::workspace, &D::refusal, &D::check_progress, &D::stream, &D::rows,
                       &D::row_stride_bytes, &D::num_tokens));
  using C = CombineCall;
  bind_struct<C>(m, "CombineCall", "frame", &C::frame, "workspace", &C::workspace, "refusal", &C::refusal,
                 "check_progress", &C::check_progress, "stream", &C::stream, "rows", &C::rows, "row_stride_bytes",
                 &C::row_stride_bytes, "rows_source", &C::rows_source, "weights_source", &C::weights_source, "weights",
                 &C::weights, "out", &C::out, "out_row_stride_bytes", &C::out_row_stride_bytes, "out_weights",
                 &C::out_weights, "num_tokens", &C::num_tokens, "begins_use", &C::begins_use, "clears_open",
                 &C::clears_open)
      .def(from_values(&C::frame, &C::workspace, &C::refusal, &C::check_progress, &C::stream, &C::rows_source,
                       &C::weights_source, &C::num_tokens));
  using W = WeightGradCall;
  bind_struct<W>(m, "WeightGradCall", "frame", &W::frame, "workspace", &W::workspace, "stream", &W::stream,
                 "expert_out", &W::expert_out, "expert_out_row_stride_bytes", &W::expert_out_row_stride_bytes,
                 "weights", &W::weights, "grad_weights", &W::grad_weights, "grad_rows", &W::grad_rows);
  using E = DecodeCall;
  bind_struct<E>(m, "DecodeCall", "frame", &E::frame, "workspace", &E::workspace, "stream", &E::stream, "data",
                 &E::data, "scales", &E::scales, "row_scales", &E::row_scales, "row_stride_bytes", &E::row_stride_bytes,
                 "scales_row_stride_bytes", &E::scales_row_stride_bytes, "out", &E::out, "num_rows", &E::num_rows,
                 "is_grad", &E::is_grad);
  using S = StashCall;
  bind_struct<S>(m, "StashCall", "frame", &S::frame, "workspace", &S::workspace, "stream", &S::stream, "move", &S::move,
                 "returns_pages", &S::returns_pages);
  using O = Outcome;
  bind_struct<O>(m, "Outcome", "status", &O::status, "refusing_rank", &O::refusing_rank, "refusal", &O::refusal,
                 "overflow", &O::overflow, "max_demand_rows", &O::max_demand_rows, "max_demand_rank",
                 &O::max_demand_rank, "bad_rank", &O::bad_rank, "num_bad_ids", &O::num_bad_ids, "bad_value",
                 &O::bad_value, "bad_token", &O::bad_token, "bad_topk", &O::bad_topk, "stash_rank", &O::stash_rank);
}

// Sizes that plan.py's regions must hold; a test compares them.
std::size_t size_of(const std::string& name) {
  static const std::map<std::string, std::size_t> kSizes = {{"Cell", sizeof(Cell)},
                                                            {"Control", sizeof(Control)},
                                                            {"FrameCounters", sizeof(FrameCounters)},
                                                            {"ForwardCounters", sizeof(ForwardCounters)},
                                                            {"BackwardCounters", sizeof(BackwardCounters)},
                                                            {"StashCounters", sizeof(StashCounters)},
                                                            {"StashTable", sizeof(StashTable)}};
  const auto found = kSizes.find(name);
  if (found == kSizes.end()) throw py::key_error("no struct '" + name + "' lives in a window");
  return found->second;
}

// Where the words of Control lie that engines write whose kernels are not ours: (byte, bytes).
std::pair<std::size_t, std::size_t> control_word(const std::string& name) {
#define EPBUF_WORD(field)                                        \
  {                                                              \
    #field, { offsetof(Control, field), sizeof(Control::field) } \
  }
  static const std::map<std::string, std::pair<std::size_t, std::size_t>> kWords = {
      EPBUF_WORD(num_refusals),    EPBUF_WORD(refusing_rank),  EPBUF_WORD(refusal),   EPBUF_WORD(refused_op),
      EPBUF_WORD(bad_topk),        EPBUF_WORD(num_overflows),  EPBUF_WORD(bad_rank),  EPBUF_WORD(num_early_reuses),
      EPBUF_WORD(num_bad_ids),     EPBUF_WORD(bad_value),      EPBUF_WORD(bad_token), EPBUF_WORD(staged_bytes),
      EPBUF_WORD(max_demand_rows), EPBUF_WORD(max_demand_rank)};
#undef EPBUF_WORD
  const auto found = kWords.find(name);
  if (found == kWords.end()) throw py::key_error("Control has no word '" + name + "' that others write");
  return found->second;
}

// `values`: name, value, name, value, ...
template <typename Enum>
void add_values(py::native_enum<Enum>&) {}

template <typename Enum, typename... Rest>
void add_values(py::native_enum<Enum>& all, const char* name, Enum value, Rest... rest) {
  all.value(name, value);
  add_values(all, rest...);
}

template <typename Enum, typename... Values>
void bind_enum(py::module_& m, const char* name, Values... values) {
  py::native_enum<Enum> all(m, name, "enum.IntEnum");
  add_values(all, values...);
  all.finalize();
}

void bind_enums(py::module_& m) {
  bind_enum<Op>(m, "Op", "NONE", kOpNone, "ROUTE", kOpRoute, "DISPATCH", kOpDispatch, "COMBINE", kOpCombine,
                "COMBINE_BACKWARD", kOpCombineBackward, "DISPATCH_BACKWARD", kOpDispatchBackward);
  bind_enum<Phase>(m, "Phase", "NONE", kPhaseNone, "COUNT", kPhaseCount, "ARRIVED", kPhaseArrived, "READY", kPhaseReady,
                   "ACK", kPhaseAck, "GO", kPhaseGo, "GRAD_ARRIVED", kPhaseGradArrived, "GRAD_READY", kPhaseGradReady,
                   "GRAD_ACK", kPhaseGradAck);
  bind_enum<Status>(m, "Status", "OK", kOk, "REFUSED", kRefused, "TIMEOUT", kTimeout, "MISMATCH", kMismatch, "ABORTED",
                    kAborted, "POISONED", kPoisoned);
  bind_enum<Refusal>(m, "Refusal", "NONE", kRefusalNone, "ARGUMENT", kRefusalArgument, "DTYPE", kRefusalDtype, "SHAPE",
                     kRefusalShape, "DEVICE", kRefusalDevice, "STRIDES", kRefusalStrides, "ALIGNMENT",
                     kRefusalAlignment, "TOO_MANY_TOKENS", kRefusalTooManyTokens, "OVERLAP", kRefusalOverlap,
                     "CALL_ORDER", kRefusalCallOrder, "LEASE", kRefusalLease, "WORKSPACE", kRefusalWorkspace,
                     "COPIED_REGION", kRefusalCopiedRegion, "INTERNAL", kRefusalInternal, "REPEATED_EXPERT",
                     kRefusalRepeatedExpert);
  bind_enum<CountColumn>(m, "CountColumn", "NUM_BAD_IDS", kColumnNumBadIds, "REFUSAL", kColumnRefusal, "BAD_TOKEN",
                         kColumnBadToken, "BAD_TOPK", kColumnBadTopk, "BAD_VALUE", kColumnBadValue);
  bind_enum<Source>(m, "Source", "TENSOR", kSourceTensor, "WINDOW", kSourceWindow, "ZERO", kSourceZero);
  bind_enum<StashMove>(m, "StashMove", "NOTHING", kStashNothing, "STASH", kStashRows, "RESTORE", kRestoreRows);
  bind_enum<TokenDtype>(m, "TokenDtype", "BF16", kBf16, "FP16", kFp16, "FP32", kFp32);
  bind_enum<Format>(m, "Format", "SAME", kSame, "MXFP8", kMxfp8, "FP8_BLOCK128", kFp8Block128, "NVFP4", kNvfp4, "RAW",
                    kRaw);
  m.attr("ANY_WORKSPACE") = kAnyWorkspace;
  m.attr("COUNT_HEADER_CELLS") = kCountHeader;
}

void bind_host_engine(py::module_& m) {
  bind_engine<HostEngine>(m, "HostEngine")
      .def(py::init<const Geometry&, const ArenaOffsets&, std::vector<FrameOffsets>, std::vector<ForwardOffsets>,
                    std::vector<BackwardOffsets>, std::vector<std::uint64_t>>(),
           py::arg("geometry"), py::arg("arena_offsets"), py::arg("frames"), py::arg("forwards"), py::arg("backwards"),
           py::arg("peers"));
}

py::buffer_info bytes_of(HostSegment& segment) {
  return {reinterpret_cast<std::uint8_t*>(segment.address()), static_cast<py::ssize_t>(segment.nbytes())};
}

void bind_host_segment(py::module_& m) {
  py::class_<HostSegment>(m, "HostSegment", py::buffer_protocol())
      .def_static("create", &HostSegment::create, py::arg("prefix"), py::arg("nbytes"))
      .def_static("map", &HostSegment::map, py::arg("name"), py::arg("nbytes"))
      .def_static("anonymous", &HostSegment::anonymous, py::arg("nbytes"))
      .def_static("sweep", &HostSegment::sweep, py::arg("prefix"))
      .def_property_readonly("name", &HostSegment::name)
      .def_property_readonly("nbytes", &HostSegment::nbytes)
      .def_property_readonly("address", &HostSegment::address)
      .def("unlink", &HostSegment::unlink)
      .def_buffer(&bytes_of);
}

// Never destroyed: at exit the interpreter is gone before the statics are.
HandleTable<py::object>& handles() {
  static auto* table = new HandleTable<py::object>;
  return *table;
}

[[noreturn]] void throw_stale(std::int64_t handle) {
  throw py::key_error(
      concat("handle ", handle, " is stale: what it named was closed, or it comes from another process"));
}

std::uint32_t put_handle(py::object object) {
  const std::uint32_t handle = handles().put(std::move(object));
  EPBUF_CHECK(handle != 0, "65536 handles are in use; close arenas that are not needed");
  return handle;
}

py::object get_handle(std::int64_t handle) {
  const py::object* object = handles().find(handle);
  if (object == nullptr) throw_stale(handle);
  return *object;
}

void drop_handle(std::int64_t handle) {
  if (!handles().drop(handle)) throw_stale(handle);
}

py::list list_handles() {
  py::list objects;
  handles().for_each([&](const py::object& object) { objects.append(object); });
  return objects;
}

void bind_handles(py::module_& m) {
  m.def("handle_put", &put_handle, py::arg("obj"));
  m.def("handle_get", &get_handle, py::arg("handle"));
  m.def("handle_drop", &drop_handle, py::arg("handle"));
  m.def("handle_objects", &list_handles);
}

}  // namespace
}  // namespace epbuf

PYBIND11_MODULE(_C, m) {
  using namespace epbuf;
  py::register_local_exception_translator(&translate_native_error);
  bind_enums(m);
  bind_control(m);
  bind_counters(m);
  bind_layout(m);
  bind_geometry(m);
  bind_calls(m);
  m.def("sizeof", &size_of, py::arg("name"));
  m.def("control_word", &control_word, py::arg("name"));
  bind_host_engine(m);
  bind_host_segment(m);
  bind_handles(m);
#ifdef EPBUF_WITH_CUDA
  m.attr("CUDA_BUILT") = true;
  bind_cuda(m);
#else
  m.attr("CUDA_BUILT") = false;
#endif
}
