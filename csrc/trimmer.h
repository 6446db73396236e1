// Keeps the resident pages of some mappings under a budget: drops them from the page tables, slice
// by slice in turn, from a thread of its own. The page cache keeps them, so a row that is wanted
// again costs a fault. Gathers report what they have touched, and help when the thread falls
// behind.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "mapping.h"
#include "resident_set.h"

namespace rowstream {

class Trimmer {
 public:
  // One madvise call, at most 65,536 pages: a few milliseconds. Slices of 64 MiB take twice as long
  // for as many pages, when those are few and far between.
  static constexpr size_t kSliceBytes = size_t{256} << 20;
  // how far above the budget the resident pages may be for a moment
  static constexpr size_t kSlackBytes = size_t{64} << 20;

  Trimmer(std::vector<AddressRange> ranges, uint64_t budget_bytes);  // throws std::system_error
  ~Trimmer() { stop(); }
  Trimmer(const Trimmer&) = delete;
  Trimmer& operator=(const Trimmer&) = delete;

  // ends the thread: the ranges are not touched any more, the counts stay
  void stop();

  // After at most kMaxRows rows were touched, at a moment when the caller holds nothing that the
  // thread needs. Any thread may call.
  void touched(size_t rows) {
    if (rows_left_.fetch_sub(static_cast<int64_t>(rows), std::memory_order_relaxed) <=
        static_cast<int64_t>(rows)) {
      look();
    }
  }
  static constexpr size_t kMaxRows = 256;
  static constexpr int64_t kMinRows = 16;

  uint64_t budget_bytes() const { return budget_bytes_; }
  // slices dropped, and calls that failed (locked memory)
  uint64_t drops() const { return drops_.load(std::memory_order_relaxed); }
  uint64_t failures() const { return failures_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  void look();
  void run();
  void trim();
  void measure();
  // by the change of the process's file pages since the last exact measure
  int64_t estimate(int64_t file_pages) const {
    return resident_.load(std::memory_order_relaxed) + file_pages -
           reference_.load(std::memory_order_relaxed);
  }
  uint64_t drop_next();  // its bytes

  const std::vector<AddressRange> ranges_;
  const uint64_t budget_bytes_;
  uint64_t total_bytes_ = 0;
  const FilePages file_pages_;
  std::atomic<int64_t> resident_{0};   // at the last exact measure
  std::atomic<int64_t> reference_{0};  // the process's file pages then
  std::atomic<int64_t> rows_left_{0};  // until the next look
  std::atomic<int64_t> last_look_{0};  // the file pages at the last look
  std::atomic<int64_t> interval_{kMinRows};
  std::atomic<uint64_t> drops_{0};
  std::atomic<bool> dropped_{false};  // since the last look
  std::atomic<uint64_t> failures_{0};
  std::atomic<int64_t> hopeless_until_ns_{0};

  std::mutex trimming_;  // guards the next three lines
  size_t next_range_ = 0;
  size_t next_offset_ = 0;
  Clock::time_point measured_at_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool wanted_ = false;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace rowstream
