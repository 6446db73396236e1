// Which gathers wait or run, and how many reads those that are less urgent may have in flight
// meanwhile: a decode step comes before a prompt, and that before what is read ahead. Priority in
// our own queue does nothing for reads that the device has already, so there may only be few.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "clock.h"

namespace rowstream {

class Traffic {
 public:
  using Clock = std::chrono::steady_clock;

  // Gathers of more rows than a step of 64 lanes with 16 heads are long.
  static constexpr uint32_t kShortRows = 1024;

  // counts a gather while it waits or runs
  class Present {
   public:
    Present(Traffic& traffic, bool is_short) : traffic_(traffic), short_(is_short) {
      traffic_.gathers_.fetch_add(1, std::memory_order_relaxed);
      if (short_) traffic_.short_.fetch_add(1, std::memory_order_relaxed);
    }
    ~Present() {
      traffic_.last_ns_.store(now_ns(), std::memory_order_relaxed);
      if (short_) traffic_.short_.fetch_sub(1, std::memory_order_relaxed);
      traffic_.gathers_.fetch_sub(1, std::memory_order_relaxed);
    }
    Present(const Present&) = delete;
    Present& operator=(const Present&) = delete;

   private:
    Traffic& traffic_;
    const bool short_;
  };

  // Reads in flight of a long gather that began then: a quarter while a short one waits or runs,
  // but not for long, or a slow device would keep whoever waits for it beyond every time-out.
  unsigned limit_of_long(unsigned depth, Clock::time_point began) const {
    if (short_.load(std::memory_order_relaxed) == 0) return depth;
    if (Clock::now() - began > kGivesWayFor) return depth;
    return std::min(std::max(depth / 4, kFew), depth);
  }

  // reads in flight of the look-ahead: few beside any gather, and between two of them
  unsigned limit_of_lookahead(unsigned depth) const {
    const bool decoding = gathers_.load(std::memory_order_relaxed) > 0 ||
                          last_ns_.load(std::memory_order_relaxed) > now_ns() - kQuietAfterNs;
    return decoding ? std::min(kFew, depth) : depth;
  }

 private:
  static constexpr auto kGivesWayFor = std::chrono::milliseconds(500);
  // 8 cost a 16-read round 5 % and keep half of the rate, 16 cost 23 % (2-core guest, virtio disk)
  static constexpr unsigned kFew = 8;
  // a token every 20 ms or more often is decoding
  static constexpr int64_t kQuietAfterNs = 20'000'000;

  std::atomic<unsigned> gathers_{0};
  std::atomic<unsigned> short_{0};
  std::atomic<int64_t> last_ns_{INT64_MIN};
};

}  // namespace rowstream
