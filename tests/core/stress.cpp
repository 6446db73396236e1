// The core without an interpreter, for ThreadSanitizer: many threads gather from one table, with
// and without faults, while others ask for its counters and one closes it at the end.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
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

// gathers until the table is closed or the rounds are over; returns how many failed
template <typename Table>
unsigned work(Table& table, const std::vector<std::byte>& bytes, unsigned rounds, bool may_fail) {
  std::mt19937_64 random(std::random_device{}());
  unsigned failed = 0;
  std::vector<int64_t> ids;
  std::vector<std::byte> out;
  for (unsigned round = 0; round < rounds; ++round) {
    const size_t tokens = 1 + random() % 40;
    ids.resize(tokens * kHeads);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % kRows);
    out.assign(ids.size() * kRowBytes, std::byte{0xEE});
    try {
      table.gather({ids.data(), tokens, kGroups, kHeads}, out.data(), [] { return false; });
    } catch (const ReadFailure&) {
      if (!may_fail) fail("a read failed without a fault");
      ++failed;
      continue;
    } catch (const ClosedError&) {
      return failed;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::byte* want = bytes.data() + kLead + static_cast<size_t>(ids[i]) * kRowBytes;
      if (std::memcmp(&out[i * kRowBytes], want, kRowBytes) != 0) fail("wrong bytes");
    }
  }
  return failed;
}

template <typename Table>
void run(const char* name, Table& table, const std::vector<std::byte>& bytes, bool may_fail) {
  std::atomic<unsigned> failed{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 6; ++i) {
    threads.emplace_back([&] { failed += work(table, bytes, 60, may_fail); });
  }
  std::thread watcher([&] {
    uint64_t seen = 0;
    while (!over) seen += table.counters().rows.load() + table.memory_bytes();
    if (seen == 0) fail("nothing was counted");
  });
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&] { failed += work(table, bytes, 1'000'000, may_fail); });
  }
  table.close();
  for (std::thread& thread : threads) thread.join();
  over = true;
  watcher.join();
  if (may_fail && failed == 0) fail("no fault was seen");
  std::printf("%s: ok, %u gathers failed as they should\n", name, failed.load());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) fail("usage: stress FILE");
  const std::string path = argv[1];
  const std::vector<std::byte> bytes = write_table(path);
  const std::vector<PlaneSpec> planes{{kRowBytes, {{0, kLead, 0, kRows}}}};
  for (const char* reader : {"uring", "pool"}) {
    for (const bool faults : {false, true}) {
      DiskTable::Options options;
      options.reader = reader;
      options.queue_depth = 24;
      for (uint64_t n = 0; faults && n < 400; ++n)
        options.faults.push_back({.first = n * 97, .count = 1, .at = {}, .result = -ENXIO});
      try {
        DiskTable table({path}, planes, options);
        run(reader, table, bytes, faults);
      } catch (const Unavailable& error) {
        std::printf("%s: skipped, %s\n", reader, error.what());
      }
    }
  }
  for (const auto kind : {ResidentTable::Kind::kMapped, ResidentTable::Kind::kLoaded}) {
    ResidentTable table({path}, planes, kind, [] { return false; });
    run("resident", table, bytes, false);
  }
  return 0;
}
