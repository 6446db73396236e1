#include "trimmer.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>

#include "clock.h"

namespace rowstream {
namespace {

constexpr auto kTick = std::chrono::milliseconds(100);
// an exact measure takes milliseconds: a younger one is good enough
constexpr auto kMeasureEvery = std::chrono::milliseconds(100);
// when pages cannot be dropped, gathers stop trying for a while
constexpr auto kHopelessFor = std::chrono::seconds(1);
// so far above the budget, gathers do the trimming themselves
constexpr int64_t kHelpAbove = Trimmer::kSlackBytes / 4;
// what may be mapped between two looks
constexpr int64_t kLookBytes = Trimmer::kSlackBytes / 8;

}  // namespace

Trimmer::Trimmer(std::vector<AddressRange> ranges, uint64_t budget_bytes)
    : ranges_(std::move(ranges)), budget_bytes_(budget_bytes) {
  for (const AddressRange& range : ranges_) total_bytes_ += range.size;
  measure();
  last_look_ = reference_.load();
  // a signal must reach a thread that the interpreter knows
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Trimmer::stop() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Trimmer::look() {
  const int64_t now = file_pages_.bytes();
  // A fault may map the neighbors in the page cache with its page, 64 KiB or a large folio: what
  // the last rows have mapped says how many may pass until the next look.
  // What was dropped meanwhile hides what was mapped: that look says nothing.
  const int64_t rows = interval_.load(std::memory_order_relaxed);
  const int64_t grown = now - last_look_.exchange(now);
  int64_t next = rows;
  if (!dropped_.exchange(false, std::memory_order_relaxed) && grown >= 0) {
    const int64_t fitting = grown > 0 ? rows * kLookBytes / grown : rows * 2;
    next = std::clamp(std::min(fitting, rows * 2), kMinRows, int64_t{kMaxRows});
  }
  interval_.store(next, std::memory_order_relaxed);
  rows_left_.store(next, std::memory_order_relaxed);

  const auto budget = static_cast<int64_t>(budget_bytes_);
  const int64_t have = estimate(now);
  // less than at the last measure: others have unmapped files, which would hide what we map
  const bool shrunk = now + kLookBytes < reference_.load(std::memory_order_relaxed);
  if (have <= budget && !shrunk) return;
  if (have > budget + kHelpAbove && now_ns() > hopeless_until_ns_.load()) {
    trim();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    wanted_ = true;
  }
  wake_.notify_one();
}

void Trimmer::run() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    wake_.wait_for(lock, kTick, [this] { return wanted_ || closing_; });
    if (closing_) return;
    wanted_ = false;
    lock.unlock();
    trim();
    lock.lock();
  }
}

void Trimmer::measure() {
  const int64_t before = file_pages_.bytes();
  resident_ = static_cast<int64_t>(resident_bytes(ranges_));
  // of the pages mapped meanwhile some are in both: they count twice until the next measure
  reference_ = before;
  measured_at_ = Clock::now();
}

void Trimmer::trim() {
  const std::lock_guard lock(trimming_);
  const auto budget = static_cast<int64_t>(budget_bytes_);
  const int64_t now = file_pages_.bytes();
  const bool shrunk = now + kLookBytes < reference_.load(std::memory_order_relaxed);
  if (estimate(now) <= budget && !shrunk) return;
  if (Clock::now() - measured_at_ >= kMeasureEvery) measure();
  // a quarter below, so that the next page does not start it again
  const int64_t enough = budget - std::min<int64_t>(budget, kSlackBytes) / 4;
  if (estimate(file_pages_.bytes()) <= budget) return;
  const uint64_t failed_before = failures();
  uint64_t dropped = 0;
  while (dropped < total_bytes_ && estimate(file_pages_.bytes()) > enough) dropped += drop_next();
  if (dropped < total_bytes_) return;
  // all of it and not enough: others have mapped files, or the pages are locked
  measure();
  if (resident_.load() > budget && failures() > failed_before) {
    hopeless_until_ns_ = now_ns() + std::chrono::nanoseconds(kHopelessFor).count();
  }
}

uint64_t Trimmer::drop_next() {
  const AddressRange& range = ranges_[next_range_];
  const size_t bytes = std::min(kSliceBytes, range.size - next_offset_);
  void* const at = const_cast<std::byte*>(range.data + next_offset_);
  if (madvise(at, bytes, MADV_DONTNEED) != 0) failures_.fetch_add(1, std::memory_order_relaxed);
  drops_.fetch_add(1, std::memory_order_relaxed);
  dropped_.store(true, std::memory_order_relaxed);
  next_offset_ += bytes;
  if (next_offset_ == range.size) {
    next_offset_ = 0;
    next_range_ = (next_range_ + 1) % ranges_.size();
  }
  return bytes;
}

}  // namespace rowstream
