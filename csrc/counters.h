// What a table has done since it was opened. Written by gathers, read by
// anyone.
#pragma once

#include <atomic>
#include <cstdint>

namespace rowstream {

struct Counters {
  std::atomic<uint64_t> gathers{0};
  std::atomic<uint64_t> rows{0};
  std::atomic<uint64_t> duplicate_rows{0};  // rows that another one of the same piece served
  std::atomic<uint64_t> missing_rows{0};    // id -1
  std::atomic<uint64_t> cached_rows{0};     // served by the cache
  std::atomic<uint64_t> ahead_rows{0};      // served by the look-ahead
  std::atomic<uint64_t> reads{0};
  std::atomic<uint64_t> read_bytes{0};
  std::atomic<uint64_t> retries{0};
  std::atomic<uint64_t> read_errors{0};  // spans given up after every retry
  std::atomic<uint64_t> timeouts{0};     // lanes parked because a read never ended
  std::atomic<uint64_t> zeroed_rows{0};  // rows of such spans, where zeroes were asked for
  std::atomic<uint64_t> gather_ns{0};
  std::atomic<uint64_t> plan_ns{0};  // of that, until the reads are known
};

}  // namespace rowstream
