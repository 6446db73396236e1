// A reader that fails on purpose: it stands before another one and changes what
// tests name. Always compiled, so that what is tested is what ships.
#pragma once

#include <atomic>
#include <chrono>
#include <optional>

#include "reader.h"

namespace rowstream {

struct Fault {
  // Which reads: number first .. first + count - 1 in the order pushed, from 0;
  // or, with `at`, every read that covers this byte of its file.
  uint64_t first = 0;
  uint64_t count = 0;
  std::optional<uint64_t> at;
  // How they end: with -errno, or with at most so many bytes, and the rest of
  // the slot poisoned ...
  std::optional<int32_t> result;
  // ... and so much later than they did, past reads pushed after them;
  // negative: never
  int32_t delay_ms = 0;
};

// counts reads over the life of a table, whichever lane they take
class FaultSchedule {
 public:
  explicit FaultSchedule(std::vector<Fault> faults) : faults_(std::move(faults)) {}
  const Fault* next(const Read& read);

 private:
  std::vector<Fault> faults_;
  std::atomic<uint64_t> pushed_{0};
};

class FaultReader final : public Reader {
 public:
  FaultReader(std::unique_ptr<Reader> inner, std::shared_ptr<FaultSchedule> schedule,
              unsigned depth);

  const char* name() const override { return inner_->name(); }
  void push(const Read& read) override;
  size_t wait(unsigned at_least, std::span<Completion> done) override;
  size_t memory_bytes() const override { return inner_->memory_bytes(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    Read read;
    const Fault* fault;
  };
  struct Held {
    Completion completion;
    Clock::time_point until;
  };

  std::unique_ptr<Reader> inner_;
  std::shared_ptr<FaultSchedule> schedule_;
  std::vector<Pending> pending_;  // by slot
  std::vector<Held> held_;
};

}  // namespace rowstream
