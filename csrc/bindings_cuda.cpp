// The CUDA half of epbuf._C: the engine, holds of graphs, NCCL windows.
#include <memory>
#include <string>

#include "bindings.h"
#include "cuda/capture.h"
#include "cuda/engine.h"
#include "window_nccl.h"

namespace py = pybind11;

namespace epbuf {
namespace {

using release_gil = py::call_guard<py::gil_scoped_release>;

void bind_cuda_engine(py::module_& m) {
  bind_engine<CudaEngine>(m, "CudaEngine")
      .def(py::init<const Geometry&, const ArenaOffsets&, std::vector<FrameOffsets>, std::vector<ForwardOffsets>,
                    std::vector<BackwardOffsets>, std::vector<std::uint64_t>, int>(),
           py::arg("geometry"), py::arg("arena_offsets"), py::arg("frames"), py::arg("forwards"), py::arg("backwards"),
           py::arg("peers"), py::arg("device"), release_gil())
      .def("count_ids", &CudaEngine::count_ids, py::arg("call"), py::arg("sent_ids"), py::arg("count_row"),
           release_gil())
      .def("summarise", &CudaEngine::summarise, py::arg("call"), release_gil())
      .def_static("phases", &CudaEngine::phases, py::arg("op"))
      .def(
          "run_phase",
          [](CudaEngine& engine, std::uint32_t op, std::int32_t phase, const DispatchCall& call) {
            return engine.run_dispatch_phase(op, phase, call);
          },
          py::arg("op"), py::arg("phase"), py::arg("call"), release_gil())
      .def(
          "run_phase",
          [](CudaEngine& engine, std::uint32_t op, std::int32_t phase, const CombineCall& call) {
            return engine.run_combine_phase(op, phase, call);
          },
          py::arg("op"), py::arg("phase"), py::arg("call"), release_gil())
      .def(
          "run_phase",
          [](CudaEngine& engine, std::uint32_t, std::int32_t phase, const RouteCall& call) {
            return engine.run_route_phase(phase, call);
          },
          py::arg("op"), py::arg("phase"), py::arg("call"), release_gil())
      .def("status", &CudaEngine::status)
      .def("warm_up", &CudaEngine::warm_up, release_gil())
      .def("close", &CudaEngine::close, release_gil());
}

void bind_capture(py::module_& m) {
  m.def("capture_id", &capture_id, py::arg("stream"));
  py::class_<GraphHold>(m, "GraphHold")
      .def(py::init<std::uint64_t>(), py::arg("stream"))
      .def_property_readonly("alive", &GraphHold::alive);
}

std::unique_ptr<NcclWindow> open_nccl_window(const std::string& library, const py::bytes& unique_id, int rank,
                                             int num_ranks, std::size_t nbytes) {
  const std::string id = unique_id;
  const py::gil_scoped_release release;
  return std::make_unique<NcclWindow>(library, id, rank, num_ranks, nbytes);
}

void bind_nccl_window(py::module_& m) {
  m.def("nccl_version", &nccl_version, py::arg("path"), release_gil());
  m.def("nccl_in_process", &nccl_in_process);
  py::class_<NcclWindow>(m, "NcclWindow")
      .def(py::init(&open_nccl_window), py::arg("library"), py::arg("unique_id"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("nbytes"))
      .def_static(
          "unique_id", [](const std::string& library) { return py::bytes(NcclWindow::make_unique_id(library)); },
          py::arg("library"))
      .def_property_readonly("peers", &NcclWindow::peers)
      .def_property_readonly("address", &NcclWindow::address)
      .def_property_readonly("nbytes", &NcclWindow::num_bytes)
      .def_property_readonly("handle", &NcclWindow::handle)
      .def_property_readonly("communicator", &NcclWindow::communicator)
      .def("deregister", &NcclWindow::deregister, release_gil());
}

}  // namespace

void bind_cuda(py::module_& m) {
  bind_cuda_engine(m);
  bind_capture(m);
  bind_nccl_window(m);
}

}  // namespace epbuf
