// An array of the interpreter as it lies in memory, for as long as this lives. Nothing is converted
// and nothing is raised: what is wrong with an array is for its caller to say. For bindings alone.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace rowstream {

class ArrayView {
 public:
  // elements: their type as the struct module has it, one of these letters
  ArrayView(nanobind::handle array, std::string_view elements, size_t element_bytes,
            bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      return;
    }
    held_ = true;
    const std::string_view format = view_.format != nullptr ? view_.format : "B";
    fits_ = format.size() == 1 && elements.find(format[0]) != elements.npos &&
            static_cast<size_t>(view_.itemsize) == element_bytes &&
            reinterpret_cast<uintptr_t>(view_.buf) % element_bytes == 0;
  }
  ~ArrayView() {
    if (held_) PyBuffer_Release(&view_);
  }
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;

  // whether it is an array, in one piece, of such elements
  explicit operator bool() const { return fits_; }
  void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len / view_.itemsize); }
  std::span<const Py_ssize_t> shape() const {
    return {view_.shape, static_cast<size_t>(view_.ndim)};
  }

 private:
  Py_buffer view_{};
  bool held_ = false;
  bool fits_ = false;
};

}  // namespace rowstream
