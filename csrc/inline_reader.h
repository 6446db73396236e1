// Reads that the calling thread does itself, in wait(): for files that are in
// memory already, where a ring or a thread only adds a hand-over. A read that
// blocks cannot be given up, so it is never chosen for a device.
#pragma once

#include <vector>

#include "reader.h"

namespace rowstream {

class InlineReader final : public Reader {
 public:
  const char* name() const override { return "inline"; }
  void push(const Read& read) override { pushed_.push_back(read); }
  // does all that was pushed, whatever at_least is: nobody else would
  size_t wait(unsigned at_least, std::span<Completion> done) override;
  size_t memory_bytes() const override { return pushed_.capacity() * sizeof(Read); }

 private:
  std::vector<Read> pushed_;
  size_t next_ = 0;  // of pushed_; those before it are done
};

}  // namespace rowstream
