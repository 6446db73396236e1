#include "channel_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpus.h"
#include "disk.h"
#include "loop.h"
#include "resident.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace rowstream {
namespace {

using Ids = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>, nb::c_contig>;
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>, nb::c_contig>;

uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }

// A driver calls these two, on a thread of its own and without the interpreter's lock.
void release_hold(void* channel) { static_cast<Channel*>(channel)->release(); }
void wait_for_answer(void* channel) { static_cast<Channel*>(channel)->wait_for_answer(); }

// Not a shared pointer of nanobind's: that one holds the Python object, and the last channel ends
// on a thread that must not ask for the interpreter's lock.
struct ArenaOwner {
  std::shared_ptr<Arena> arena;
};

// Python's hold on a channel; graphs have their own.
class Owner {
 public:
  explicit Owner(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~Owner() { channel_->release(); }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  Channel& operator*() const { return *channel_; }
  Channel* operator->() const { return channel_.get(); }

 private:
  const std::shared_ptr<Channel> channel_;
};

// A loop and the table that its thread reads: the table stays until the thread has let go of it.
class TableLoop {
 public:
  TableLoop(nb::object table, Loop::Serve serve, Loop::Options options)
      : table_(std::move(table)), loop_(std::move(serve), std::move(options)) {}
  ~TableLoop() { close(); }

  bool close() {
    bool let_go = false;
    {
      const nb::gil_scoped_release released;
      let_go = loop_.close();
    }
    if (let_go) {
      table_.reset();
    } else {
      (void)table_.release();  // a read that does not end: it stays for the life of the process
    }
    return let_go;
  }

  Loop* operator->() { return &loop_; }

 private:
  nb::object table_;
  Loop loop_;
};

template <typename Table>
Loop::Serve serve_from(Table& table, std::vector<uint32_t> groups) {
  size_t heads = 0;
  for (const uint32_t width : groups) heads += width;
  if (heads == 0) throw std::invalid_argument("groups have no heads");
  return [&table, groups = std::move(groups), heads](std::span<const int64_t> ids, std::byte* out,
                                                     const Poll& late) {
    if (ids.size() % heads != 0) {
      throw std::out_of_range(std::to_string(ids.size()) + " ids are no multiple of " +
                              std::to_string(heads) + " heads");
    }
    if (ids.empty()) return;
    table.gather({ids.data(), ids.size() / heads, groups, static_cast<unsigned>(heads)}, out, late);
  };
}

Loop::Serve serve_any(const nb::object& table, std::vector<uint32_t> groups) {
  if (nb::isinstance<DiskTable>(table)) {
    return serve_from(nb::cast<DiskTable&>(table), std::move(groups));
  }
  return serve_from(nb::cast<ResidentTable&>(table), std::move(groups));
}

Loop::Spin spin_of(const std::string& name) {
  if (name == "auto") return Loop::Spin::kAuto;
  if (name == "always") return Loop::Spin::kAlways;
  if (name == "never") return Loop::Spin::kNever;
  throw std::invalid_argument("io_spin needs one of auto, always, never, got '" + name + "'");
}

}  // namespace

void bind_channels(nb::module_& m) {
  m.def("usable_cpus", &usable_cpus,
        "Processors' worth of time that this process may take: affinity and control groups.");
  m.attr("RELEASE_HOLD") = address_of(reinterpret_cast<const void*>(&release_hold));
  m.attr("WAIT_FOR_ANSWER") = address_of(reinterpret_cast<const void*>(&wait_for_answer));

  nb::class_<ArenaOwner>(m, "Arena", "Memory for channels, reserved once and cut into blocks.")
      .def(
          "__init__",
          [](ArenaOwner* self, size_t bytes, const std::vector<int>& cpus) {
            new (self) ArenaOwner{std::make_shared<Arena>(bytes, cpus)};
          },
          "bytes"_a, "cpus"_a = nb::list(), "cpus: whose node the memory lies on; none: any.")
      .def_prop_ro("address", [](const ArenaOwner& self) { return address_of(self.arena->data()); })
      .def_prop_ro("bytes", [](const ArenaOwner& self) { return self.arena->size(); })
      .def_prop_ro("used_bytes", [](const ArenaOwner& self) { return self.arena->used(); });

  nb::class_<Owner>(m, "Channel", "Words, mailbox and staging of one lookup.")
      .def_static("bytes_for", &Channel::bytes_for, "max_rows"_a, "row_bytes"_a)
      .def_prop_ro("address", [](const Owner& self) { return address_of(&self->words()); })
      .def_prop_ro("max_rows", [](const Owner& self) { return self->max_rows(); })
      .def_prop_ro(
          "answered", [](const Owner& self) { return self->answered(); },
          "The last epoch that has an answer.")
      .def_prop_ro(
          "door", [](const Owner& self) { return self->words().door.load(); },
          "The epoch of the last ring.")
      .def_prop_ro(
          "fault",
          [](const Owner& self) {
            const Words& words = self->words();
            return std::make_pair(words.fault.load(), words.faults.load());
          },
          "The last void step as epoch << 8 | status, and how many there were.")
      .def_prop_ro("is_open", [](const Owner& self) { return self->is_open(); })
      .def_prop_ro(
          "mailbox",
          [](nb::handle self) {
            const auto& channel = nb::cast<Owner&>(self);
            return Ids(channel->mailbox(), {channel->max_rows()}, self);
          },
          "int64 [max_rows]")
      .def_prop_ro(
          "staging",
          [](nb::handle self) {
            const auto& channel = nb::cast<Owner&>(self);
            return Bytes(channel->staging(), {channel->max_rows(), channel->row_bytes()}, self);
          },
          "uint8 [max_rows, row_bytes]")
      .def_prop_ro("staging_address", [](const Owner& self) { return address_of(self->staging()); })
      .def(
          "fill", [](Owner& self, uint64_t epoch) { self->fill(epoch); }, "epoch"_a,
          "Of a gated channel: its staging has the rows of this step.")
      .def(
          "open", [](Owner& self) { self->open(Status::kClosed); },
          "Every wait passes and every step is void.")
      .def(
          "reset", [](Owner& self, uint64_t epoch) { self->reset(epoch); }, "epoch"_a,
          "Start again; only when nothing of it is in flight on the device.")
      .def(
          "hold",
          [](Owner& self) {
            self->hold();
            return address_of(&*self);
          },
          "For one more graph: the argument that RELEASE_HOLD is to be called with.")
      .def(
          "unhold", [](Owner& self) { self->release(); }, "Take a hold back.")
      .def_prop_ro(
          "holds", [](const Owner& self) { return self->holds(); }, "Ours and those of graphs.")
      .def_prop_ro(
          "argument", [](const Owner& self) { return address_of(&*self); },
          "The argument of WAIT_FOR_ANSWER.");

  nb::class_<TableLoop>(m, "Loop", "The threads that answer a table's channels.")
      .def(
          "__init__",
          [](TableLoop* self, nb::object table, const std::vector<uint32_t>& groups,
             double read_timeout_s, const std::string& spin, unsigned ranks,
             const std::vector<int>& cpus) {
            Loop::Serve serve = serve_any(table, groups);
            new (self) TableLoop(std::move(table), std::move(serve),
                                 {read_timeout_s, spin_of(spin), ranks, cpus});
          },
          "table"_a, "groups"_a, nb::kw_only(), "read_timeout_s"_a = 2.0, "spin"_a = "auto",
          "ranks"_a = 1, "cpus"_a = nb::list(), "cpus: where the thread runs; none: anywhere.")
      .def(
          "add",
          [](TableLoop& self, const ArenaOwner& arena, uint32_t max_rows, uint32_t row_bytes,
             bool gated) { return new Owner(self->add(arena.arena, max_rows, row_bytes, gated)); },
          "arena"_a, "max_rows"_a, "row_bytes"_a, "gated"_a = false)
      .def(
          "kick", [](TableLoop& self) { self->kick(); }, "A ring is near: look out for it.")
      .def_prop_ro("spins", [](TableLoop& self) { return self->spins(); })
      .def_prop_ro("channels", [](TableLoop& self) { return self->channels(); })
      .def_prop_ro(
          "faults", [](TableLoop& self) { return self->faults(); },
          "Void steps that the device has reported.")
      .def(
          "raise_failure",
          [](TableLoop& self) {
            if (const std::exception_ptr why = self->record().take_failure())
              std::rethrow_exception(why);
          },
          "Raise what made a step void, once, if that is known.")
      .def("counters",
           [](TableLoop& self) {
             const Record& record = self->record();
             nb::dict dict;
             dict["rings"] = record.rings.load();
             dict["voids"] = record.voids.load();
             dict["late"] = record.late.load();
             dict["answer_ns"] = record.answer_ns.load();
             return nb::typed<nb::dict, nb::str, nb::int_>(dict);
           })
      .def("close", &TableLoop::close,
           "Open all channels; True when the thread has let go of the table.");
}

}  // namespace rowstream
