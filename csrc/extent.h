// Where the rows of one plane lie: runs of rows, each contiguous in one file.
// Pure arithmetic on validated numbers; knows no descriptor and reads nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace rowstream {

struct Extent {
  uint32_t file;      // index into the table's files
  uint64_t offset;    // byte of its first row in that file
  int64_t first_row;  // global id of its first row
  int64_t num_rows;
};

struct Location {
  uint32_t file;
  uint64_t offset;
};

class Plane {
 public:
  // Extents are sorted and gapless from row 0. One with the rows of the one before is a copy of it.
  // Throws std::invalid_argument.
  Plane(uint32_t row_bytes, std::vector<Extent> extents);

  uint32_t row_bytes() const { return row_bytes_; }
  int64_t num_rows() const { return num_rows_; }
  // without copies
  const std::vector<Extent>& extents() const { return extents_; }
  // the extents that are copies, and what they are copies of
  bool has_copies() const { return !copies_.empty(); }
  const std::vector<std::vector<Extent>>& copies() const { return copies_; }
  // every place of the extent that has the row, the usual one first; none where that is the only
  // one
  std::span<const Extent> copies_of(int64_t row) const {
    return has_copies() ? std::span<const Extent>(copies_[index_of(row)])
                        : std::span<const Extent>();
  }

  // 0 <= row < num_rows(), checked by the caller
  Location locate(int64_t row) const {
    const Extent& extent = extents_[index_of(row)];
    return {extent.file,
            extent.offset + static_cast<uint64_t>(row - extent.first_row) * row_bytes_};
  }

 private:
  size_t index_of(int64_t row) const;

  uint32_t row_bytes_;
  int64_t num_rows_ = 0;
  int64_t rows_per_extent_ = 0;  // all but the last are as long as the first; 0: they are not
  std::vector<Extent> extents_;
  std::vector<std::vector<Extent>> copies_;  // by extent, or nothing where there are none
};

}  // namespace rowstream
