#include "channel.h"

#include <algorithm>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "bell.h"
#include "failure.h"

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;

size_t aligned(size_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

size_t staging_at(uint32_t max_rows) {
  return aligned(sizeof(Words) + size_t{max_rows} * sizeof(int64_t));
}

}  // namespace

size_t Channel::bytes_for(uint32_t max_rows, uint32_t row_bytes) {
  return staging_at(max_rows) + aligned(size_t{max_rows} * row_bytes);
}

Channel::Channel(std::shared_ptr<Arena> arena, uint32_t max_rows, uint32_t row_bytes, bool gated,
                 std::shared_ptr<Bell> bell, std::shared_ptr<Record> record)
    : arena_(std::move(arena)),
      bell_(std::move(bell)),
      record_(std::move(record)),
      max_rows_(max_rows),
      row_bytes_(row_bytes),
      gated_(gated) {
  const size_t bytes = bytes_for(max_rows, row_bytes);
  block_ = arena_->take(bytes);
  if (block_ == nullptr) {
    throw Unavailable("channel for " + std::to_string(max_rows) + " rows needs " +
                      std::to_string(bytes) + " bytes, arena has " +
                      std::to_string(arena_->largest_free()) + " left; raise channel_bytes");
  }
  words_ = new (block_) Words{};
  mailbox_ = reinterpret_cast<int64_t*>(block_ + sizeof(Words));
  staging_ = block_ + staging_at(max_rows);
}

Channel::~Channel() { arena_->give_back(block_); }

std::optional<uint64_t> Channel::ring() {
  const uint64_t answered = answered_.load(std::memory_order_acquire);
  if ((answered & kOpen) != 0) {
    // again on every look: a wait of an earlier launch may have cleared the flag
    const std::lock_guard lock(mutex_);
    if (is_open()) publish(Words::header_of(0, opened_for_));
    return {};
  }
  const uint64_t door = words_->door.load(std::memory_order_acquire);
  if (door == answered) return {};
  if (door == answered + 1) {
    order_loads_from_device();
    return door;
  }
  // another thread may have answered, and the device rung again, between our two looks
  if (answered_.load(std::memory_order_acquire) == answered) open(Status::kMisuse);
  return {};
}

std::optional<size_t> Channel::read_mailbox(std::span<int64_t> into) const {
  const uint32_t rows = words_->rows.load(std::memory_order_relaxed);
  if (rows > max_rows_ || rows > into.size()) return {};
  // one by one, as atomics: once the watchdog has answered, the next post may write meanwhile
  for (uint32_t i = 0; i < rows; ++i) {
    into[i] = std::atomic_ref(mailbox_[i]).load(std::memory_order_relaxed);
  }
  return rows;
}

size_t Channel::rows_wanted() const {
  size_t rows = std::min(words_->rows.load(std::memory_order_relaxed), max_rows_);
  while (rows > 0 && std::atomic_ref(mailbox_[rows - 1]).load(std::memory_order_relaxed) == -1) {
    --rows;
  }
  return rows;
}

bool Channel::answer(uint64_t epoch, Status status) {
  const std::lock_guard lock(mutex_);
  if (answered_.load(std::memory_order_relaxed) != epoch - 1) {
    record_->late.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  answered_.store(epoch, std::memory_order_release);
  if (status != Status::kOk) record_->voids.fetch_add(1, std::memory_order_relaxed);
  publish(Words::header_of(epoch, status));
  return true;
}

void Channel::fill(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  if (is_open()) return;
  answered_.store(epoch, std::memory_order_release);
  publish(Words::header_of(epoch, Status::kOk));
}

void Channel::open(Status why) {
  const std::lock_guard lock(mutex_);
  if (!is_open()) opened_for_ = why;
  answered_.fetch_or(kOpen, std::memory_order_acq_rel);
  publish(Words::header_of(0, opened_for_));
}

void Channel::reset(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  words_->flag.store(0, std::memory_order_relaxed);
  words_->header.store(0, std::memory_order_relaxed);  // of a channel never answered
  words_->door.store(epoch, std::memory_order_relaxed);
  answered_.store(epoch, std::memory_order_release);
}

void Channel::publish(uint64_t header) {
  order_stores_for_device();
  words_->header.store(header, std::memory_order_release);
  order_stores_for_device();
  words_->flag.store(1, std::memory_order_release);
}

// On a thread of the driver's. Bounded by the watchdog, which answers what nobody else does.
void Channel::wait_for_answer() {
  bell_->kick();
  const auto patient_from = Clock::now() + std::chrono::milliseconds(1);
  const uint64_t door = words_->door.load(std::memory_order_acquire);
  for (;;) {
    const uint64_t answered = answered_.load(std::memory_order_acquire);
    if ((answered & kOpen) != 0 || answered >= door) return;
    if (Clock::now() > patient_from) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void Channel::release() {
  const std::shared_ptr<Bell> bell = bell_;  // the last hold gone, so may this be
  if (holds_.fetch_sub(1, std::memory_order_acq_rel) == 1) bell->changed();
}

}  // namespace rowstream
