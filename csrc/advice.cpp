#include "advice.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace rowstream {
namespace {

// the same numbers on every architecture; older build images have no names for them
constexpr long kPidfdOpen = 434;       // Linux 5.3
constexpr long kProcessMadvise = 440;  // Linux 5.10; of oneself without a privilege: 6.13

// only the difference of two calls means something
int64_t thread_reads() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  // blocks, where the kernel counts them; faults that waited for a read, everywhere
  return int64_t{usage.ru_inblock} + usage.ru_majflt;
}

}  // namespace

Advice::Advice()
    : page_mask_(~(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1)),
      self_(static_cast<int>(syscall(kPidfdOpen, getpid(), 0))),
      batched_(self_ >= 0) {}

Advice::~Advice() {
  if (self_ >= 0) close(self_);
}

void Advice::Batch::add(const std::byte* data, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = first & advice_.page_mask_;
  const uintptr_t end = (first + bytes + ~advice_.page_mask_) & advice_.page_mask_;
  if (count_ == kRanges) send();
  ranges_[count_++] = {begin, end - begin};
}

void Advice::Batch::send() {
  size_t at = 0;
  if (count_ > 1 && advice_.batched_.load(std::memory_order_relaxed)) {
    const long done = syscall(kProcessMadvise, advice_.self_, ranges_, count_, MADV_WILLNEED, 0);
    if (done < 0 && (errno == EPERM || errno == ENOSYS || errno == EINVAL)) {
      advice_.batched_ = false;
    }
    // it ends at the first range that fails, and says how many bytes it was through with
    size_t left = done > 0 ? static_cast<size_t>(done) : 0;
    while (at < count_ && left >= ranges_[at].bytes) left -= ranges_[at++].bytes;
  }
  for (; at < count_; ++at) {
    const Range& range = ranges_[at];
    if (madvise(reinterpret_cast<void*>(range.begin), range.bytes, MADV_WILLNEED) != 0) {
      advice_.failures_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  count_ = 0;
}

void Advice::learn(size_t rows) {
  if (copied_.fetch_add(rows, std::memory_order_relaxed) + rows < kLearnRows) return;
  copied_.store(0, std::memory_order_relaxed);
  static thread_local int64_t reads_before = -1;
  const int64_t reads = thread_reads();
  const int64_t before = std::exchange(reads_before, reads);
  if (before < 0) return;
  if (reads != before) {
    warm_rows_.store(0, std::memory_order_relaxed);
  } else if (worth_it()) {
    warm_rows_.fetch_add(kLearnRows, std::memory_order_relaxed);
  }
}

}  // namespace rowstream
