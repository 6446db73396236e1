#include "extent.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace rowstream {
namespace {

// offsets share a 64-bit sort key with the file's index (plan.cpp)
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 48;

}  // namespace

Plane::Plane(uint32_t row_bytes, std::vector<Extent> extents) : row_bytes_(row_bytes) {
  if (row_bytes_ == 0) throw std::invalid_argument("a row has no bytes");
  if (extents.empty()) throw std::invalid_argument("a plane has no extents");
  for (const Extent& extent : extents) {
    const bool copy = !extents_.empty() && extent.first_row == extents_.back().first_row &&
                      extent.num_rows == extents_.back().num_rows;
    if ((!copy && extent.first_row != num_rows_) || extent.num_rows <= 0) {
      throw std::invalid_argument("extent starts at row " + std::to_string(extent.first_row) +
                                  " with " + std::to_string(extent.num_rows) +
                                  " rows, needs to go on at row " + std::to_string(num_rows_));
    }
    if (extent.offset >= kMaxFileBytes ||
        static_cast<uint64_t>(extent.num_rows) > (kMaxFileBytes - extent.offset) / row_bytes_) {
      throw std::invalid_argument("extent at row " + std::to_string(extent.first_row) +
                                  " ends past byte 2^48 of its file");
    }
    if (!copy) {
      extents_.push_back(extent);
      num_rows_ += extent.num_rows;
      continue;
    }
    copies_.resize(extents_.size());
    if (copies_.back().empty()) copies_.back().push_back(extents_.back());
    copies_.back().push_back(extent);
  }
  if (has_copies()) copies_.resize(extents_.size());
  const int64_t first = extents_.front().num_rows;
  const bool equal = std::all_of(extents_.begin(), extents_.end() - 1,
                                 [first](const Extent& e) { return e.num_rows == first; });
  if (equal && extents_.back().num_rows <= first) rows_per_extent_ = first;
}

size_t Plane::index_of(int64_t row) const {
  if (rows_per_extent_ > 0) return static_cast<size_t>(row / rows_per_extent_);
  const auto after = std::upper_bound(extents_.begin(), extents_.end(), row,
                                      [](int64_t r, const Extent& e) { return r < e.first_row; });
  return static_cast<size_t>(after - extents_.begin()) - 1;
}

}  // namespace rowstream
