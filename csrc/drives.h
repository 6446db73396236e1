// How many reads each drive has in flight, of all lanes of a table: what chooses among copies of
// the same rows. Any thread may call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "clock.h"
#include "extent.h"
#include "file.h"

namespace rowstream {

class Drives {
 public:
  explicit Drives(const std::vector<TableFile>& files)
      : reads_(files.size()), failures_(files.size()) {
    std::map<uint64_t, uint32_t> first;
    for (const TableFile& file : files) {
      const auto number = static_cast<uint32_t>(drive_of_.size());
      drive_of_.push_back(first.emplace(file.identity().device, number).first->second);
    }
    // one device for all of them: it may be several drives put together, so each file counts
    if (first.size() > 1) return;
    for (uint32_t file = 0; file < drive_of_.size(); ++file) drive_of_[file] = file;
  }

  void began(uint32_t file) { reads(file).fetch_add(1, std::memory_order_relaxed); }
  void ended(uint32_t file) { reads(file).fetch_sub(1, std::memory_order_relaxed); }

  // A drive that fails fast has the fewest reads in flight, and would be asked first for all of
  // them: after a few failures in a row it is asked last for a while. One bad sector is not enough.
  void failed(uint32_t file) {
    Failures& drive = failures_[drive_of_[file]];
    const int64_t now = now_ns();
    const bool again = now - drive.last_ns.exchange(now, std::memory_order_relaxed) < kAvoidNs;
    if (!again) drive.count.store(0, std::memory_order_relaxed);
    if (drive.count.fetch_add(1, std::memory_order_relaxed) + 1 < kInARow) return;
    drive.avoided_until_ns.store(now + kAvoidNs, std::memory_order_relaxed);
  }

  // which of the copies is to be read: that with the fewest reads in flight, equal ones in turn
  uint32_t choose(std::span<const Extent> copies) {
    const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
    const auto count = static_cast<uint32_t>(copies.size());
    uint32_t best = turn % count;
    uint32_t fewest = UINT32_MAX;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t copy = (turn + i) % count;
      const uint32_t file = copies[copy].file;
      const uint32_t waiting =
          reads(file).load(std::memory_order_relaxed) + (avoided(file) ? kMany : 0);
      if (waiting < fewest) best = copy;
      fewest = std::min(fewest, waiting);
    }
    return best;
  }

 private:
  struct Failures {
    std::atomic<int64_t> last_ns{INT64_MIN / 2};
    std::atomic<uint32_t> count{0};            // none of them long after the one before
    std::atomic<int64_t> avoided_until_ns{0};  // 0: never
  };

  static constexpr uint32_t kInARow = 4;
  static constexpr int64_t kAvoidNs = 100'000'000;
  static constexpr uint32_t kMany = 1 << 20;  // more than can be in flight

  std::atomic<uint32_t>& reads(uint32_t file) { return reads_[drive_of_[file]]; }

  bool avoided(uint32_t file) const {
    const int64_t until =
        failures_[drive_of_[file]].avoided_until_ns.load(std::memory_order_relaxed);
    return until != 0 && now_ns() < until;
  }

  std::vector<uint32_t> drive_of_;            // by file: the first file on the same drive
  std::vector<std::atomic<uint32_t>> reads_;  // by drive
  std::vector<Failures> failures_;            // by drive
  std::atomic<uint32_t> turn_{0};
};

}  // namespace rowstream
