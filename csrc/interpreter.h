// What the work of the core needs of the interpreter: to give its lock away meanwhile, its signals,
// and to be told from work of the same thread on the same table. For bindings alone.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>

#include "failure.h"

namespace rowstream {

// a pending signal's handler may raise: the gather then ends between two rounds
inline bool signal_pending() {
  // handlers run in the main thread alone; others need not ask for the interpreter's lock
  if (syscall(SYS_gettid) != getpid()) return false;
  const nanobind::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    // An interpreter that ends unwinds, by force, a daemon thread that asks for its lock, and the
    // frames below us would turn that into abort(). As Python 3.14 does: stay here till exit.
    for (;;) pause();
  }
}

template <typename Work>
void without_gil(Work work) {
  std::exception_ptr failure;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  take_gil(state);
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const Interrupted&) {
    throw nanobind::python_error();  // what the signal's handler raised
  }
}

// A signal's handler runs inside the gather that it interrupts: what it calls on the same table
// would wait for itself.
class Gathering {
 public:
  explicit Gathering(const void* table) : table_(table), outer_(innermost_) { innermost_ = this; }
  ~Gathering() { innermost_ = outer_; }
  Gathering(const Gathering&) = delete;
  Gathering& operator=(const Gathering&) = delete;

  static void refuse(const void* table) {
    for (const Gathering* at = innermost_; at != nullptr; at = at->outer_) {
      if (at->table_ == table) {
        throw std::runtime_error("table is in use by a gather of this very thread");
      }
    }
  }

 private:
  static inline thread_local const Gathering* innermost_ = nullptr;
  const void* const table_;
  const Gathering* const outer_;
};

}  // namespace rowstream
