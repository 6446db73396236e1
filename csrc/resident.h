// A table whose rows can be addressed: the checkpoint mapped into memory, or
// read into anonymous memory once. A gather is a copy; nothing is planned, and
// any number of them run at a time. A page of a mapping that cannot be read is
// a ReadFailure.
#pragma once

#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "advice.h"
#include "counters.h"
#include "gather.h"
#include "load.h"
#include "mapping.h"
#include "memory.h"
#include "source.h"
#include "trimmer.h"

namespace rowstream {

class ResidentTable {
 public:
  enum class Kind { kMapped, kLoaded };

  struct Options {
    OnReadError on_read_error = OnReadError::kRaise;
    uint64_t budget_bytes = 0;       // of resident pages; 0: none
    std::vector<uint32_t> groups{};  // rows of each n-gram of a token, where that is known
  };

  // what is known of the mappings
  struct MappedPages {
    uint64_t mapped_bytes;
    uint64_t resident_bytes;  // asked of the kernel just now
    uint64_t faults;          // reads that ended in SIGBUS
    uint64_t advise_failures;
    uint64_t drops;  // slices dropped to stay under the budget
  };

  // kLoaded reads the whole table; poll can end that with Interrupted
  ResidentTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes, Kind kind,
                const Poll& poll, Options options, const Loader::Progress& progress = {});
  ~ResidentTable();

  int64_t num_rows() const { return source_.num_rows(); }
  uint32_t row_bytes() const { return source_.row_bytes; }
  const std::vector<uint32_t>& groups() const { return options_.groups; }
  const Counters& counters() const { return counters_; }
  size_t memory_bytes() const { return memory_bytes_; }
  std::vector<FileState> files() const;
  MappedPages mapped_pages() const;
  // Of a loaded table of one plane: row after row, for as long as anybody holds it. Throws
  // std::invalid_argument for others.
  std::shared_ptr<const Pages> memory() const;

  // as DiskTable::gather, but many at a time
  void gather(const Batch& batch, std::byte* out, const Poll& poll);
  void close();

 private:
  struct Copy;

  void load(Loader& loader, const Poll& poll, const Loader::Progress& progress);
  void check_identities();
  const std::byte* address(size_t plane, int64_t row) const;
  // the kernel is told of rows [from, to) of the batch
  void advise(const Batch& batch, size_t from, size_t to);
  void copy(Copy& copy);
  static void copy_rows(void* copy);
  [[noreturn]] void fail(const Copy& copy) const;

  const Kind kind_;
  const Options options_;
  const unsigned forks_;
  Source source_;
  std::vector<Mapping> mappings_;                     // by file
  std::vector<AddressRange> ranges_;                  // theirs
  std::vector<std::shared_ptr<const Pages>> loaded_;  // by plane
  std::unique_ptr<Advice> advice_;                    // kMapped
  std::unique_ptr<Trimmer> trimmer_;                  // kMapped with a budget
  size_t memory_bytes_ = 0;
  mutable std::shared_mutex mutex_;  // shared by gathers, exclusive for close
  bool closed_ = false;
  std::atomic<int64_t> next_identity_check_ns_{0};
  std::atomic<uint64_t> faults_{0};
  Counters counters_;
};

}  // namespace rowstream
