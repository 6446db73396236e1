// Memory that a device may see, reserved once and cut into blocks: pinned memory cannot be made
// while a graph is captured. Pins nothing itself. Blocks come back from any thread.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "memory.h"

namespace rowstream {

class Arena {
 public:
  static constexpr size_t kAlignment = 256;

  // cpus: first touches the memory from there, so that it lies on their node; empty: anywhere.
  Arena(size_t bytes, const std::vector<int>& cpus);

  std::byte* data() const { return pages_.data(); }
  size_t size() const { return pages_.size(); }
  size_t used() const;
  // the largest block that could be taken now
  size_t largest_free() const;

  std::byte* take(size_t bytes);  // null when there is no room
  void give_back(std::byte* block);

 private:
  Pages pages_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;   // offset: bytes; neighbors are always joined
  std::map<size_t, size_t> taken_;  // the same
};

}  // namespace rowstream
