#include "fork.h"

#include <pthread.h>

#include <atomic>

namespace rowstream {
namespace {

std::atomic<unsigned> generation{0};
const int registered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

unsigned fork_generation() noexcept {
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace rowstream
