// One lookup's way between a device and the host: words, mailbox and staging in a block of an
// arena, and what the host knows of them. Knows addresses and atomics, no device. A step whose rows
// did not come is *void*: its take sees a header that is not its own.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "arena.h"
#include "record.h"
#include "words.h"

namespace rowstream {

class Bell;

class Channel {
 public:
  static size_t bytes_for(uint32_t max_rows, uint32_t row_bytes);

  // Takes its block from the arena. Throws Unavailable when there is no room. `gated`: the host
  // fills it before each launch, and nobody rings.
  Channel(std::shared_ptr<Arena> arena, uint32_t max_rows, uint32_t row_bytes, bool gated,
          std::shared_ptr<Bell> bell, std::shared_ptr<Record> record);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Words& words() const { return *words_; }
  int64_t* mailbox() const { return mailbox_; }
  std::byte* staging() const { return staging_; }
  uint32_t max_rows() const { return max_rows_; }
  uint32_t row_bytes() const { return row_bytes_; }
  bool gated() const { return gated_; }
  bool is_open() const { return (answered_.load(std::memory_order_acquire) & kOpen) != 0; }
  // the last epoch that has an answer
  uint64_t answered() const { return answered_.load(std::memory_order_acquire) & ~kOpen; }

  // The epoch of a ring without an answer. What the protocol does not allow opens the channel.
  std::optional<uint64_t> ring();
  // How many rows of the ring just seen are looked for: without the padding at the end.
  size_t rows_wanted() const;
  // Copies the ids of the ring just seen to `into`, room for max_rows. Empty when the mailbox makes
  // no sense.
  std::optional<size_t> read_mailbox(std::span<int64_t> into) const;
  // Whether this was the first answer to that ring; only then it counts.
  bool answer(uint64_t epoch, Status status);
  // Of a gated channel: staging has the rows of the launch to come. It may have missed launches.
  void fill(uint64_t epoch);

  // Every wait passes and every step is void, until reset. Any thread, any time.
  void open(Status why);
  // Legal only when nothing of this channel is in flight on the device. `epoch`: the device's.
  void reset(uint64_t epoch);

  // Waits until the last ring has an answer; for a host function between post and take.
  void wait_for_answer();

  // Who may still use the block: graphs that were captured with it, and its owner.
  void hold() { holds_.fetch_add(1, std::memory_order_relaxed); }
  void release();
  int holds() const { return holds_.load(std::memory_order_acquire); }
  bool held() const { return holds() > 0; }

  // the last ring that the loop's other thread was given, and how many it has not filled yet
  uint64_t handed_epoch = 0;
  std::atomic<size_t> handed{0};

  // the watchdog's own
  uint64_t watched_epoch = 0;
  std::chrono::steady_clock::time_point watched_since;

 private:
  // under the mutex
  void publish(uint64_t header);

  static constexpr uint64_t kOpen = uint64_t{1} << 63;

  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<Bell> bell_;
  const std::shared_ptr<Record> record_;
  const uint32_t max_rows_;
  const uint32_t row_bytes_;
  const bool gated_;
  std::byte* block_ = nullptr;
  Words* words_ = nullptr;
  int64_t* mailbox_ = nullptr;
  std::byte* staging_ = nullptr;

  // What follows a change of answered_ is written before anything else can change it: a flag that
  // comes after a reset would be a stray one. Nobody sleeps or calls a driver under it.
  std::mutex mutex_;
  // Who moves it from e - 1 to e answers ring e; the others write nothing. The open bit makes all
  // of them lose.
  std::atomic<uint64_t> answered_{0};
  Status opened_for_ = Status::kOk;
  std::atomic<int> holds_{1};
};

}  // namespace rowstream
