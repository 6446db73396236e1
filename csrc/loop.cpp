#include "loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "cpus.h"
#include "failure.h"
#include "fork.h"
#include "gears.h"

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kOpenLook = 1ms;
// A device does not wait for longer than this for a tick of the watchdog.
constexpr auto kMaxTick = 100ms;
constexpr int kRoomTries = 10;
constexpr auto kRoomWait = 2ms;
// processors left to the process, beside one for each rank, before a thread may spin
constexpr double kSpareCpus = 2;

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

// What the threads share with the loop's owner; lives as long as any of them.
struct Loop::State {
  State(Serve serve_, Options options_)
      : serve(std::move(serve_)),
        timeout(nanoseconds(options_.read_timeout_s)),
        cpus(std::move(options_.cpus)),
        long_rows(options_.long_rows),
        spins(options_.spin == Spin::kAlways ||
              (options_.spin == Spin::kAuto && usable_cpus() >= options_.ranks + kSpareCpus)) {}

  void look_out();     // the thread that answers
  void answer_long();  // the one for rings of many rows
  void watch();        // the watchdog

  bool refresh(std::vector<std::shared_ptr<Channel>>& mine, uint32_t& known);
  bool handed_over(const std::shared_ptr<Channel>& channel, uint64_t epoch);
  Status serve_ring(Channel& channel, uint64_t epoch, std::vector<int64_t>& ids);
  void answer(Channel& channel, uint64_t epoch, Status status, Clock::time_point began);
  void stop_serving();
  void let_unheld_go();

  Serve serve;
  const std::chrono::nanoseconds timeout;
  const std::vector<int> cpus;
  const uint32_t long_rows;
  const bool spins;
  const std::shared_ptr<Bell> bell = std::make_shared<Bell>();
  const std::shared_ptr<Record> record = std::make_shared<Record>();

  std::mutex mutex;
  std::vector<std::shared_ptr<Channel>> channels;
  std::condition_variable let_go;
  unsigned serving = 2;  // threads that may still use `serve`
  std::atomic<bool> closing{false};

  // rings of many rows, for a thread that others do not wait for; under the mutex
  struct Ring {
    std::shared_ptr<Channel> channel;
    uint64_t epoch;
  };
  std::deque<Ring> long_rings;
  std::condition_variable long_ring;
  Gears gears{*bell, spins};  // the answering thread's own
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
  std::vector<int64_t> ids;
  bool serves = true;
  uint32_t known = bell->changes() - 1;
  while (refresh(mine, known)) {
    if (closing && std::exchange(serves, false)) stop_serving();
    const uint32_t before = bell->state();
    bool rang = false;
    for (const auto& channel : mine) {
      if (channel->gated() && !channel->is_open()) continue;
      const std::optional<uint64_t> epoch = channel->ring();
      if (!epoch || handed_over(channel, *epoch)) continue;
      rang = true;
      gears.rang();
      const Clock::time_point began = Clock::now();
      answer(*channel, *epoch, serve_ring(*channel, *epoch, ids), began);
    }
    if (rang) continue;
    if (closing) {
      bell->sleep(before, kOpenLook);
    } else {
      gears.rest();
    }
  }
  if (serves) stop_serving();
}

void Loop::State::stop_serving() {
  const std::lock_guard lock(mutex);
  serving -= 1;
  let_go.notify_all();
}

// A prompt's rows take a hundred times as long as a step's, which would wait for them here.
bool Loop::State::handed_over(const std::shared_ptr<Channel>& channel, uint64_t epoch) {
  if (channel->handed_epoch == epoch) return true;
  const bool is_short = channel->rows_wanted() <= long_rows;
  // two threads must not fill one staging: as long as the other one is busy with a ring of this
  // channel, which may have been voided meanwhile, it gets the next one as well
  if (is_short && channel->handed == 0) return false;
  const std::lock_guard lock(mutex);
  // one that was voided while it lay here is nobody's any more
  channel->handed -= std::erase_if(
      long_rings, [&](const Ring& ring) { return ring.channel == channel && ring.epoch < epoch; });
  if (is_short && channel->handed == 0) return false;
  if (closing) return false;  // nobody looks there any more
  gears.rang_long();
  channel->handed_epoch = epoch;
  channel->handed += 1;
  long_rings.push_back({channel, epoch});
  long_ring.notify_one();
  return true;
}

void Loop::State::answer_long() {
  pthread_setname_np(pthread_self(), "rowstream-long");
  if (cpus.size() > 1) run_on(cpus);  // a single one is the other thread's
  std::vector<int64_t> ids;
  std::unique_lock lock(mutex);
  for (;;) {
    long_ring.wait(lock, [this] { return closing || !long_rings.empty(); });
    if (closing) break;  // every channel is open: no answer would count
    const Ring ring = std::move(long_rings.front());
    long_rings.pop_front();
    lock.unlock();
    order_loads_from_device();  // it was another thread that saw the door
    const Clock::time_point began = Clock::now();
    const Status status = serve_ring(*ring.channel, ring.epoch, ids);
    ring.channel->handed -= 1;  // staging is filled
    answer(*ring.channel, ring.epoch, status, began);
    lock.lock();
  }
  long_rings.clear();
  lock.unlock();
  stop_serving();
}

void Loop::State::answer(Channel& channel, uint64_t epoch, Status status, Clock::time_point began) {
  channel.answer(epoch, status);
  record->rings.fetch_add(1, std::memory_order_relaxed);
  const auto took = std::chrono::nanoseconds(Clock::now() - began).count();
  record->answer_ns.fetch_add(static_cast<uint64_t>(took), std::memory_order_relaxed);
}

// Fills staging with the rows of a ring; what becomes of it.
Status Loop::State::serve_ring(Channel& channel, uint64_t epoch, std::vector<int64_t>& ids) {
  try {
    if (closing) throw ClosedError("the store is closed");
    if (ids.size() < channel.max_rows()) ids.resize(channel.max_rows());
    const std::optional<size_t> rows = channel.read_mailbox(ids);
    if (!rows) throw std::out_of_range("the mailbox has more ids than there is room for");
    const auto late = [&] {
      return closing || channel.is_open() || channel.answered() != epoch - 1;
    };
    if (late()) throw Interrupted();
    serve(std::span(ids).first(*rows), channel.staging(), late);
    return Status::kOk;
  } catch (const Interrupted&) {
    return Status::kTimeout;  // whoever gave up has answered already
  } catch (const ClosedError&) {
    return Status::kClosed;
  } catch (const std::out_of_range&) {
    record->remember(std::current_exception());
    return Status::kIds;
  } catch (...) {
    record->remember(std::current_exception());
    return Status::kRead;
  }
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
    std::thread([state = state_] { state->answer_long(); }).detach();
    std::thread([state = state_] { state->watch(); }).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->long_ring.notify_all();
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
  state_->long_ring.notify_all();
  state_->bell->changed();
  return state_->let_go.wait_for(lock, state_->timeout + 1s,
                                 [this] { return state_->serving == 0; });
}

}  // namespace rowstream
