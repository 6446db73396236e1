// Channels and their loop for ThreadSanitizer, with threads in the place of a device: they post,
// wait, reset the flag and take as its kernels do, while serves are late, fail or never end, two
// streams use one channel, and channels are closed and started again. Every step is right or void.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "device.h"
#include "failure.h"
#include "loop.h"

namespace {

using namespace doors;

// What serving may do beside giving the rows; one in so many, 0 for never.
struct Faults {
  unsigned slow = 0;
  unsigned failed = 0;
  unsigned late = 0;     // longer than the time-out, but ends when told
  unsigned deaf = 0;     // the same, and does not listen
  unsigned forever = 0;  // until the test lets it go
};

// Answers rings as the faults say.
class Server {
 public:
  explicit Server(Faults faults, std::chrono::nanoseconds timeout)
      : faults_(faults), timeout_(timeout) {}

  void serve(std::span<const int64_t> ids, std::byte* out, const Poll& late) {
    const bool calm = calm_;
    if (!calm && one_in(faults_.failed)) {
      if (drawn() % 2 == 0) throw std::out_of_range("an id");
      throw ReadFailure(5, "file", 0, 0, 0, "broken");
    }
    if (!calm && one_in(faults_.late)) {
      sleep_until([&] { return late(); }, 20 * timeout_);
      if (late()) throw Interrupted();
    }
    if (!calm && one_in(faults_.deaf)) std::this_thread::sleep_for(3 * timeout_);
    // not at once: some steps have to be right before
    if (!calm && ++served_ > 20 && one_in(faults_.forever)) {
      sleep_until([&] { return let_go_.load(); }, 1h);
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!calm && one_in(faults_.slow)) std::this_thread::sleep_for(50us);
      write_row(ids[i], out + i * kRowBytes);
    }
  }

  void calm() { calm_ = true; }
  void let_go() { let_go_ = true; }

 private:
  bool one_in(unsigned count) { return count > 0 && drawn() % count == 0; }

  uint64_t drawn() {
    const std::lock_guard lock(mutex_);
    return random_();
  }

  static void sleep_until(const std::function<bool()>& over, std::chrono::nanoseconds at_most) {
    const auto until = Clock::now() + at_most;
    while (!over() && Clock::now() < until) std::this_thread::sleep_for(500us);
  }

  const Faults faults_;
  const std::chrono::nanoseconds timeout_;
  std::mutex mutex_;  // two threads serve
  Random random_{std::random_device{}()};
  std::atomic<unsigned> served_{0};
  std::atomic<bool> calm_{false};
  std::atomic<bool> let_go_{false};
};

struct Case {
  const char* name;
  Faults faults = {};
  Sync sync = Sync::kFlag;
  unsigned streams = 1;  // of each channel: two is misuse
  bool gated = false;
  bool close = false;  // at some moment
  double read_timeout_s = 0.03;
  unsigned steps = 400;
  unsigned rounds = 1;  // nothing is in flight between them
};

void run(const Case& test) {
  mode = test.name;
  const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(test.read_timeout_s));
  // outlives the loop, whose threads are never joined
  auto server = std::make_shared<Server>(test.faults, timeout);
  Loop::Options options;
  options.read_timeout_s = test.read_timeout_s;
  options.spin = Loop::Spin::kNever;
  options.long_rows = kMaxRows / 2;  // either thread answers half of the rings
  Loop loop([server](std::span<const int64_t> ids, std::byte* out,
                     const Poll& late) { server->serve(ids, out, late); },
            options);
  auto arena = std::make_shared<Arena>(size_t{1} << 20, std::vector<int>{});
  std::vector<std::unique_ptr<Device>> devices;
  for (int i = 0; i < 3; ++i) {
    devices.push_back(std::make_unique<Device>(loop.add(arena, kMaxRows, kRowBytes, test.gated)));
  }
  Counted counted;
  std::atomic<bool> over{false};
  unsigned failures = 0;
  std::thread watcher([&] {
    while (!over) {
      try {
        const std::exception_ptr why = loop.record().take_failure();
        if (why) std::rethrow_exception(why);
      } catch (const std::exception&) {
        ++failures;
      }
      std::this_thread::sleep_for(1ms);
    }
  });
  const auto stream = [&](Device& device) {
    Random random(std::random_device{}());
    for (unsigned step = 0; step < test.steps; ++step) {
      if (random() % 8 == 0) loop.kick();
      if (test.gated) {
        device.gated_step(random, counted);
      } else {
        device.step(random, test.sync, 4 * timeout, counted);
      }
    }
  };
  // two streams are rarely right, on a busy machine not in every so many rounds
  const auto none_was_right = [&] { return !test.close && counted.right == 0; };
  for (unsigned round = 0; round < test.rounds || (none_was_right() && round < 20 * test.rounds);
       ++round) {
    // a serve of the round before may still be under way
    for (const auto& device : devices) {
      if (device->channel().is_open()) device->reset();
    }
    std::vector<std::thread> streams;
    for (const auto& device : devices) {
      for (unsigned i = 0; i < test.streams; ++i) streams.emplace_back(stream, std::ref(*device));
    }
    if (test.close) {
      Random random(std::random_device{}());
      pause(random, 1, 30'000us);
      if (!loop.close()) fail("the thread did not let go");
    }
    for (std::thread& running : streams) running.join();
  }
  over = true;
  watcher.join();
  const unsigned taken = counted.right, voids = counted.voids;

  // nothing is in flight: from here on all is well again
  unsigned after = 0;
  if (!test.close && !test.gated && test.faults.forever == 0) {
    server->calm();
    std::this_thread::sleep_for(200ms);  // what is late ends
    for (const auto& device : devices) {
      Counted again;
      Random random(std::random_device{}());
      if (!device->channel().is_open()) device->channel().open(Status::kClosed);
      device->step(random, test.sync, kStuckAfter, again);
      if (again.right > 0) fail("rows from an open channel");
      device->reset();
      unsigned right = 0;
      // a busy machine may let time-outs pass; after a reset that does not help all are void
      for (int tries = 0; tries < 20 && right < 45; ++tries) {
        Counted steps;
        for (int step = 0; step < 50; ++step) device->step(random, test.sync, kStuckAfter, steps);
        right = steps.right;
      }
      after += right;
      if (right < 45) fail("steps are void after a reset");
    }
  }
  if (!test.close && taken == 0) fail("no step was right");
  if (test.faults.failed > 0 && !test.close && failures == 0) fail("no failure was noted");
  if (test.read_timeout_s > 1 && test.faults.failed == 0 && test.streams == 1 && !test.close &&
      !test.gated && voids > 0) {
    fail("a step was void without a fault");
  }
  const bool let_go = loop.close();
  if (test.faults.forever == 0 && !let_go) fail("the thread did not let go");
  server->let_go();
  std::printf("%s: ok, %u right, %u void, %u after a reset\n", test.name, taken, voids, after);
}

}  // namespace

int main() {
  alarm(900);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (const Sync sync : {Sync::kFlag, Sync::kSpin}) {
    const auto test = [sync](Case made) {
      made.sync = sync;
      run(made);
    };
    std::printf("%s\n", sync == Sync::kFlag ? "flag" : "spinning");
    test({.name = "sound", .read_timeout_s = 30, .steps = 1000});
    test({.name = "slow", .faults = {.slow = 20}, .read_timeout_s = 30});
    test({.name = "failing", .faults = {.failed = 5}, .read_timeout_s = 30});
    test({.name = "late", .faults = {.slow = 50, .late = 40}});
    test({.name = "deaf", .faults = {.deaf = 40}, .steps = 200});
    test({.name = "stuck for ever", .faults = {.forever = 40}, .steps = 100});
    test({.name = "two streams", .streams = 2, .steps = 6, .rounds = 200});
    test({.name = "two streams, late",
          .faults = {.slow = 9, .late = 20},
          .streams = 2,
          .steps = 6,
          .rounds = 30});
    for (int turn = 0; turn < 5; ++turn) {
      test({.name = "closed", .faults = {.slow = 50, .failed = 9}, .close = true});
    }
  }
  run({.name = "gated", .gated = true, .steps = 2000});
  run({.name = "gated, closed", .gated = true, .close = true, .steps = 2000});
  return 0;
}
