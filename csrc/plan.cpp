#include "plan.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace rowstream {
namespace {

constexpr unsigned kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;
// below this, std::sort is faster than a pass over the digits (2-core x86
// guest)
constexpr uint32_t kRadixFrom = 512;

// rows in an entry of the table; the rest of it is of the hash, so that most probes of another
// group end without a look at its ids
constexpr unsigned kRowBits = 23;
constexpr uint32_t kRowMask = (1u << kRowBits) - 1;
static_assert(Plan::kMaxRows <= kRowMask);
// Scratch for one gather, which is touched at random: in small pages, faults and address
// translation would take a quarter of its time.
constexpr size_t kHugeFrom = size_t{32} << 20;
// groups whose places in the table are fetched while the ones before are looked up
constexpr size_t kAhead = 32;

template <typename T>
std::span<T> carve(std::byte*& at, size_t count) {
  std::span<T> part(reinterpret_cast<T*>(at), count);
  at += (count * sizeof(T) + 63) / 64 * 64;
  return part;
}

}  // namespace

void check_row_ids(std::span<const int64_t> ids, int64_t num_rows) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < -1 || ids[i] >= num_rows) {
      throw std::out_of_range("row id " + std::to_string(ids[i]) + " at position " +
                              std::to_string(i) + " is outside [0, " + std::to_string(num_rows) +
                              ")");
    }
  }
}

Plan::Plan(const std::vector<Plane>& planes, uint32_t rows, uint32_t span_bytes)
    : planes_(planes), num_rows_(planes.front().num_rows()), span_bytes_(span_bytes) {
  const size_t items = size_t{rows} * planes.size();
  const size_t table = std::bit_ceil(size_t{rows}) * 2;
  const size_t bytes = 2 * items * sizeof(Item) + rows * sizeof(int64_t) + rows * sizeof(Copy) +
                       2 * rows * sizeof(uint32_t) + table * sizeof(uint32_t) + 7 * 64;
  for (const Plane& plane : planes) {
    row_bytes_ += plane.row_bytes();
    has_copies_ |= plane.has_copies();
  }
  scratch_ = Pages(bytes, "rowstream plan");
  if (bytes >= kHugeFrom) madvise(scratch_.data(), scratch_.size(), MADV_HUGEPAGE);
  std::byte* at = scratch_.data();
  items_ = carve<Item>(at, items);
  sorted_ = carve<Item>(at, items);
  ids_ = carve<int64_t>(at, rows);
  copies_ = carve<Copy>(at, rows);
  missing_ = carve<uint32_t>(at, rows);
  fresh_ = carve<uint32_t>(at, rows);
  table_ = carve<uint32_t>(at, table);
}

void Plan::build(const Batch& batch, std::span<const uint32_t> alignments,
                 std::span<RowPool* const> pools, std::byte* out) {
  const size_t rows = batch.tokens * batch.heads;
  std::copy_n(batch.row_ids, rows, ids_.data());
  check_row_ids(ids_.first(rows), num_rows_);

  alignments_ = alignments;
  pools_ = pools;
  out_ = out;
  pooled_rows_ = {};
  num_items_ = num_copies_ = num_missing_ = num_fresh_ = duplicate_rows_ = next_item_ = 0;
  // only as much of the table as this piece needs: clearing all of it would cost a small gather
  // more than its reads
  const size_t groups = batch.tokens * batch.groups.size();
  const size_t slots = std::min(std::bit_ceil(groups + groups / 2 + 1), table_.size());
  std::fill_n(table_.data(), slots, 0u);
  table_mask_ = static_cast<uint32_t>(slots - 1);

  add_groups(batch, groups);
  const auto [smallest, largest] = std::minmax_element(alignments.begin(), alignments.end());
  // elsewhere the same rows may begin and end in the middle of blocks
  joined_bytes_ = span_bytes_ - (has_copies_ ? std::min(*largest, span_bytes_) : 0);
  sort(static_cast<unsigned>(std::countr_zero(*smallest)));
}

void Plan::add_groups(const Batch& batch, size_t groups) {
  std::array<GroupKey, kAhead> keys;
  uint32_t row = 0;
  size_t group = 0;  // in its token
  while (groups > 0) {
    const size_t count = std::min(groups, kAhead);
    for (GroupKey& key : std::span(keys).first(count)) {
      key = GroupKey(ids(row, batch.groups[group]));
      __builtin_prefetch(&table_[key.hash & table_mask_], 1);
      row += batch.groups[group];
      group = group + 1 == batch.groups.size() ? 0 : group + 1;
    }
    for (const GroupKey& key : std::span(keys).first(count)) add_group(key);
    groups -= count;
  }
}

void Plan::add_group(const GroupKey& key) {
  const auto first_row = static_cast<uint32_t>(key.ids.data() - ids_.data());
  const auto width = static_cast<uint32_t>(key.ids.size());
  const uint32_t entry =
      static_cast<uint32_t>(key.hash >> (64 - 32 + kRowBits)) << kRowBits | (first_row + 1);
  uint32_t slot = static_cast<uint32_t>(key.hash) & table_mask_;
  for (; table_[slot] != 0; slot = (slot + 1) & table_mask_) {
    if ((table_[slot] ^ entry) >> kRowBits != 0) continue;
    const uint32_t seen = (table_[slot] & kRowMask) - 1;
    if (std::memcmp(&ids_[seen], key.ids.data(), key.ids.size_bytes()) == 0) {
      copies_[num_copies_++] = {first_row, seen, width};
      duplicate_rows_ += width;
      return;
    }
  }
  table_[slot] = entry;
  if (pooled(key, first_row)) return;
  for (uint32_t i = 0; i < width; ++i) {
    if (key.ids[i] < 0) {
      missing_[num_missing_++] = first_row + i;
      continue;
    }
    for (uint32_t plane = 0; plane < planes_.size(); ++plane) {
      const Location at = planes_[plane].locate(key.ids[i]);
      items_[num_items_++] = {uint64_t{at.file} << 48 | at.offset, first_row + i, plane};
    }
  }
}

// The first pool keeps what was read once; what another one had is new to it.
bool Plan::pooled(const GroupKey& key, uint32_t first_row) {
  if (pools_.empty()) return false;
  for (size_t i = 0; i < pools_.size(); ++i) {
    if (pools_[i] == nullptr || !pools_[i]->take(key, out_ + size_t{first_row} * row_bytes_)) {
      continue;
    }
    pooled_rows_[i] += static_cast<uint32_t>(key.ids.size());
    if (i > 0) fresh_[num_fresh_++] = first_row;
    return true;
  }
  fresh_[num_fresh_++] = first_row;
  return false;
}

// By block: within a block any order will do, so the low bits cost no pass.
void Plan::sort(unsigned low_bits) {
  const auto block = [low_bits](const Item& item) { return item.at >> low_bits; };
  if (num_items_ < kRadixFrom) {
    std::sort(items_.begin(), items_.begin() + num_items_,
              [&](const Item& a, const Item& b) { return block(a) < block(b); });
    return;
  }
  uint64_t differing = 0;
  for (const Item& item : items_.first(num_items_)) differing |= block(item) ^ block(items_[0]);
  std::array<uint32_t, kDigits> starts;
  for (unsigned shift = 0; shift < 64 && differing >> shift != 0; shift += kDigitBits) {
    if ((differing >> shift & (kDigits - 1)) == 0) continue;
    starts.fill(0);
    for (const Item& item : items_.first(num_items_)) {
      ++starts[block(item) >> shift & (kDigits - 1)];
    }
    uint32_t start = 0;
    for (uint32_t& count : starts) start += std::exchange(count, start);
    for (const Item& item : items_.first(num_items_)) {
      sorted_[starts[block(item) >> shift & (kDigits - 1)]++] = item;
    }
    std::swap(items_, sorted_);
  }
}

bool Plan::next(Span& span) {
  if (next_item_ == num_items_) return false;
  span = merge(items_.subspan(next_item_, num_items_ - next_item_), /*join=*/true);
  next_item_ += static_cast<uint32_t>(span.items.size());
  return true;
}

Span Plan::merge(std::span<const Item> items, bool join) const {
  const uint32_t file = items.front().file();
  const uint64_t align = alignments_[file];  // a power of two
  const auto down = [align](uint64_t offset) { return offset & ~(align - 1); };
  const std::span<const Extent> copies = copies_of(items.front());
  const uint64_t offset = down(items.front().offset());
  uint64_t needed = bytes_end(items.front());
  uint64_t end = down(needed + align - 1);
  bool joined = false;
  size_t count = 1;
  for (; count < items.size(); ++count) {
    const Item& item = items[count];
    const uint64_t start = down(item.offset());
    if (item.file() != file || (start >= end && (!join || start - end > kJoinBytes))) break;
    const uint64_t item_end = std::max(end, down(bytes_end(item) + align - 1));
    if (item_end - offset > joined_bytes_) break;
    // another extent's copies lie elsewhere
    if (has_copies_ && copies_of(item).data() != copies.data()) break;
    joined |= start >= end;
    needed = std::max(needed, bytes_end(item));
    end = item_end;
  }
  return {offset,
          static_cast<uint32_t>(end - offset),
          static_cast<uint32_t>(needed - offset),
          file,
          joined,
          items.first(count),
          copies};
}

Span Plan::moved(const Span& span, uint32_t copy) const {
  Span there = span;
  there.copy = copy;
  there.file = span.copies[copy].file;
  there.shift = span.copies[copy].offset - span.copies.front().offset;
  uint64_t first = UINT64_MAX;  // within a block, items are in any order
  uint64_t end = 0;
  for (const Item& item : span.items) {
    first = std::min(first, item.offset());
    end = std::max(end, bytes_end(item));
  }
  const uint64_t align = alignments_[there.file];
  there.offset = (first + there.shift) & ~(align - 1);
  there.needed = static_cast<uint32_t>(end + there.shift - there.offset);
  there.length = static_cast<uint32_t>((there.needed + align - 1) & ~(align - 1));
  return there;
}

}  // namespace rowstream
