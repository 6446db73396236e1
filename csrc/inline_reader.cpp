#include "inline_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kReturnAfter = std::chrono::milliseconds(100);
// reads between two looks at the clock
constexpr size_t kReads = 64;

}  // namespace

size_t InlineReader::wait(unsigned /*at_least*/, std::span<Completion> done) {
  const size_t count = std::min(done.size(), pushed_.size() - next_);
  const Clock::time_point until = Clock::now() + kReturnAfter;
  size_t i = 0;
  while (i < count) {
    const Read& read = pushed_[next_ + i];
    const ssize_t got = pread(read.fd, read.into, read.length, static_cast<off_t>(read.offset));
    done[i] = {read.slot, got < 0 ? -errno : static_cast<int32_t>(got)};
    if (++i % kReads == 0 && Clock::now() >= until) break;
  }
  next_ += i;
  if (next_ == pushed_.size()) {
    pushed_.clear();
    next_ = 0;
  }
  return i;
}

}  // namespace rowstream
