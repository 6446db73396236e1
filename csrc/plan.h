// Turns row ids into the reads that fetch them. Duplicate groups are found,
// rows are put into the order of the disk, and what shares a block becomes one
// span. Allocates at construction only; works on one piece of a gather at a
// time; touches no file.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "extent.h"
#include "group.h"
#include "memory.h"

namespace rowstream {

// a token's rows: `heads` ids in a row, planned as groups of `groups[i]` heads
// each
struct Batch {
  const int64_t* row_ids;
  size_t tokens;
  std::span<const uint32_t> groups;
  unsigned heads;  // the sum of groups
};

// one row wanted: where it lies and which row of the piece's output it fills
struct Item {
  uint64_t at;  // file << 48 | offset
  uint32_t row;
  uint32_t plane;

  uint32_t file() const { return static_cast<uint32_t>(at >> 48); }
  uint64_t offset() const { return at & ((uint64_t{1} << 48) - 1); }
};

// the aligned byte range read for one or more items
struct Span {
  uint64_t offset;
  uint32_t length;
  uint32_t needed;  // bytes from offset that the items really need
  uint32_t file;
  bool joined;  // over blocks that no item needs, or from one block to the next
  std::span<const Item> items;
  // of rows that lie in several places: these, which of them is meant, and how much further on
  // (modulo 2^64) an item lies there than it says
  std::span<const Extent> copies = {};
  uint32_t copy = 0;
  uint64_t shift = 0;
};

// a group that occurred before in the piece: its rows are copied once the first
// is there
struct Copy {
  uint32_t to_row;
  uint32_t from_row;
  uint32_t rows;
};

class Plan {
 public:
  static constexpr size_t kMaxPools = 2;
  static constexpr uint32_t kMaxRows = 4'194'304;
  // Blocks that nobody needs are read where they part two rows by no more than this: a device gives
  // so much in the time of a read of its own, or in less.
  static constexpr uint32_t kJoinBytes = 4096;
  // rows: the largest piece, kMaxRows at most. span_bytes: the largest span, one bounce slot.
  Plan(const std::vector<Plane>& planes, uint32_t rows, uint32_t span_bytes);

  size_t memory_bytes() const { return scratch_.size(); }
  // of the largest piece
  size_t rows() const { return ids_.size(); }

  // Plans one piece; alignments[file] is the block of that file's reads. What a pool has is copied
  // to out and not read. Throws std::out_of_range for an id outside [-1, num_rows).
  void build(const Batch& batch, std::span<const uint32_t> alignments,
             std::span<RowPool* const> pools, std::byte* out);

  // the next span in disk order, or false at the end
  bool next(Span& span);
  // The longest span from the front of items, which are in disk order. join: as next() does it, or
  // only what shares blocks.
  Span merge(std::span<const Item> items, bool join) const;
  // the span of the same rows in another one of its copies
  Span moved(const Span& span, uint32_t copy) const;

  std::span<const Copy> copies() const { return copies_.first(num_copies_); }
  // rows of the piece that have no id: they read as zeroes
  std::span<const uint32_t> missing() const { return missing_.first(num_missing_); }
  uint32_t duplicate_rows() const { return duplicate_rows_; }
  // rows that pool number i had
  uint32_t pooled_rows(size_t pool) const { return pooled_rows_[pool]; }
  // first rows of the groups that the first pool had not, and their ids
  std::span<const uint32_t> fresh() const { return fresh_.first(num_fresh_); }
  std::span<const int64_t> ids(uint32_t first_row, uint32_t width) const {
    return ids_.subspan(first_row, width);
  }

 private:
  void add_groups(const Batch& batch, size_t groups);
  void add_group(const GroupKey& key);
  bool pooled(const GroupKey& key, uint32_t first_row);
  std::span<const Extent> copies_of(const Item& item) const {
    return has_copies_ ? planes_[item.plane].copies_of(ids_[item.row]) : std::span<const Extent>();
  }
  uint64_t bytes_end(const Item& item) const {
    return item.offset() + planes_[item.plane].row_bytes();
  }
  void sort(unsigned low_bits);

  const std::vector<Plane>& planes_;
  const int64_t num_rows_;
  const uint32_t span_bytes_;
  uint32_t joined_bytes_ = 0;  // the largest span of several rows
  bool has_copies_ = false;

  Pages scratch_;
  std::span<Item> items_;
  std::span<Item> sorted_;  // the radix sort's other buffer
  std::span<int64_t> ids_;  // read once, so that nobody changes them after the check
  std::span<Copy> copies_;
  std::span<uint32_t> missing_;
  std::span<uint32_t> fresh_;
  // open addressing: first row of a group + 1, and bits of its hash above; 0 is empty
  std::span<uint32_t> table_;

  std::span<const uint32_t> alignments_;
  std::span<RowPool* const> pools_;
  std::byte* out_ = nullptr;
  uint32_t row_bytes_ = 0;
  std::array<uint32_t, kMaxPools> pooled_rows_{};
  uint32_t table_mask_ = 0;
  uint32_t num_items_ = 0;
  uint32_t num_copies_ = 0;
  uint32_t num_missing_ = 0;
  uint32_t num_fresh_ = 0;
  uint32_t duplicate_rows_ = 0;
  uint32_t next_item_ = 0;
};

// throws std::out_of_range naming the first id outside [-1, num_rows)
void check_row_ids(std::span<const int64_t> ids, int64_t num_rows);

}  // namespace rowstream
