// Rows of groups that were read before, in a fixed budget. S3-FIFO: a group enters a short queue
// and moves to the long one only if it is asked for again, so a prompt that passes through once
// does not push out what decoding uses. Sharded by key; any thread may call.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "group.h"

namespace rowstream {

class Cache final : public RowPool {
 public:
  // groups of `width` rows of `row_bytes`; nothing is allocated beyond `budget_bytes`, metadata
  // included. Throws std::invalid_argument where not one group fits.
  Cache(size_t budget_bytes, uint32_t width, uint32_t row_bytes);
  ~Cache() override;

  bool take(const GroupKey& key, std::byte* out) override;
  bool holds(const GroupKey& key) const;  // without counting it as a use
  // keeps a copy of the group's rows; a group that is there already stays as it is
  void put(const GroupKey& key, const std::byte* rows);

  size_t memory_bytes() const { return memory_bytes_; }
  size_t size() const;  // groups held
  uint64_t hits() const { return hits_.load(std::memory_order_relaxed); }
  uint64_t misses() const { return misses_.load(std::memory_order_relaxed); }

 private:
  class Shard;
  Shard& shard_of(uint64_t hash) { return *shards_[hash >> 32 & (shards_.size() - 1)]; }

  std::vector<std::unique_ptr<Shard>> shards_;  // a power of two
  size_t memory_bytes_ = 0;
  std::atomic<uint64_t> hits_{0};
  std::atomic<uint64_t> misses_{0};
};

}  // namespace rowstream
