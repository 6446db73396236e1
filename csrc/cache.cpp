#include "cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace rowstream {
namespace {

// one lock per shard; with fewer groups than this in each, one shard is enough
constexpr size_t kShards = 16;
constexpr size_t kGroupsPerShard = 256;
// a tenth of the groups for newcomers (S3-FIFO, Yang et al., SOSP 2023)
constexpr size_t kSmallShare = 10;
constexpr uint8_t kMaxUses = 3;

// first in, first out
class Queue {
 public:
  explicit Queue(size_t capacity) : ring_(capacity) {}
  size_t size() const { return size_; }
  size_t memory_bytes() const { return ring_.size() * sizeof(uint32_t); }
  void push(uint32_t entry) { ring_[(head_ + size_++) % ring_.size()] = entry; }
  uint32_t pop() {
    const uint32_t entry = ring_[head_];
    head_ = (head_ + 1) % ring_.size();
    --size_;
    return entry;
  }

 private:
  std::vector<uint32_t> ring_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace

class Cache::Shard {
 public:
  // beside the groups themselves: both queues, the uses, and a ghost for each bucket
  static constexpr size_t kGroupBytes = 2 * sizeof(uint32_t) + sizeof(uint8_t);
  static constexpr size_t kGhostBytes = 2 * sizeof(uint32_t);  // buckets: up to twice the groups

  Shard(size_t groups, uint32_t width, uint32_t row_bytes)
      : store_(groups, width, row_bytes, "rowstream cache"),
        uses_(groups),
        ghosts_(store_.buckets()),
        small_(groups),
        main_(groups),
        small_share_(std::max<size_t>(1, groups / kSmallShare)) {}

  size_t memory_bytes() const {
    return store_.memory_bytes() + uses_.size() + ghosts_.size() * sizeof(uint32_t) +
           small_.memory_bytes() + main_.memory_bytes();
  }

  size_t size() const {
    const std::lock_guard lock(mutex_);
    return small_.size() + main_.size();
  }

  bool holds(const GroupKey& key) const {
    const std::lock_guard lock(mutex_);
    return store_.find(key) != GroupStore::kNone;
  }

  bool take(const GroupKey& key, std::byte* out) {
    const std::lock_guard lock(mutex_);
    const uint32_t entry = store_.find(key);
    if (entry == GroupStore::kNone) return false;
    std::memcpy(out, store_.rows(entry), store_.rows_bytes());
    if (uses_[entry] < kMaxUses) ++uses_[entry];
    return true;
  }

  void put(const GroupKey& key, const std::byte* rows) {
    const std::lock_guard lock(mutex_);
    if (store_.find(key) != GroupStore::kNone) return;
    const uint32_t entry = filled_ < store_.capacity() ? filled_++ : evict();
    store_.fill(entry, key, rows);
    uses_[entry] = 0;
    // known from before: it was thrown out of the short queue too early
    uint32_t& ghost = ghosts_[store_.bucket(key.hash)];
    if (ghost == fingerprint(key.hash)) {
      ghost = 0;
      main_.push(entry);
    } else {
      small_.push(entry);
    }
  }

 private:
  // never 0, which marks a place without a ghost
  static uint32_t fingerprint(uint64_t hash) { return static_cast<uint32_t>(hash >> 36) | 1; }

  uint32_t evict() {
    for (;;) {
      const bool from_small = small_.size() >= small_share_;
      const uint32_t entry = from_small ? small_.pop() : main_.pop();
      if (uses_[entry] == 0) {
        const uint64_t hash = store_.hash(entry);
        if (from_small) ghosts_[store_.bucket(hash)] = fingerprint(hash);
        store_.remove(entry);
        return entry;
      }
      uses_[entry] = from_small ? 0 : static_cast<uint8_t>(uses_[entry] - 1);
      main_.push(entry);
    }
  }

  GroupStore store_;
  std::vector<uint8_t> uses_;     // since the entry came to its queue, at most kMaxUses
  std::vector<uint32_t> ghosts_;  // direct-mapped: a later one takes an earlier one's place
  Queue small_;
  Queue main_;
  const size_t small_share_;
  uint32_t filled_ = 0;  // entries that were ever used
  mutable std::mutex mutex_;
};

Cache::Cache(size_t budget_bytes, uint32_t width, uint32_t row_bytes) {
  constexpr size_t kBeside = Shard::kGroupBytes + Shard::kGhostBytes;
  // metadata beside the groups is taken off first; rows of the store are rounded to pages
  const size_t group = GroupStore::bytes_for(1, width, row_bytes);
  const size_t for_groups = budget_bytes / (group + kBeside) * group;
  const size_t most = GroupStore::groups_in(for_groups, width, row_bytes);
  const size_t shards = most >= kShards * kGroupsPerShard ? kShards : 1;
  constexpr size_t kPage = 4096;
  const size_t share = for_groups / shards;
  const size_t groups = GroupStore::groups_in(share > kPage ? share - kPage : 0, width, row_bytes);
  if (groups == 0 || groups >= GroupStore::kNone) {
    throw std::invalid_argument("a cache of " + std::to_string(budget_bytes) +
                                " bytes cannot hold groups of " +
                                std::to_string(size_t{width} * row_bytes) + " bytes");
  }
  for (size_t i = 0; i < shards; ++i) {
    shards_.push_back(std::make_unique<Shard>(groups, width, row_bytes));
    memory_bytes_ += shards_.back()->memory_bytes();
  }
}

Cache::~Cache() = default;

bool Cache::take(const GroupKey& key, std::byte* out) {
  const bool hit = shard_of(key.hash).take(key, out);
  (hit ? hits_ : misses_).fetch_add(1, std::memory_order_relaxed);
  return hit;
}

bool Cache::holds(const GroupKey& key) const {
  return shards_[key.hash >> 32 & (shards_.size() - 1)]->holds(key);
}

void Cache::put(const GroupKey& key, const std::byte* rows) { shard_of(key.hash).put(key, rows); }

size_t Cache::size() const {
  size_t groups = 0;
  for (const auto& shard : shards_) groups += shard->size();
  return groups;
}

}  // namespace rowstream
