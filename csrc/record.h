// What the channels of one loop have done, and what last went wrong; outlives each of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

namespace rowstream {

struct Record {
  std::atomic<uint64_t> rings{0};      // seen and served
  std::atomic<uint64_t> voids{0};      // answers that were not OK
  std::atomic<uint64_t> late{0};       // answers that came after another had been given
  std::atomic<uint64_t> answer_ns{0};  // from a ring being seen to its answer, in all
  std::atomic<uint64_t> faults{0};     // void steps that devices had reported to channels now gone

  void remember(std::exception_ptr why) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(why);
  }
  // once
  std::exception_ptr take_failure() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, nullptr);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace rowstream
