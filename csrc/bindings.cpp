// The door between Python and the core: arrays are checked here, the GIL is
// released around the work, and the core's exceptions become Python's, once.
// Inputs are never converted: a converted output array would be a temporary
// copy, and the caller's would stay as it was.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>

#include "array_view.h"
#include "channel_bindings.h"
#include "disk.h"
#include "failure.h"
#include "hash_bindings.h"
#include "interpreter.h"
#include "load_bindings.h"
#include "plane_specs.h"
#include "resident.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace rowstream {
namespace {

using RowIds = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<uint32_t> checked(std::vector<uint32_t> groups) {
  for (const uint32_t width : groups) {
    if (width == 0) throw std::invalid_argument("a group has no heads");
  }
  return groups;
}

template <typename Table>
void gather(Table& table, const RowIds& ids, const std::vector<uint32_t>& groups, const Rows& out) {
  size_t heads = 0;
  for (const uint32_t width : groups) {
    if (width == 0) throw std::invalid_argument("a group has no heads");
    heads += width;
  }
  if (ids.shape(1) != heads) {
    throw std::invalid_argument("row_ids have " + std::to_string(ids.shape(1)) +
                                " columns, groups add up to " + std::to_string(heads));
  }
  if (out.shape(0) != ids.shape(0) || out.shape(1) != heads || out.shape(2) != table.row_bytes()) {
    throw std::invalid_argument("out needs shape [" + std::to_string(ids.shape(0)) + ", " +
                                std::to_string(heads) + ", " + std::to_string(table.row_bytes()) +
                                "]");
  }
  if (heads == 0) return;
  const Batch batch{ids.data(), ids.shape(0), groups, static_cast<unsigned>(heads)};
  auto* into = reinterpret_cast<std::byte*>(out.data());
  Gathering::refuse(&table);
  const Gathering gathering(&table);
  without_gil([&] { table.gather(batch, into, signal_pending); });
}

// The way of a gather whose arrays are what they should be: any shape of ids, and by the table's
// own groups where their last axis has a token's. False, and nothing done, for any other.
template <typename Table>
bool gather_rows(Table& table, nb::handle row_ids, nb::handle rows) {
  const std::vector<uint32_t>& groups = table.groups();
  const ArrayView ids(row_ids, "lq", sizeof(int64_t), /*writable=*/false);
  if (!ids || groups.empty()) return false;
  const ArrayView out(rows, "B", 1, /*writable=*/true);
  const auto shape = ids.shape();
  if (!out || out.shape().size() != shape.size() + 1 ||
      !std::equal(shape.begin(), shape.end(), out.shape().begin()) ||
      out.shape().back() != table.row_bytes()) {
    return false;
  }
  static constexpr uint32_t kAlone = 1;
  const size_t heads = std::accumulate(groups.begin(), groups.end(), size_t{0});
  const bool by_token = !shape.empty() && static_cast<size_t>(shape.back()) == heads;
  const size_t width = by_token ? heads : 1;
  const Batch batch{static_cast<const int64_t*>(ids.data()), ids.size() / width,
                    by_token ? std::span<const uint32_t>(groups) : std::span(&kAlone, 1),
                    static_cast<unsigned>(width)};
  auto* into = static_cast<std::byte*>(out.data());
  Gathering::refuse(&table);
  const Gathering gathering(&table);
  without_gil([&] { table.gather(batch, into, signal_pending); });
  return true;
}

template <typename Table>
std::vector<FileState> files(const Table& table) {
  std::vector<FileState> states;
  Gathering::refuse(&table);
  without_gil([&] { states = table.files(); });
  return states;
}

template <typename Table>
nb::typed<nb::dict, nb::str, nb::int_> counters(const Table& table) {
  const Counters& counts = table.counters();
  nb::dict dict;
  dict["gathers"] = counts.gathers.load();
  dict["rows"] = counts.rows.load();
  dict["duplicate_rows"] = counts.duplicate_rows.load();
  dict["missing_rows"] = counts.missing_rows.load();
  dict["cached_rows"] = counts.cached_rows.load();
  dict["ahead_rows"] = counts.ahead_rows.load();
  dict["reads"] = counts.reads.load();
  dict["read_bytes"] = counts.read_bytes.load();
  dict["retries"] = counts.retries.load();
  dict["read_errors"] = counts.read_errors.load();
  dict["timeouts"] = counts.timeouts.load();
  dict["zeroed_rows"] = counts.zeroed_rows.load();
  dict["gather_ns"] = counts.gather_ns.load();
  dict["plan_ns"] = counts.plan_ns.load();
  return dict;
}

nb::typed<nb::dict, nb::str, nb::int_> kept(const DiskTable& table) {
  nb::dict dict;
  const Cache* cache = table.cache();
  dict["cache_bytes"] = cache != nullptr ? cache->memory_bytes() : 0;
  dict["cache_groups"] = cache != nullptr ? cache->size() : 0;
  dict["cache_hits"] = cache != nullptr ? cache->hits() : 0;
  dict["cache_misses"] = cache != nullptr ? cache->misses() : 0;
  dict["lookahead_reads"] = table.lookahead_counters().reads.load();
  dict["lookahead_read_bytes"] = table.lookahead_counters().read_bytes.load();
  return dict;
}

nb::typed<nb::dict, nb::str, nb::int_> mapped_pages(const ResidentTable& table) {
  Gathering::refuse(&table);
  ResidentTable::MappedPages pages{};
  without_gil([&] { pages = table.mapped_pages(); });
  nb::dict dict;
  dict["mapped_bytes"] = pages.mapped_bytes;
  dict["resident_bytes"] = pages.resident_bytes;
  dict["faults"] = pages.faults;
  dict["advise_failures"] = pages.advise_failures;
  dict["drops"] = pages.drops;
  return dict;
}

void raise_read_error(const ReadFailure& failure) {
  const int code = failure.code().value();
  const nb::object error = nb::module_::import_("rowstream.errors").attr("ReadError");
  const std::string reason = failure.reason.empty() ? std::strerror(code) : failure.reason;
  // not every failure is one of a read
  const bool of_read = failure.needed > 0;
  const auto number = [of_read](uint64_t value) {
    return of_read ? nb::object(nb::int_(value)) : nb::none();
  };
  const nb::object raised =
      error(code, reason, failure.path, "offset"_a = number(failure.offset),
            "needed"_a = number(failure.needed), "got"_a = number(failure.got));
  PyErr_SetObject(error.ptr(), raised.ptr());
}

void raise_unavailable(const char* text) {
  const nb::object error = nb::module_::import_("rowstream.errors").attr("UnavailableError");
  PyErr_SetString(error.ptr(), text);
}

// nanobind itself turns out_of_range into IndexError and invalid_argument into
// ValueError
void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const ReadFailure& failure) {
    raise_read_error(failure);
  } catch (const ForkedError& error) {
    raise_unavailable(error.what());
  } catch (const Unavailable& error) {
    raise_unavailable(error.what());
  } catch (const ClosedError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::system_error& error) {
    const nb::object raised =
        nb::borrow(PyExc_OSError)(error.code().value(), std::string(error.what()));
    PyErr_SetObject(PyExc_OSError, raised.ptr());
  }
}

template <typename Table>
void bind_table(nb::class_<Table>& table) {
  table.def_prop_ro("num_rows", &Table::num_rows)
      .def_prop_ro("row_bytes", &Table::row_bytes)
      .def_prop_ro("memory_bytes", &Table::memory_bytes, "Bytes held for the table, all of them.")
      .def("gather", &gather<Table>, "row_ids"_a.noconvert(), "groups"_a, "out"_a.noconvert(),
           "Fill out uint8 [n, heads, row_bytes] with the rows of row_ids "
           "int64 [n, heads].")
      .def("gather_rows", &gather_rows<Table>, "row_ids"_a.none(), "out"_a.none(),
           "As gather, by the table's groups, for int64 ids of any shape and uint8 out of that "
           "shape "
           "and row_bytes, both C-contiguous. False, with nothing done, for any other.")
      .def("files", &files<Table>, "What is known of each file.")
      .def("counters", &counters<Table>)
      .def("close", [](Table& self) {
        Gathering::refuse(&self);
        without_gil([&] { self.close(); });
      });
}

void bind_core(nb::module_& m) {
  m.doc() =
      "Files, memory and arithmetic of rowstream; knows no model and no "
      "device.";
  nb::register_exception_translator(translate);
  // a daemon thread in mid-gather holds its table when the interpreter ends: no leak to speak of
  nb::set_leak_warnings(false);

  nb::class_<FileState>(m, "FileState", "An open file: how it is read, and why not otherwise.")
      .def_ro("path", &FileState::path)
      .def_prop_ro(
          "identity",
          [](const FileState& state) {
            const FileIdentity& identity = state.identity;
            return std::make_tuple(identity.device, identity.inode, identity.size,
                                   identity.mtime_ns);
          },
          "Device, inode, size in bytes, modification time in ns.")
      .def_ro("direct", &FileState::direct)
      .def_ro("alignment", &FileState::alignment)
      .def_ro("note", &FileState::note);

  nb::class_<Fault>(m, "Fault", "For tests: how some reads of a table end, see fault.h.")
      .def(
          "__init__",
          [](Fault* self, uint64_t first, uint64_t count, std::optional<uint64_t> at,
             std::optional<int32_t> result,
             int32_t delay_ms) { new (self) Fault{first, count, at, result, delay_ms}; },
          "first"_a = 0, "count"_a = 0, nb::kw_only(), "at"_a = nb::none(), "result"_a = nb::none(),
          "delay_ms"_a = 0);

  nb::class_<DiskTable> disk(m, "DiskTable", "A table read from its files, row by row.");
  disk.def(
          "__init__",
          [](DiskTable* self, const std::vector<std::string>& paths,
             const std::vector<PlaneTuple>& planes, std::string reader, unsigned queue_depth,
             bool direct, uint32_t block, double read_timeout_s, bool zero_rows,
             uint32_t group_width, size_t cache_bytes, size_t lookahead_bytes,
             std::vector<Fault> faults, std::vector<uint32_t> groups) {
            const auto on_error = zero_rows ? OnReadError::kZeroRows : OnReadError::kRaise;
            new (self) DiskTable(paths, plane_specs(planes),
                                 {std::move(reader), queue_depth, direct, block, read_timeout_s,
                                  on_error, group_width, cache_bytes, lookahead_bytes,
                                  std::move(faults), checked(std::move(groups))});
          },
          "paths"_a, "planes"_a, nb::kw_only(), "reader"_a = "auto", "queue_depth"_a = 128,
          "direct"_a = true, "block"_a = 0, "read_timeout_s"_a = 10.0, "zero_rows"_a = false,
          "group_width"_a = 0, "cache_bytes"_a = 0, "lookahead_bytes"_a = 0,
          "faults"_a = nb::list(), "groups"_a = nb::list(),
          "planes: (row_bytes, [(file, offset, first_row, num_rows), ...]) "
          "each.")
      .def_prop_ro("reader", &DiskTable::reader_name)
      .def_prop_ro("reader_note", &DiskTable::reader_note, "Why it is this reader.")
      .def_prop_ro("queue_depth", &DiskTable::queue_depth);
  disk.def(
          "prefetch",
          [](DiskTable& self, const Tokens& row_ids) {
            uint64_t ticket = 0;
            without_gil([&] { ticket = self.prefetch({row_ids.data(), row_ids.shape(0)}); });
            return ticket;
          },
          "row_ids"_a.noconvert(), "Start to read groups of rows; returns a ticket's number.")
      .def(
          "ticket",
          [](const DiskTable& self, uint64_t number) {
            TicketState state;
            without_gil([&] { state = self.ticket(number); });
            return std::make_tuple(state.wanted, state.arrived, state.over);
          },
          "Rows wanted, rows arrived, and whether no more will be read.")
      .def("drop",
           [](DiskTable& self, uint64_t number) { without_gil([&] { self.drop(number); }); })
      .def("kept", &kept, "What cache and look-ahead hold and have done.");
  bind_table(disk);

  nb::class_<ResidentTable> resident(m, "ResidentTable",
                                     "A table mapped into memory, or loaded into it.");
  resident.def(
      "__init__",
      [](ResidentTable* self, const std::vector<std::string>& paths,
         const std::vector<PlaneTuple>& planes, bool mapped, bool zero_rows, uint64_t budget_bytes,
         std::vector<uint32_t> groups, nb::object progress) {
        const auto kind = mapped ? ResidentTable::Kind::kMapped : ResidentTable::Kind::kLoaded;
        const auto on_error = zero_rows ? OnReadError::kZeroRows : OnReadError::kRaise;
        without_gil([&] {
          new (self) ResidentTable(paths, plane_specs(planes), kind, signal_pending,
                                   {on_error, budget_bytes, checked(std::move(groups))},
                                   progress_of(progress));
        });
      },
      "paths"_a, "planes"_a, nb::kw_only(), "mapped"_a, "zero_rows"_a = false, "budget_bytes"_a = 0,
      "groups"_a = nb::list(), "progress"_a = nb::none(),
      "budget_bytes: of resident pages of a mapped table, 0 for none. progress: called with bytes "
      "done and bytes in all while a table is loaded.");
  bind_memory(m, resident);
  resident.def("mapped_pages", &mapped_pages, "What is known of the mappings; takes milliseconds.");
  bind_table(resident);

  bind_hash(m);
  bind_channels(m);
  bind_loader(m);
}

}  // namespace
}  // namespace rowstream

NB_MODULE(_core, m) { rowstream::bind_core(m); }
