#include "loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "cpus.h"
#include "failure.h"
#include "fork.h"

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Gears. A device's store raises no interrupt: only looking sees it. Looking every 50 us costs a
// fifth to a third of a processor, every 5 ms less than a hundredth (2-core guest).
constexpr auto kExpectFor = 2ms;
constexpr auto kWarmFor = 100ms;
constexpr auto kWarmLook = 50us;
constexpr auto kWakeUp = 20us;  // what a sleep takes beyond its time
constexpr auto kIdleLook = 5ms;
constexpr auto kOpenLook = 1ms;
// A device does not wait for longer than this for a tick of the watchdog.
constexpr auto kMaxTick = 100ms;
constexpr int kRoomTries = 10;
constexpr auto kRoomWait = 2ms;
// processors left to the process, beside one for each rank, before a thread may spin
constexpr double kSpareCpus = 2;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

// What the two threads share with the loop's owner; lives as long as any of them.
struct Loop::State {
  State(Serve serve_, Options options_)
      : serve(std::move(serve_)),
        timeout(nanoseconds(options_.read_timeout_s)),
        cpus(std::move(options_.cpus)),
        spins(options_.spin == Spin::kAlways ||
              (options_.spin == Spin::kAuto && usable_cpus() >= options_.ranks + kSpareCpus)) {}

  void look_out();  // the thread that answers
  void watch();     // the watchdog

  bool refresh(std::vector<std::shared_ptr<Channel>>& mine, uint32_t& known);
  void answer(Channel& channel, uint64_t epoch);
  void fill(Channel& channel, uint64_t epoch);
  void stop_serving();
  void let_unheld_go();
  void rest();
  std::optional<std::chrono::nanoseconds> due_in(Clock::time_point now);
  void learn(Clock::time_point now);

  Serve serve;
  const std::chrono::nanoseconds timeout;
  const std::vector<int> cpus;
  const bool spins;
  const std::shared_ptr<Bell> bell = std::make_shared<Bell>();
  const std::shared_ptr<Record> record = std::make_shared<Record>();

  std::mutex mutex;
  std::vector<std::shared_ptr<Channel>> channels;
  std::condition_variable let_go;
  bool serving = true;  // the thread may still use `serve`
  std::atomic<bool> closing{false};

  // the answering thread's own
  std::vector<int64_t> ids;
  Clock::time_point last_ring;
  Clock::time_point last_kick;
  uint32_t kicks = 0;
  std::chrono::nanoseconds interval{0};  // from ring to ring, learned
};

// The channels as they are now; those that nobody holds are let go. False when there is nothing
// left to look at and never will be.
bool Loop::State::refresh(std::vector<std::shared_ptr<Channel>>& mine, uint32_t& known) {
  const uint32_t changes = bell->changes();
  if (changes == known) return true;
  known = changes;
  const std::lock_guard lock(mutex);
  let_unheld_go();
  mine = channels;
  return !(closing && mine.empty());
}

// Under the mutex.
void Loop::State::let_unheld_go() {
  std::erase_if(channels, [this](const auto& channel) {
    if (channel->held()) return false;
    record->faults += channel->words().faults.load(std::memory_order_acquire);
    return true;
  });
}

void Loop::State::look_out() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // the default of 50 us would double a look
  pthread_setname_np(pthread_self(), "rowstream-loop");
  run_on(cpus);
  std::vector<std::shared_ptr<Channel>> mine;
  uint32_t known = bell->changes() - 1;
  last_ring = last_kick = Clock::now() - 1h;
  while (refresh(mine, known)) {
    if (closing) stop_serving();
    const uint32_t before = bell->state();
    bool rang = false;
    for (const auto& channel : mine) {
      if (channel->gated() && !channel->is_open()) continue;
      const std::optional<uint64_t> epoch = channel->ring();
      if (!epoch) continue;
      rang = true;
      answer(*channel, *epoch);
    }
    if (rang) continue;
    if (closing) {
      bell->sleep(before, kOpenLook);
    } else {
      rest();
    }
  }
  stop_serving();
}

void Loop::State::stop_serving() {
  const std::lock_guard lock(mutex);
  if (!serving) return;
  serving = false;
  let_go.notify_all();
}

void Loop::State::answer(Channel& channel, uint64_t epoch) {
  const Clock::time_point began = Clock::now();
  learn(began);
  fill(channel, epoch);
  record->rings.fetch_add(1, std::memory_order_relaxed);
  const auto took = std::chrono::nanoseconds(Clock::now() - began).count();
  record->answer_ns.fetch_add(static_cast<uint64_t>(took), std::memory_order_relaxed);
}

void Loop::State::fill(Channel& channel, uint64_t epoch) {
  Status status = Status::kOk;
  try {
    if (closing) throw ClosedError("the store is closed");
    if (ids.size() < channel.max_rows()) ids.resize(channel.max_rows());
    const std::optional<size_t> rows = channel.read_mailbox(ids);
    if (!rows) throw std::out_of_range("the mailbox has more ids than there is room for");
    serve(std::span(ids).first(*rows), channel.staging(),
          [&] { return closing || channel.is_open() || channel.answered() != epoch - 1; });
  } catch (const Interrupted&) {
    status = Status::kTimeout;  // whoever gave up has answered already
  } catch (const ClosedError&) {
    status = Status::kClosed;
  } catch (const std::out_of_range&) {
    status = Status::kIds;
    record->remember(std::current_exception());
  } catch (...) {
    status = Status::kRead;
    record->remember(std::current_exception());
  }
  channel.answer(epoch, status);
}

void Loop::State::learn(Clock::time_point now) {
  const std::chrono::nanoseconds since = now - last_ring;
  last_ring = now;
  // a pause between two requests says nothing of the next step
  if (since < kWarmFor) interval = interval.count() == 0 ? since : (interval * 7 + since) / 8;
}

// How long until the next ring is due, by what the last ones have taught; none when nothing is
// expected any more.
std::optional<std::chrono::nanoseconds> Loop::State::due_in(Clock::time_point now) {
  if (const uint32_t have = bell->kicks(); have != kicks) {
    kicks = have;
    last_kick = now;
  }
  if (now - last_kick < kExpectFor && last_ring < last_kick) return 0ns;
  const std::chrono::nanoseconds since = now - last_ring;
  if (since >= kWarmFor || since >= interval + kExpectFor) return {};
  return std::max<std::chrono::nanoseconds>(interval * 4 / 5 - since, 0ns);
}

void Loop::State::rest() {
  const uint32_t before = bell->state();
  const Clock::time_point now = Clock::now();
  const auto due = due_in(now);
  // a sleep that would end after the ring is none
  if (due && spins && *due < kWarmLook + kWakeUp) {
    for (int i = 0; i < 32; ++i) relax();
    return;
  }
  const bool warm = due.has_value() || now - last_ring < kWarmFor;
  bell->sleep(before, warm ? std::chrono::nanoseconds(kWarmLook) : kIdleLook);
}

void Loop::State::watch() {
  pthread_setname_np(pthread_self(), "rowstream-watch");
  const auto tick = std::clamp<std::chrono::nanoseconds>(timeout / 16, 1ms, kMaxTick);
  for (;;) {
    std::this_thread::sleep_for(tick);
    // held for a moment only: a block that is given back can be taken again at once
    std::vector<std::shared_ptr<Channel>> mine;
    {
      const std::lock_guard lock(mutex);
      let_unheld_go();
      if (closing && channels.empty()) return;
      mine = channels;
    }
    const Clock::time_point now = Clock::now();
    for (const auto& channel : mine) {
      if (channel->gated() && !channel->is_open()) continue;
      const std::optional<uint64_t> epoch = channel->ring();
      if (!epoch) continue;
      if (channel->watched_epoch != *epoch) {
        channel->watched_epoch = *epoch;
        channel->watched_since = now;
      } else if (now - channel->watched_since >= timeout) {
        const double seconds = std::chrono::duration<double>(timeout).count();
        record->remember(std::make_exception_ptr(
            ReadFailure(ETIMEDOUT, "table", 0, 0, 0, no_answer_for(seconds))));
        channel->answer(*epoch, Status::kTimeout);
      }
    }
  }
}

Loop::Loop(Serve serve, Options options) : forks_(fork_generation()) {
  if (!(options.read_timeout_s > 0 && options.read_timeout_s <= 86'400)) {
    throw std::invalid_argument("read_timeout_s is " + std::to_string(options.read_timeout_s) +
                                ", needs to be in (0, 86400]");
  }
  state_ = std::make_shared<State>(std::move(serve), std::move(options));
  // a signal must reach a thread that the interpreter knows
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([state = state_] { state->look_out(); }).detach();
    std::thread([state = state_] { state->watch(); }).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    state_->closing = true;
    state_->bell->changed();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Loop::~Loop() { close(); }

std::shared_ptr<Channel> Loop::add(std::shared_ptr<Arena> arena, uint32_t max_rows,
                                   uint32_t row_bytes, bool gated) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  std::shared_ptr<Channel> channel;
  for (int tries = 0; channel == nullptr; ++tries) {
    try {
      channel = std::make_shared<Channel>(arena, max_rows, row_bytes, gated, state_->bell,
                                          state_->record);
    } catch (const Unavailable&) {
      // graphs may have gone just now: the threads let their channels go within milliseconds
      if (tries == kRoomTries) throw;
      state_->bell->changed();
      std::this_thread::sleep_for(kRoomWait);
    }
  }
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) throw ClosedError("table is closed");
    state_->channels.push_back(channel);
  }
  state_->bell->changed();
  return channel;
}

void Loop::kick() { state_->bell->kick(); }

bool Loop::spins() const { return state_->spins; }

size_t Loop::channels() const {
  const std::lock_guard lock(state_->mutex);
  return state_->channels.size();
}

uint64_t Loop::faults() const {
  const std::lock_guard lock(state_->mutex);
  uint64_t faults = state_->record->faults;
  for (const auto& channel : state_->channels) {
    faults += channel->words().faults.load(std::memory_order_acquire);
  }
  return faults;
}

Record& Loop::record() const { return *state_->record; }

bool Loop::close() {
  if (forks_ != fork_generation()) return false;
  std::unique_lock lock(state_->mutex);
  state_->closing = true;
  for (const auto& channel : state_->channels) channel->open(Status::kClosed);
  state_->bell->changed();
  return state_->let_go.wait_for(lock, state_->timeout + 1s, [this] { return !state_->serving; });
}

}  // namespace rowstream
