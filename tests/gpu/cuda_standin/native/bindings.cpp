// What Python needs to know and to set.
#include <pybind11/functional.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/extension.h>

#include "backend.h"
#include "memory_ops.h"

namespace py = pybind11;

namespace standin {

namespace {

// A report that calls Python, from whatever thread it comes. The function is never freed: threads may outlive the interpreter.
Timeline::Report calling(py::object function) {
  if (function.is_none()) return nullptr;
  auto* kept = new py::object(std::move(function));
  return [kept](const std::string& text) {
    py::gil_scoped_acquire locked;
    (*kept)(text);
  };
}

int exchange_device(int index) {
  check_device(index);
  const int before = thread_state().device;
  if (index >= 0) thread_state().device = index;
  return before;
}

void bind_device(py::module_& m) {
  m.def("device_count", &device_count);
  m.def("get_device", [] { return thread_state().device; });
  m.def("exchange_device", &exchange_device, "Make a device current (none if negative); the one before.");
  m.def("stream_id", [](int device) { return current_stream(device).id(); });
  m.def("set_stream", [](int device, int64_t id) { thread_state().stream[device] = id; });
  m.def("synchronize", [] { Timeline::get().synchronize_all("device"); }, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int device) { return default_generator(device); });
}

void bind_memory(py::module_& m) {
  m.def("allocated", [](int device) { return Timeline::get().allocated[device]; });
  m.def("peak", [](int device) { return Timeline::get().peak[device]; });
  m.def("reset_peak", [](int device) { Timeline::get().peak[device] = Timeline::get().allocated[device]; });
  m.def("capacity", [] { return Timeline::get().capacity; });
  m.def("set_capacity", [](size_t nbytes) { Timeline::get().capacity = nbytes; });
  m.def("pin", [](uintptr_t pointer, size_t nbytes) { Timeline::get().pin(pointer, nbytes); });
  m.def("unpin", [](uintptr_t pointer) { return Timeline::get().unpin(pointer); });
  m.def("resize_storage", [](py::handle storage, size_t nbytes) {
    resize_storage(*torch::createStorage(storage.ptr()).unsafeGetStorageImpl(), nbytes);
  });
}

void bind_checks(py::module_& m) {
  m.def("take_errors", [] { return Timeline::get().take_errors(); });
  m.def("counts", [] { return Timeline::get().counts(); });
  m.def("set_options", [](bool track, bool delay) {
    Timeline::get().track = track;
    Timeline::get().delay = delay;
  });
  m.def("on_error", [](py::object function) { Timeline::get().complain = calling(std::move(function)); });
  m.def("on_sync", [](py::object function) { Timeline::get().on_sync = calling(std::move(function)); });
}

}  // namespace

}  // namespace standin

PYBIND11_MODULE(_standin, m) {
  using standin::OrderedBackend;
  standin::bind_device(m);
  standin::bind_memory(m);
  standin::bind_checks(m);
  py::class_<OrderedBackend, c10d::Backend, c10::intrusive_ptr<OrderedBackend>>(m, "OrderedBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
