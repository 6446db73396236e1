// Rows read before they are asked for. A ticket names the groups of a prompt; a thread reads
// them piece by piece into a pool of fixed size, where a gather finds them by their ids and takes
// them away. A wrong guess costs reads, never bytes. Any thread may call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "group.h"

namespace rowstream {

struct TicketState {
  uint64_t wanted = 0;   // rows
  uint64_t arrived = 0;  // rows that are in memory or were taken already
  bool over = false;     // nothing more will be read for it
};

class Lookahead final : public RowPool {
 public:
  // Reads groups of ids into out, or throws; asks `stop` whether it should give up.
  using Stop = std::function<bool()>;
  using ReadGroups = std::function<void(std::span<const int64_t> ids, std::byte* out, Stop stop)>;
  // whether a group is in memory elsewhere and need not be read
  using Holds = std::function<bool(const GroupKey&)>;

  // groups read at a time: rows are of use only when their piece has arrived, and a long piece
  // would let the ones that are needed first wait for the others
  static constexpr size_t kPieceGroups = 256;

  Lookahead(size_t budget_bytes, uint32_t width, uint32_t row_bytes, ReadGroups read, Holds holds);
  ~Lookahead() override;

  uint64_t add(std::span<const int64_t> ids);
  TicketState state(uint64_t ticket) const;
  // forgets what was asked for and not taken yet; unknown tickets are none
  void drop(uint64_t ticket);
  // ends the thread; nothing is read any more
  void stop();

  // a group that was asked for n times can be taken n times
  bool take(const GroupKey& key, std::byte* out) override;

  size_t memory_bytes() const { return memory_bytes_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Ticket {
    std::vector<int64_t> ids;
    size_t next = 0;  // the first id that was not looked at
    TicketState state;
  };
  // a group that a gather asked for in vain, and how many tickets there were by then
  struct Asked {
    uint64_t hash = 0;
    uint64_t tickets = 0;
  };
  struct Held {
    uint64_t ticket = 0;  // the last one that asked for it; 0: the entry is free
    uint32_t uses = 0;
    Clock::time_point until;
  };

  void run();
  // the groups of the next piece that must be read; none: there is nothing to do now
  std::optional<uint64_t> next_piece(std::vector<int64_t>& ids);
  void keep(uint64_t ticket, std::span<const int64_t> ids);
  bool overtaken(uint64_t ticket, const GroupKey& key);
  void end(uint64_t ticket);
  void release(uint32_t entry);
  void expire();

  const uint32_t width_;
  const uint32_t row_bytes_;
  const ReadGroups read_;
  const Holds holds_;
  GroupStore store_;
  std::vector<Held> held_;
  std::vector<uint32_t> free_;
  std::vector<Asked> asked_;  // direct-mapped
  std::vector<std::byte> piece_;
  size_t memory_bytes_;
  std::map<uint64_t, Ticket> tickets_;
  std::deque<uint64_t> queue_;  // tickets with ids left, oldest first
  uint64_t last_ticket_ = 0;
  bool stopping_ = false;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::thread thread_;
};

}  // namespace rowstream
