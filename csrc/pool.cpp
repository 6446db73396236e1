#include "pool.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace rowstream {

Pool::Pool() {
  // a signal must reach a thread that the interpreter knows
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (unsigned i = 0; i < kThreads; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {
    // a limit on threads: fewer of them read as well, none cannot
    if (threads_.empty()) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::push(const Read& read) { pushed_.push_back(read); }

size_t Pool::wait(unsigned at_least, std::span<Completion> done) {
  std::unique_lock lock(mutex_);
  const size_t handed = pushed_.size();
  queue_.insert(queue_.end(), pushed_.begin(), pushed_.end());
  pushed_.clear();
  if (handed >= kThreads) {
    work_.notify_all();
  } else {
    for (size_t i = 0; i < handed; ++i) work_.notify_one();
  }
  wanted_ = std::min(at_least, static_cast<unsigned>(done.size()));
  done_.wait_for(lock, std::chrono::milliseconds(100),
                 [this] { return completed_.size() >= wanted_; });
  wanted_ = 0;
  const size_t count = std::min(done.size(), completed_.size());
  std::copy_n(completed_.begin(), count, done.begin());
  completed_.erase(completed_.begin(), completed_.begin() + static_cast<ptrdiff_t>(count));
  return count;
}

void Pool::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) return;
    const Read read = queue_.front();
    queue_.pop_front();
    lock.unlock();
    const ssize_t got = pread(read.fd, read.into, read.length, static_cast<off_t>(read.offset));
    const int32_t result = got < 0 ? -errno : static_cast<int32_t>(got);
    lock.lock();
    completed_.push_back({read.slot, result});
    if (wanted_ > 0 && completed_.size() >= wanted_) done_.notify_one();
  }
}

}  // namespace rowstream
