// What is kept by n-gram: the key of a group and a fixed amount of memory for such groups. The
// key is all row ids of the group, since two n-grams may share the row of one head by chance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "memory.h"

namespace rowstream {

inline uint64_t hash_ids(std::span<const int64_t> ids) {
  uint64_t hash = ids.size();
  for (const int64_t id : ids) {
    hash = (hash ^ static_cast<uint64_t>(id)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

struct GroupKey {
  GroupKey() = default;
  explicit GroupKey(std::span<const int64_t> row_ids) : ids(row_ids), hash(hash_ids(row_ids)) {}

  std::span<const int64_t> ids;
  uint64_t hash = 0;
};

// Where the rows of a group may already be in memory. Any thread may call.
class RowPool {
 public:
  virtual ~RowPool() = default;
  // copies the group's rows to out, one after the other; false where it has them not
  virtual bool take(const GroupKey& key, std::byte* out) = 0;
};

// Groups of `width` rows found by key, in memory that is allocated once. Which entry is given up
// for another is the owner's business, and so is the lock.
class GroupStore {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  GroupStore(size_t groups, uint32_t width, uint32_t row_bytes, const char* name);

  // what so many groups take in memory
  static size_t bytes_for(size_t groups, uint32_t width, uint32_t row_bytes);
  // the most groups that fit, 0 where not one does
  static size_t groups_in(size_t budget_bytes, uint32_t width, uint32_t row_bytes);

  size_t capacity() const { return links_.size(); }
  size_t memory_bytes() const { return memory_.size(); }

  uint32_t find(const GroupKey& key) const;  // kNone where it is not
  void fill(uint32_t entry, const GroupKey& key, const std::byte* rows);
  void remove(uint32_t entry);

  const std::byte* rows(uint32_t entry) const { return rows_ + entry * rows_bytes_; }
  size_t rows_bytes() const { return rows_bytes_; }
  uint64_t hash(uint32_t entry) const { return links_[entry].hash; }
  size_t buckets() const { return buckets_.size(); }
  size_t bucket(uint64_t hash) const { return hash & (buckets_.size() - 1); }

 private:
  struct Link {
    uint64_t hash;
    uint32_t next;  // in its bucket
  };

  size_t ids_bytes_;
  size_t rows_bytes_;
  Pages memory_;
  std::span<Link> links_;
  std::span<uint32_t> buckets_;  // a power of two, at least one for each group
  std::byte* ids_;
  std::byte* rows_;
};

}  // namespace rowstream
