// A thread in the place of a device: it posts, waits, resets the flag and takes as the kernels of
// device/kernels.cu do, and ends the process where a step is neither right nor void.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "channel.h"

namespace doors {

using namespace rowstream;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr uint32_t kMaxRows = 24;
constexpr uint32_t kRowBytes = 48;
constexpr int64_t kTableRows = 1'000'000;
constexpr auto kStuckAfter = 60s;

inline std::atomic<const char*> mode{"start"};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "doors: %s: %s\n", mode.load(), what);
  std::_Exit(1);
}

inline void pause(Random& random, unsigned one_in, std::chrono::microseconds at_most) {
  if (random() % one_in == 0) {
    std::this_thread::sleep_for(at_most * static_cast<int>(random() % 100) / 100);
  }
}

// Word by word: a copy of known length is expanded where ThreadSanitizer does not see it.
inline void write_row(int64_t id, std::byte* row) {
  auto* const words = reinterpret_cast<uint64_t*>(row);
  for (size_t i = 0; i < kRowBytes / 8; ++i) {
    words[i] = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u + i;
  }
}

inline bool right(const std::vector<int64_t>& ids, const std::byte* rows) {
  alignas(uint64_t) std::array<std::byte, kRowBytes> want;
  for (size_t i = 0; i < ids.size(); ++i) {
    write_row(ids[i], want.data());
    if (std::memcmp(rows + i * kRowBytes, want.data(), kRowBytes) != 0) return false;
  }
  return true;
}

enum class Sync { kFlag, kSpin };

struct Counted {
  std::atomic<unsigned> right{0};
  std::atomic<unsigned> voids{0};
};

// A channel with the memory that the device has for it.
class Device {
 public:
  explicit Device(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~Device() { channel_->release(); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  Channel& channel() { return *channel_; }
  uint64_t epoch() const { return epoch_; }

  void step(Random& random, Sync sync, std::chrono::nanoseconds give_up, Counted& counted) {
    const std::vector<int64_t> ids = some_ids(random);
    post(ids, random, false);
    const bool passed = sync == Sync::kFlag ? wait() : spin(give_up);
    pause(random, 50, 200us);
    if (sync == Sync::kFlag) channel_->words().flag.store(0);
    finish(ids, passed, random, counted);
  }

  // The caller fills before it launches; one launch in ten does not come, one has other ids.
  void gated_step(Random& random, Counted& counted) {
    std::vector<int64_t> ids = some_ids(random);
    std::copy(ids.begin(), ids.end(), channel_->mailbox());
    for (size_t i = 0; i < ids.size(); ++i) {
      write_row(ids[i], channel_->staging() + i * kRowBytes);
    }
    channel_->fill(epoch_ + 1);
    if (random() % 10 == 0) return;
    const bool other = random() % 10 == 0;
    if (other) ids[random() % ids.size()] += 1;
    post(ids, random, true);
    if (finish(ids, true, random, counted) && other) fail("ids that differ were taken");
  }

  // when no stream uses it
  void reset() {
    busy_ = 0;
    channel_->reset(epoch_);
  }

 private:
  static std::vector<int64_t> some_ids(Random& random) {
    std::vector<int64_t> ids(1 + random() % kMaxRows);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % kTableRows);
    return ids;
  }

  void post(const std::vector<int64_t>& ids, Random& random, bool gated) {
    Words& words = channel_->words();
    const bool was = busy_.exchange(1) != 0;
    pause(random, 30, 100us);
    const uint64_t epoch = epoch_.fetch_add(1) + 1;
    if (was) {
      words.door.store(Words::kMisuse);
      return;
    }
    bool differs = false;
    for (size_t i = 0; i < ids.size(); ++i) {
      // the loop may read at any time once nobody waits for it
      std::atomic_ref<int64_t> slot(channel_->mailbox()[i]);
      if (gated) {
        differs |= slot.load(std::memory_order_relaxed) != ids[i];
      } else {
        slot.store(ids[i], std::memory_order_relaxed);
      }
    }
    mismatch_ = differs;
    words.rows.store(static_cast<uint32_t>(ids.size()), std::memory_order_relaxed);
    pause(random, 30, 100us);
    words.door.store(epoch);
    // a post that found the channel taken has bumped the epoch, and its MISUSE may be hidden now
    if (epoch_ != epoch) words.door.store(Words::kMisuse);
  }

  bool wait() {
    Words& words = channel_->words();
    const auto until = Clock::now() + kStuckAfter;
    for (unsigned look = 0; words.flag.load(std::memory_order_acquire) == 0; ++look) {
      if (look % 64 == 0 && Clock::now() > until) fail("a wait never ended");
      std::this_thread::yield();
    }
    return true;
  }

  bool spin(std::chrono::nanoseconds give_up) {
    const uint64_t epoch = epoch_;
    const auto until = Clock::now() + give_up;
    for (;;) {
      const uint64_t word = channel_->words().header.load(std::memory_order_acquire);
      if (word >> 8 == epoch || (word != 0 && word >> 8 == 0)) return true;
      if (Clock::now() > until) return false;
      std::this_thread::yield();
    }
  }

  // A take of several blocks has its verdict from a word that other streams write too, one of a
  // single block is its own judge.
  bool finish(const std::vector<int64_t>& ids, bool passed, Random& random, Counted& counted) {
    const bool alone = random() % 2 == 0;
    const uint64_t good = verdict(passed);
    pause(random, 50, 200us);
    if (!alone) good_ = good;
    return take(ids, alone ? good : good_.load(), counted);
  }

  // the epoch whose rows may be taken, or 0
  uint64_t verdict(bool passed) {
    const uint64_t epoch = epoch_;
    const uint64_t word = channel_->words().header.load(std::memory_order_acquire);
    const bool good = passed && word == Words::header_of(epoch, Status::kOk) && !mismatch_;
    return good ? epoch : 0;
  }

  bool take(const std::vector<int64_t>& ids, uint64_t good, Counted& counted) {
    const bool taken = good == epoch_;
    if (taken) {
      if (!right(ids, channel_->staging())) fail("wrong rows");
      ++counted.right;
    } else {
      ++counted.voids;
    }
    busy_ = 0;
    return taken;
  }

  const std::shared_ptr<Channel> channel_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<uint32_t> busy_{0};
  std::atomic<uint64_t> good_{0};
  std::atomic<bool> mismatch_{false};
};

}  // namespace doors
