// The core without an interpreter, for ThreadSanitizer: many threads gather from one table, with
// reads that fail, come late or never end, while others ask for its counters and one closes it at
// the end.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "disk.h"
#include "failure.h"
#include "resident.h"

namespace {

using namespace rowstream;

constexpr uint32_t kRowBytes = 160;
constexpr int64_t kRows = 5000;
constexpr uint64_t kLead = 2239;
constexpr unsigned kHeads = 16;
constexpr std::array<uint32_t, 2> kGroups{8, 8};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "stress: %s\n", what);
  std::exit(1);
}

std::vector<std::byte> write_table(const std::string& path) {
  std::mt19937_64 random(std::random_device{}());
  std::vector<std::byte> bytes(kLead + kRows * kRowBytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<long>(bytes.size()));
  return bytes;
}

// what a gather may do beside giving the right rows
struct Allowed {
  bool fail = false;
  bool zero = false;  // give zeroes for a row
};

bool all_zero(const std::byte* row) {
  return std::all_of(row, row + kRowBytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// gathers until the table is closed or the rounds are over; returns how many failed
template <typename Table>
unsigned work(Table& table, const std::vector<std::byte>& bytes, unsigned rounds, Allowed allowed) {
  std::mt19937_64 random(std::random_device{}());
  unsigned failed = 0;
  std::vector<int64_t> ids;
  std::vector<std::byte> out;
  for (unsigned round = 0; round < rounds; ++round) {
    const size_t tokens = 1 + random() % 120;  // short ones and long ones
    ids.resize(tokens * kHeads);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % kRows);
    out.assign(ids.size() * kRowBytes, std::byte{0xEE});
    try {
      if constexpr (std::is_same_v<Table, DiskTable>) {
        const uint64_t ticket = table.prefetch(std::span(ids).first(random() % tokens * kHeads));
        if (random() % 8 == 0) table.drop(ticket);
      }
      table.gather({ids.data(), tokens, kGroups, kHeads}, out.data(), [] { return false; });
    } catch (const ReadFailure&) {
      if (!allowed.fail) fail("a read failed without a fault");
      ++failed;
      continue;
    } catch (const ClosedError&) {
      return failed;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::byte* want = bytes.data() + kLead + static_cast<size_t>(ids[i]) * kRowBytes;
      const std::byte* got = &out[i * kRowBytes];
      if (std::memcmp(got, want, kRowBytes) == 0) continue;
      if (!allowed.zero || !all_zero(got)) fail("wrong bytes");
    }
  }
  return failed;
}

template <typename Table>
void run(const char* name, Table& table, const std::vector<std::byte>& bytes, Allowed allowed) {
  std::atomic<unsigned> failed{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 6; ++i) {
    threads.emplace_back([&] { failed += work(table, bytes, 60, allowed); });
  }
  std::thread watcher([&] {
    uint64_t seen = 0;
    while (!over) seen += table.counters().rows.load() + table.memory_bytes();
    if (seen == 0) fail("nothing was counted");
  });
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&] { failed += work(table, bytes, 1'000'000, allowed); });
  }
  table.close();
  for (std::thread& thread : threads) thread.join();
  over = true;
  watcher.join();
  if (allowed.fail && failed == 0) fail("no fault was seen");
  if (allowed.zero && table.counters().zeroed_rows == 0) fail("no row was zeroed");
  std::printf("%s: ok, %u gathers failed as they should\n", name, failed.load());
}

enum class Mode { kSound, kKept, kErrors, kLate, kNever, kZeroRows };

const char* name_of(Mode mode) {
  switch (mode) {
    case Mode::kSound:
      return "sound";
    case Mode::kKept:
      return "rows kept";
    case Mode::kErrors:
      return "errors";
    case Mode::kLate:
      return "late reads";
    case Mode::kNever:
      return "reads without end";
    case Mode::kZeroRows:
      return "zero rows";
  }
  return "";
}

DiskTable::Options options_for(Mode mode, const char* reader) {
  DiskTable::Options options;
  options.reader = reader;
  options.queue_depth = 24;
  const auto fault = [&](uint64_t number, std::optional<int32_t> result, int32_t delay_ms) {
    options.faults.push_back(
        {.first = number, .count = 1, .at = {}, .result = result, .delay_ms = delay_ms});
  };
  if (mode == Mode::kKept) {
    options.group_width = 8;
    options.cache_bytes = size_t{1} << 20;
    options.lookahead_bytes = size_t{1} << 20;
  } else if (mode == Mode::kErrors) {
    for (uint64_t n = 0; n < 400; ++n) fault(n * 97, -ENXIO, 0);
  } else if (mode == Mode::kLate) {
    for (uint64_t n = 0; n < 400; ++n) fault(n * 97, {}, static_cast<int32_t>(1 + n % 5));
  } else if (mode == Mode::kNever) {
    // one short of the parked lanes after which a table gives up
    options.read_timeout_s = 0.05;
    for (uint64_t n = 0; n < 3; ++n) fault(100 + n * 2000, {}, -1);
  } else if (mode == Mode::kZeroRows) {
    options.on_read_error = OnReadError::kZeroRows;
    for (uint64_t row = 7; row < kRows; row += 499) {
      options.faults.push_back({.at = kLead + row * kRowBytes, .result = -EIO});
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) fail("usage: stress FILE");
  const std::string path = argv[1];
  const std::vector<std::byte> bytes = write_table(path);
  const std::vector<PlaneSpec> planes{{kRowBytes, {{0, kLead, 0, kRows}}}};
  for (const char* reader : {"uring", "pool"}) {
    for (const Mode mode :
         {Mode::kSound, Mode::kKept, Mode::kErrors, Mode::kLate, Mode::kNever, Mode::kZeroRows}) {
      try {
        DiskTable table({path}, planes, options_for(mode, reader));
        run((std::string(reader) + ", " + name_of(mode)).c_str(), table, bytes,
            {.fail = mode == Mode::kErrors || mode == Mode::kNever,
             .zero = mode == Mode::kZeroRows});
        if (mode == Mode::kNever && table.counters().timeouts == 0) fail("no read timed out");
      } catch (const Unavailable& error) {
        std::printf("%s: skipped, %s\n", reader, error.what());
      }
    }
  }
  for (const auto kind : {ResidentTable::Kind::kMapped, ResidentTable::Kind::kLoaded}) {
    ResidentTable table({path}, planes, kind, [] { return false; }, {});
    run("resident", table, bytes, {});
  }
  // Pages are dropped all the time, and half of them are gone: SIGBUS in every thread. After a
  // second the table looks at its file, and faults no more: on a busy machine that may come first.
  for (int tries = 0; tries < 10; ++tries) {
    const std::vector<std::byte> written = write_table(path);
    ResidentTable cut({path}, planes, ResidentTable::Kind::kMapped, [] { return false; },
                      {OnReadError::kRaise, 1});
    cut.gather({std::array<int64_t, kHeads>{}.data(), 1, kGroups, kHeads},
               std::vector<std::byte>(kHeads * kRowBytes).data(), [] { return false; });
    if (truncate(path.c_str(), 100 * 4096) != 0) fail("the file cannot be cut");
    run("cut short", cut, written, {.fail = true});
    if (cut.mapped_pages().faults > 0) return 0;
  }
  fail("no fault was caught");
}
