// What the bindings of the engines share: one set of methods, whatever moves the data.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "layout.h"

namespace epbuf {

using ProgressTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

template <typename Engine>
std::vector<ProgressTuple> progress_tuples(const Engine& engine) {
  std::vector<ProgressTuple> tuples;
  for (const auto& p : engine.progress()) tuples.emplace_back(p.call, p.op, p.frame, p.workspace);
  return tuples;
}

// Every method without the GIL: an op waits for peers that may be threads of this process. The caller adds the
// constructor.
template <typename Engine>
pybind11::class_<Engine> bind_engine(pybind11::module_& m, const char* name) {
  using release_gil = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Engine> engine(m, name);
  engine.def("route", &Engine::route, release_gil())
      .def("dispatch", &Engine::dispatch, release_gil())
      .def("combine", &Engine::combine, release_gil())
      .def("combine_backward", &Engine::combine_backward, release_gil())
      .def("dispatch_backward", &Engine::dispatch_backward, release_gil())
      .def("weight_grad", &Engine::weight_grad, release_gil())
      .def("decode", &Engine::decode, release_gil())
      .def("stash", &Engine::stash, release_gil())
      .def("control", &Engine::control, release_gil())
      .def("abort", &Engine::abort, pybind11::arg("reason"), release_gil())
      .def("progress", &progress_tuples<Engine>, release_gil());
  return engine;
}

#ifdef EPBUF_WITH_CUDA
void bind_cuda(pybind11::module_& m);  // bindings_cuda.cpp
#endif

}  // namespace epbuf
