// A table read from its files: opens them, plans each gather in pieces, and
// keeps the lane that reads them, with those that had to be parked. Any thread
// may call; one gather runs at a time.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "counters.h"
#include "fault.h"
#include "gather.h"
#include "lane.h"
#include "plan.h"
#include "source.h"

namespace rowstream {

class DiskTable {
 public:
  struct Options {
    std::string reader = "auto";
    unsigned queue_depth = 128;
    bool direct = true;
    double read_timeout_s = 10;
    OnReadError on_read_error = OnReadError::kRaise;
    std::vector<Fault> faults;
  };

  DiskTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes, Options options);
  ~DiskTable();
  DiskTable(const DiskTable&) = delete;
  DiskTable& operator=(const DiskTable&) = delete;

  int64_t num_rows() const { return source_.num_rows(); }
  uint32_t row_bytes() const { return source_.row_bytes; }
  const Counters& counters() const { return counters_; }
  std::string reader_name() const { return reader_name_; }
  std::string reader_note() const { return reader_note_; }
  unsigned queue_depth() const { return options_.queue_depth; }
  size_t memory_bytes() const { return memory_bytes_; }
  std::vector<FileState> files() const;

  // out: tokens * heads rows of row_bytes() each. Every id is checked before
  // the first read. Throws std::out_of_range, ReadFailure, Interrupted,
  // ClosedError, ForkedError; after any of them the contents of out are
  // undefined and the next gather works.
  void gather(const Batch& batch, std::byte* out, Poll poll);

  // Waits for a running gather, and up to the read time-out for reads that were
  // given up.
  void close();

 private:
  std::unique_ptr<Lane> make_lane();
  Lane& replace_lane();
  void reap_parked();
  void check_identities();

  const Options options_;
  const ReadPolicy policy_;
  const unsigned forks_;
  Source source_;
  std::vector<int> registered_;  // the descriptors that readers are made with
  std::vector<uint32_t> alignments_;
  uint32_t slot_bytes_ = 0;
  std::unique_ptr<Plan> plan_;
  std::shared_ptr<FaultSchedule> faults_;
  std::unique_ptr<Lane> lane_;  // none once closed
  std::vector<std::unique_ptr<Lane>> parked_;
  std::string reader_name_;
  std::string reader_note_;
  size_t memory_bytes_ = 0;
  std::chrono::steady_clock::time_point next_identity_check_;
  mutable std::mutex mutex_;
  Counters counters_;
};

}  // namespace rowstream
