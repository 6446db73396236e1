// Sixteen threads that pread, for systems without io_uring. Sixteen saturate
// the consumer drives that were measured; threads block all signals and hold no
// Python object.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "reader.h"

namespace rowstream {

class Pool final : public Reader {
 public:
  static constexpr unsigned kThreads = 16;

  Pool();
  ~Pool() override;  // waits for reads that a thread has begun

  const char* name() const override { return "pool"; }
  void push(const Read& read) override;
  size_t wait(unsigned at_least, std::span<Completion> done) override;
  size_t memory_bytes() const override { return 0; }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Read> queue_;
  std::vector<Completion> completed_;
  std::vector<Read> pushed_;  // the owner's, until wait() hands them over
  unsigned wanted_ = 0;       // the owner sleeps until so many are completed
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rowstream
