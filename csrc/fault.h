// A reader that fails on purpose: it stands before another one and changes the results that
// tests name. Always compiled, so that what is tested is what ships.
#pragma once

#include "reader.h"

namespace rowstream {

// reads number `first` .. `first + count - 1` (from 0, in the order pushed) end with `result`:
// negative: -errno; else at most so many bytes, and the rest of the slot is poisoned
struct Fault {
  uint64_t first;
  uint64_t count;
  int32_t result;
};

class FaultReader final : public Reader {
 public:
  FaultReader(std::unique_ptr<Reader> inner, std::vector<Fault> faults, unsigned depth);

  const char* name() const override { return inner_->name(); }
  void push(const Read& read) override;
  size_t wait(unsigned at_least, std::span<Completion> done) override;
  size_t memory_bytes() const override { return inner_->memory_bytes(); }

 private:
  std::unique_ptr<Reader> inner_;
  std::vector<Fault> faults_;
  struct Pending {
    Read read;
    const Fault* fault;
  };
  std::vector<Pending> pending_;  // by slot
  uint64_t pushed_ = 0;
};

}  // namespace rowstream
