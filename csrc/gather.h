// One piece of a gather in flight: keeps every slot of a lane busy, copies each
// row to its place, and decides what a short read, an error or silence means.
// Lives for one piece.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <vector>

#include "counters.h"
#include "lane.h"
#include "plan.h"
#include "source.h"

namespace rowstream {

// asked every now and then; true ends the gather with Interrupted
using Poll = std::function<bool()>;
// how many reads may be in flight just now, at least one
using Limit = std::function<unsigned()>;

// what a gather gives for rows that cannot be read
enum class OnReadError { kRaise, kZeroRows };

struct ReadPolicy {
  std::chrono::nanoseconds timeout;  // without any completion, while reads are in flight
  OnReadError on_error;
};

class Gather {
 public:
  // alignments: the block of each file's reads, as the plan has them
  Gather(Source& source, Plan& plan, std::span<const uint32_t> alignments, ReadPolicy policy,
         Counters& counters, std::byte* out);

  // Reads what the plan wants and fills out. `replace` parks a lane whose reads
  // do not end and gives another one. Returns or throws with nothing in flight
  // in the lane that is left.
  void run(Lane& lane, const std::function<Lane&()>& replace, const Poll& poll,
           const Limit& limit = {});

  // whether rows were given up and zeroed
  bool lost_rows() const { return lost_rows_; }

 private:
  using Clock = std::chrono::steady_clock;

  void feed(Lane& lane, unsigned limit);
  bool reap(Lane& lane, unsigned limit);
  void abandon(Lane& lane);
  void stop(std::exception_ptr why);

  void push(Lane& lane, uint32_t slot);
  enum class Outcome { kArrived, kPushedAgain, kTakenApart };
  Outcome judge(Lane& lane, const Completion& completion);
  Outcome take_apart(const Slot& slot);
  bool try_another_copy(Lane& lane, uint32_t slot);
  [[noreturn]] void fail(const Slot& slot, int code, std::string reason = {}) const;
  // the rows of a span that cannot be read
  void lose(const Slot& slot, std::exception_ptr why);
  void copy_rows(const Slot& slot, const std::byte* from);
  void expect(const Span& span) const;
  void count();

  Source& source_;
  Plan& plan_;
  std::span<const uint32_t> alignments_;
  const ReadPolicy policy_;
  Counters& counters_;
  std::byte* const out_;

  bool more_ = true;                          // the plan has spans left
  std::vector<std::span<const Item>> apart_;  // of joined spans that failed: to be read alone
  // what was read since it was last counted: an atomic counter costs a read more than its plan does
  struct {
    uint64_t reads = 0;
    uint64_t bytes = 0;
    uint64_t retries = 0;
  } read_;
  bool lost_rows_ = false;
  std::exception_ptr failure_;
  Clock::time_point give_up_at_;
};

}  // namespace rowstream
