#include "group.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace rowstream {

size_t GroupStore::bytes_for(size_t groups, uint32_t width, uint32_t row_bytes) {
  return groups * (sizeof(Link) + width * (sizeof(int64_t) + row_bytes)) +
         std::bit_ceil(std::max<size_t>(groups, 1)) * sizeof(uint32_t);
}

size_t GroupStore::groups_in(size_t budget_bytes, uint32_t width, uint32_t row_bytes) {
  // buckets go in powers of two: search for the largest count whose sum still fits
  size_t groups = 0;
  const size_t most = std::max<size_t>(budget_bytes / bytes_for(1, width, row_bytes) * 2, 1);
  for (size_t step = std::bit_floor(most); step > 0; step /= 2) {
    if (bytes_for(groups + step, width, row_bytes) <= budget_bytes) groups += step;
  }
  return groups;
}

GroupStore::GroupStore(size_t groups, uint32_t width, uint32_t row_bytes, const char* name)
    : ids_bytes_(width * sizeof(int64_t)),
      rows_bytes_(size_t{width} * row_bytes),
      memory_(bytes_for(groups, width, row_bytes), name) {
  std::byte* at = memory_.data();
  links_ = {reinterpret_cast<Link*>(at), groups};
  at += links_.size_bytes();
  buckets_ = {reinterpret_cast<uint32_t*>(at), std::bit_ceil(std::max<size_t>(groups, 1))};
  ids_ = at + buckets_.size_bytes();
  rows_ = ids_ + groups * ids_bytes_;
  std::fill(buckets_.begin(), buckets_.end(), kNone);
}

uint32_t GroupStore::find(const GroupKey& key) const {
  uint32_t entry = buckets_[bucket(key.hash)];
  while (entry != kNone &&
         (links_[entry].hash != key.hash ||
          std::memcmp(ids_ + entry * ids_bytes_, key.ids.data(), ids_bytes_) != 0)) {
    entry = links_[entry].next;
  }
  return entry;
}

void GroupStore::fill(uint32_t entry, const GroupKey& key, const std::byte* rows) {
  uint32_t& head = buckets_[bucket(key.hash)];
  links_[entry] = {key.hash, head};
  head = entry;
  std::memcpy(ids_ + entry * ids_bytes_, key.ids.data(), ids_bytes_);
  std::memcpy(rows_ + entry * rows_bytes_, rows, rows_bytes_);
}

void GroupStore::remove(uint32_t entry) {
  uint32_t* link = &buckets_[bucket(links_[entry].hash)];
  while (*link != entry) link = &links_[*link].next;
  *link = links_[entry].next;
}

}  // namespace rowstream
