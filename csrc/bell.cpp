#include "bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace rowstream {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads it");

void Bell::kick() {
  kicks_.fetch_add(1, std::memory_order_release);
  wake();
}

void Bell::changed() {
  changes_.fetch_add(1, std::memory_order_release);
  wake();
}

void Bell::wake() {
  state_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) {
    syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
}

void Bell::sleep(uint32_t seen, std::chrono::nanoseconds at_most) {
  const timespec wait{at_most.count() / 1'000'000'000, at_most.count() % 1'000'000'000};
  asleep_.store(true, std::memory_order_seq_cst);
  syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, seen, &wait, nullptr, 0);
  asleep_.store(false, std::memory_order_relaxed);
}

}  // namespace rowstream
