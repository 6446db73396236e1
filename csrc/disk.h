// A table read from its files: opens them, plans each gather in pieces, and keeps the lanes that
// read them, with those that had to be parked. Any thread may call. Of the gathers of up to 1,024
// rows one runs at a time, and of the longer ones: a decode step never waits for a prompt.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache.h"
#include "counters.h"
#include "fault.h"
#include "gather.h"
#include "lane.h"
#include "lookahead.h"
#include "plan.h"
#include "source.h"
#include "traffic.h"

namespace rowstream {

class DiskTable {
 public:
  struct Options {
    std::string reader = "auto";
    unsigned queue_depth = 128;
    bool direct = true;
    uint32_t block = 0;  // of direct reads; 0: what the file system asks for, 512 at least
    double read_timeout_s = 10;
    OnReadError on_read_error = OnReadError::kRaise;
    // tokens come as groups of so many rows, by which rows are kept; 0: nothing is kept
    uint32_t group_width = 0;
    size_t cache_bytes = 0;      // rows read before; 0: none
    size_t lookahead_bytes = 0;  // rows read before they are asked for; 0: none
    std::vector<Fault> faults;
    std::vector<uint32_t> groups;  // rows of each n-gram of a token, where that is known
  };

  DiskTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes, Options options);
  ~DiskTable();
  DiskTable(const DiskTable&) = delete;
  DiskTable& operator=(const DiskTable&) = delete;

  int64_t num_rows() const { return source_.num_rows(); }
  uint32_t row_bytes() const { return source_.row_bytes; }
  const std::vector<uint32_t>& groups() const { return options_.groups; }
  const Counters& counters() const { return counters_; }
  std::string reader_name() const { return reader_name_; }
  std::string reader_note() const { return reader_note_; }
  unsigned queue_depth() const { return options_.queue_depth; }
  size_t memory_bytes() const;
  std::vector<FileState> files() const;
  const Cache* cache() const { return cache_.get(); }
  const Counters& lookahead_counters() const { return lookahead_counters_; }

  // out: tokens * heads rows of row_bytes() each. Every id is checked before
  // the first read. Throws std::out_of_range, ReadFailure, Interrupted,
  // ClosedError, ForkedError; after any of them the contents of out are
  // undefined and the next gather works.
  void gather(const Batch& batch, std::byte* out, const Poll& poll);

  // Starts to read the rows of ids, groups of group_width, for gathers to come. Returns at once
  // with the number of a ticket. Without lookahead_bytes nothing is read.
  uint64_t prefetch(std::span<const int64_t> ids);
  TicketState ticket(uint64_t number) const;
  void drop(uint64_t number);

  // Waits for a running gather, and up to the read time-out for reads that were
  // given up.
  void close();

 private:
  // what a gather takes for itself
  struct Track {
    mutable std::mutex mutex;
    unsigned depth = 0;
    uint32_t slot_bytes = 0;  // the longest span
    std::unique_ptr<Plan> plan;
    std::unique_ptr<Lane> lane;  // none once closed, or for want of memory
    std::chrono::steady_clock::time_point next_identity_check;
  };

  void make(Track& track, uint32_t rows, unsigned depth, uint32_t joined_bytes);
  std::unique_ptr<Lane> make_lane(unsigned depth, uint32_t slot_bytes,
                                  std::string* note = nullptr) const;
  Lane& replace(std::unique_ptr<Lane>& lane);
  size_t reap_parked();
  void check_identities(Track& track);
  std::unique_ptr<Plan> large_plan(size_t rows) const;
  void gather_piece(Track& track, Plan& plan, const Batch& batch, std::byte* out, const Poll& poll);
  void read_ahead(std::span<const int64_t> ids, std::byte* out, const Poll& stop);
  bool kept(const Batch& batch) const;

  const Options options_;
  const ReadPolicy policy_;
  const unsigned forks_;
  Source source_;
  std::vector<int> registered_;  // the descriptors that readers are made with
  std::vector<uint32_t> alignments_;
  std::unique_ptr<Drives> drives_;  // where some rows have copies
  uint32_t row_slot_bytes_ = 0;     // the longest span of one row
  std::shared_ptr<FaultSchedule> faults_;
  Track short_;
  Track long_;
  Traffic traffic_;
  std::mutex parked_mutex_;
  std::vector<std::unique_ptr<Lane>> parked_;
  std::unique_ptr<Cache> cache_;
  std::string reader_name_;
  std::string reader_note_;
  size_t memory_bytes_ = 0;
  Counters counters_;

  // the look-ahead's own, used by its thread; made by the first prefetch
  std::unique_ptr<Plan> ahead_plan_;
  std::unique_ptr<Lane> ahead_lane_;
  size_t ahead_lane_bytes_ = 0;
  Counters lookahead_counters_;
  std::atomic<bool> closed_{false};
  mutable std::mutex lookahead_mutex_;  // guards its making and its end
  std::unique_ptr<Lookahead> lookahead_;
  std::atomic<Lookahead*> ahead_pool_{nullptr};  // the same, for gathers
};

}  // namespace rowstream
