// Wakes a loop's thread: a word that it sleeps on. Free when the thread is awake. Any thread may
// ring it, also a driver's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace rowstream {

class Bell {
 public:
  // a ring is near: look out for it
  void kick();
  // channels have come or gone
  void changed();

  uint32_t kicks() const { return kicks_.load(std::memory_order_acquire); }
  uint32_t changes() const { return changes_.load(std::memory_order_acquire); }

  // Sleeps until a kick or a change that `seen` (what state() was) does not know, or so long.
  void sleep(uint32_t seen, std::chrono::nanoseconds at_most);
  uint32_t state() const { return state_.load(std::memory_order_acquire); }

 private:
  void wake();

  std::atomic<uint32_t> state_{0};  // what the kernel compares
  std::atomic<uint32_t> kicks_{0};
  std::atomic<uint32_t> changes_{0};
  std::atomic<bool> asleep_{false};
};

}  // namespace rowstream
