// When a loop's thread looks at the doors. A device's store raises no interrupt: only looking sees
// it. Looking every 50 us costs a fifth to a third of a processor, every 5 ms less than a hundredth
// (2-core guest), so it looks without pause only when a ring is due. One thread's own.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "bell.h"

namespace rowstream {

class Gears {
 public:
  using Clock = std::chrono::steady_clock;

  // spins: whether a processor is to spare for looking without pause
  Gears(Bell& bell, bool spins);

  // A ring that is answered here: the next one is due as much later as this one came after the
  // last, the less sure the more these times differ.
  void rang();
  // a ring of many rows, which says nothing of that
  void rang_long() { warm_from_ = Clock::now(); }
  // until the next look
  void rest();

 private:
  std::optional<std::chrono::nanoseconds> due_in(Clock::time_point now);

  Bell& bell_;
  const bool spins_;
  Clock::time_point last_ring_;
  Clock::time_point warm_from_;
  Clock::time_point last_kick_;
  uint32_t kicks_ = 0;
  std::chrono::nanoseconds interval_{0};   // from ring to ring, learned
  std::chrono::nanoseconds deviation_{0};  // the mean one from that
};

}  // namespace rowstream
