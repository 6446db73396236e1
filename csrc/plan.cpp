#include "plan.h"

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
  for (const Plane& plane : planes) row_bytes_ += plane.row_bytes();
  scratch_ = Pages(bytes, "rowstream plan");
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
  const size_t slots = std::min(std::bit_ceil(groups + 1) * 2, table_.size());
  std::fill_n(table_.data(), slots, 0u);
  table_mask_ = static_cast<uint32_t>(slots - 1);

  uint32_t row = 0;
  for (size_t token = 0; token < batch.tokens; ++token) {
    for (const uint32_t width : batch.groups) {
      add_group(row, width);
      row += width;
    }
  }
  const uint32_t smallest = *std::min_element(alignments.begin(), alignments.end());
  sort(static_cast<unsigned>(std::countr_zero(smallest)));
}

void Plan::add_group(uint32_t first_row, uint32_t width) {
  const GroupKey key(ids(first_row, width));
  uint32_t slot = static_cast<uint32_t>(key.hash) & table_mask_;
  for (; table_[slot] != 0; slot = (slot + 1) & table_mask_) {
    const uint32_t seen = table_[slot] - 1;
    if (std::memcmp(&ids_[seen], key.ids.data(), key.ids.size_bytes()) == 0) {
      copies_[num_copies_++] = {first_row, seen, width};
      duplicate_rows_ += width;
      return;
    }
  }
  table_[slot] = first_row + 1;
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
  const uint32_t first = next_item_;
  span.file = items_[first].file();
  const uint64_t align = alignments_[span.file];
  const auto start_of = [align](const Item& item) { return item.offset() / align * align; };
  const auto bytes_end = [this](const Item& item) {
    return item.offset() + planes_[item.plane].row_bytes();
  };
  span.offset = start_of(items_[first]);
  uint64_t needed = bytes_end(items_[first]);
  uint64_t end = (needed + align - 1) / align * align;
  uint32_t last = first + 1;
  for (; last < num_items_; ++last) {
    const Item& item = items_[last];
    if (item.file() != span.file || start_of(item) >= end) break;
    const uint64_t item_end = std::max(end, (bytes_end(item) + align - 1) / align * align);
    if (item_end - span.offset > span_bytes_) break;
    needed = std::max(needed, bytes_end(item));
    end = item_end;
  }
  span.length = static_cast<uint32_t>(end - span.offset);
  span.needed = static_cast<uint32_t>(needed - span.offset);
  span.items = items_.subspan(first, last - first);
  next_item_ = last;
  return true;
}

}  // namespace rowstream
