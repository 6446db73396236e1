#include "load_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "interpreter.h"
#include "plane_specs.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace rowstream {
namespace {

using Rows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Not a shared pointer of nanobind's: the table holds the pages as well, and ends on any thread.
struct TableMemory {
  std::shared_ptr<const Pages> pages;
  uint64_t address() const { return reinterpret_cast<uint64_t>(pages->data()); }
};

void load(Loader& loader, int64_t first, const Rows& out, size_t plane,
          const nb::object& progress) {
  if (plane >= loader.planes()) throw std::out_of_range("no such plane");
  if (out.shape(1) != loader.row_bytes(plane)) {
    throw std::invalid_argument("out needs rows of " + std::to_string(loader.row_bytes(plane)) +
                                " bytes, got " + std::to_string(out.shape(1)));
  }
  auto* into = reinterpret_cast<std::byte*>(out.data());
  const auto count = static_cast<int64_t>(out.shape(0));
  const Loader::Progress told = progress_of(progress);
  try {
    without_gil([&] { loader.load(plane, first, count, into, signal_pending, told); });
  } catch (...) {
    // reads that did not end may still write to it
    if (loader.stuck()) (void)new Rows(out);
    throw;
  }
}

}  // namespace

Loader::Progress progress_of(const nb::object& callable) {
  if (callable.is_none()) return {};
  // by its address: a copy would need the interpreter's lock
  return [callable = callable.ptr()](uint64_t done, uint64_t total) {
    const nb::gil_scoped_acquire gil;
    const nb::handle call(callable);
    call(done, total);
  };
}

void bind_memory(nb::module_& m, nb::class_<ResidentTable>& resident) {
  nb::class_<TableMemory>(m, "TableMemory",
                          "The rows of a loaded table, one after the other; stays while it is "
                          "held, also when the table is closed.")
      .def_prop_ro("address", &TableMemory::address)
      .def_prop_ro("bytes", [](const TableMemory& self) { return self.pages->size(); });
  const auto memory = [](const ResidentTable& table) {
    Gathering::refuse(&table);
    TableMemory memory;
    without_gil([&] { memory.pages = table.memory(); });
    return memory;
  };
  resident.def("memory", memory, "Of a loaded table of one plane.")
      .def_prop_ro(
          "address", [memory](const ResidentTable& table) { return memory(table).address(); },
          "Of the first row of a loaded table of one plane, until it is closed.");
}

void bind_loader(nb::module_& m) {
  nb::class_<Loader>(m, "Loader", "Reads runs of rows in bulk, straight into the memory given.")
      .def(
          "__init__",
          [](Loader* self, const std::vector<std::string>& paths,
             const std::vector<PlaneTuple>& planes, std::string reader, bool direct, bool in_place,
             unsigned threads, double timeout_s, std::vector<Fault> faults) {
            const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
                std::chrono::duration<double>(timeout_s));
            new (self)
                Loader(paths, plane_specs(planes),
                       {std::move(reader), direct, in_place, threads, timeout, std::move(faults)});
          },
          "paths"_a, "planes"_a, nb::kw_only(), "reader"_a = "auto", "direct"_a = true,
          "in_place"_a = true, "threads"_a = 0, "timeout_s"_a = 30.0, "faults"_a = nb::list(),
          "threads: 0 for as many as there are processors, four at most. in_place: false reads "
          "through buffers only.")
      .def("load", &load, "first_row"_a, "out"_a.noconvert(), nb::kw_only(), "plane"_a = 0,
           "progress"_a = nb::none(), "Fill out uint8 [n, row_bytes] with rows from first_row on.")
      .def("files", &Loader::files);
}

}  // namespace rowstream
