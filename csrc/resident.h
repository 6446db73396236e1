// A table whose rows can be addressed: the checkpoint mapped into memory, or read into
// anonymous memory once. A gather is a copy; nothing is planned and no lock is taken.
#pragma once

#include <shared_mutex>
#include <string>
#include <vector>

#include "gather.h"

namespace rowstream {

// a whole file, mapped for reading without read-ahead
class Mapping {
 public:
  explicit Mapping(const TableFile& file);  // throws ReadFailure
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  const std::byte* data() const { return data_; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

class ResidentTable {
 public:
  enum class Kind { kMapped, kLoaded };

  // kLoaded reads the whole table; poll can end that with Interrupted
  ResidentTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes, Kind kind,
                Poll poll);

  int64_t num_rows() const { return planes_.front().num_rows(); }
  uint32_t row_bytes() const { return row_bytes_; }
  const std::vector<TableFile>& files() const { return files_; }
  const Counters& counters() const { return counters_; }
  size_t memory_bytes() const;

  // as DiskTable::gather, but many at a time
  void gather(const Batch& batch, std::byte* out, Poll poll);
  void close();

 private:
  void load(Poll poll);
  const std::byte* address(size_t plane, int64_t row) const;

  Kind kind_;
  std::vector<Plane> planes_;
  uint32_t row_bytes_;
  unsigned forks_;
  std::vector<TableFile> files_;
  std::vector<Mapping> mappings_;  // by file
  std::vector<Pages> loaded_;      // by plane
  std::shared_mutex mutex_;        // shared by gathers, exclusive for close
  bool closed_ = false;
  Counters counters_;
};

}  // namespace rowstream
