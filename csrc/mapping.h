// A whole file mapped for reading, without read-ahead. Owns the address range; when its pages are
// fetched and dropped is decided elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "file.h"

namespace rowstream {

struct AddressRange {
  const std::byte* data;
  size_t size;

  bool contains(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    return at >= begin && at - begin < size;
  }
};

class Mapping {
 public:
  explicit Mapping(const TableFile& file);  // throws ReadFailure
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  const std::byte* data() const { return data_; }
  // whole pages: the last one is the file's in part
  AddressRange range() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace rowstream
