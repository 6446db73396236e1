// The steady clock as a number that threads can share.
#pragma once

#include <chrono>
#include <cstdint>

namespace rowstream {

inline int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace rowstream
