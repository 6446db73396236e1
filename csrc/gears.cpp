#include "gears.h"

#include <algorithm>

namespace rowstream {
namespace {

using namespace std::chrono_literals;

constexpr auto kExpectFor = 2ms;
constexpr auto kWarmFor = 100ms;
constexpr auto kWarmLook = 50us;
constexpr auto kWakeUp = 20us;  // what a sleep takes beyond its time
constexpr auto kIdleLook = 5ms;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Gears::Gears(Bell& bell, bool spins)
    : bell_(bell),
      spins_(spins),
      last_ring_(Clock::now() - 1h),
      warm_from_(last_ring_),
      last_kick_(last_ring_) {}

void Gears::rang() {
  const Clock::time_point now = Clock::now();
  const std::chrono::nanoseconds since = now - last_ring_;
  last_ring_ = warm_from_ = now;
  if (since >= kWarmFor) return;  // a pause between two requests says nothing of the next step
  if (interval_.count() == 0) {
    interval_ = since;
    deviation_ = since / 2;
    return;
  }
  // weights and factor of RFC 6298, which foretells round trips so
  deviation_ = (deviation_ * 3 + std::chrono::abs(since - interval_)) / 4;
  interval_ = (interval_ * 7 + since) / 8;
}

// How long until the next ring is due, by what the last ones have taught; none when nothing is
// expected any more.
std::optional<std::chrono::nanoseconds> Gears::due_in(Clock::time_point now) {
  if (const uint32_t have = bell_.kicks(); have != kicks_) {
    kicks_ = have;
    last_kick_ = now;
  }
  if (now - last_kick_ < kExpectFor && last_ring_ < last_kick_) return 0ns;
  const std::chrono::nanoseconds since = now - last_ring_;
  const std::chrono::nanoseconds spread = 4 * deviation_;
  if (since >= kWarmFor || since >= interval_ + spread + kExpectFor) return {};
  const std::chrono::nanoseconds from = std::min(interval_ * 4 / 5, interval_ - spread);
  return std::max<std::chrono::nanoseconds>(from - since, 0ns);
}

void Gears::rest() {
  const uint32_t before = bell_.state();
  const Clock::time_point now = Clock::now();
  const auto due = due_in(now);
  // a sleep that would end after the ring is none
  if (due && spins_ && *due < kWarmLook + kWakeUp) {
    for (int i = 0; i < 32; ++i) relax();
    return;
  }
  const bool warm = due.has_value() || now - warm_from_ < kWarmFor;
  bell_.sleep(before, warm ? std::chrono::nanoseconds(kWarmLook) : kIdleLook);
}

}  // namespace rowstream
