// A table whose rows can be addressed: the checkpoint mapped into memory, or
// read into anonymous memory once. A gather is a copy; nothing is planned and
// no lock is taken.
#pragma once

#include <shared_mutex>
#include <string>
#include <vector>

#include "counters.h"
#include "gather.h"
#include "memory.h"
#include "source.h"

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

  int64_t num_rows() const { return source_.num_rows(); }
  uint32_t row_bytes() const { return source_.row_bytes; }
  const Counters& counters() const { return counters_; }
  size_t memory_bytes() const { return memory_bytes_; }
  std::vector<FileState> files() const;

  // as DiskTable::gather, but many at a time
  void gather(const Batch& batch, std::byte* out, const Poll& poll);
  void close();

 private:
  void load(Poll poll);
  void check_identities();
  const std::byte* address(size_t plane, int64_t row) const;

  const Kind kind_;
  const unsigned forks_;
  Source source_;
  std::vector<Mapping> mappings_;  // by file
  std::vector<Pages> loaded_;      // by plane
  size_t memory_bytes_ = 0;
  mutable std::shared_mutex mutex_;  // shared by gathers, exclusive for close
  bool closed_ = false;
  std::atomic<int64_t> next_identity_check_ns_{0};
  Counters counters_;
};

}  // namespace rowstream
