#include "lookahead.h"

#include <signal.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace rowstream {
namespace {

// a prompt whose request went away leaves nothing behind for longer
constexpr auto kKeepFor = std::chrono::seconds(10);
constexpr auto kSweepEvery = std::chrono::seconds(1);
// what gathers asked for in vain is remembered for as many groups as a chunk of 16K tokens has
constexpr size_t kAsked = 1 << 15;

}  // namespace

Lookahead::Lookahead(size_t budget_bytes, uint32_t width, uint32_t row_bytes, ReadGroups read,
                     Holds holds)
    : width_(width),
      row_bytes_(row_bytes),
      read_(std::move(read)),
      holds_(std::move(holds)),
      store_(GroupStore::groups_in(budget_bytes - budget_bytes / 32, width, row_bytes), width,
             row_bytes, "rowstream lookahead"),
      held_(store_.capacity()),
      asked_(kAsked),
      piece_(kPieceGroups * store_.rows_bytes()) {
  if (store_.capacity() < kPieceGroups) {
    throw std::invalid_argument("lookahead_bytes is " + std::to_string(budget_bytes) +
                                ", needs room for " + std::to_string(kPieceGroups) + " groups of " +
                                std::to_string(store_.rows_bytes()) + " bytes");
  }
  free_.reserve(store_.capacity());
  for (size_t entry = store_.capacity(); entry > 0; --entry) {
    free_.push_back(static_cast<uint32_t>(entry - 1));
  }
  memory_bytes_ = store_.memory_bytes() + held_.size() * sizeof(Held) +
                  free_.capacity() * sizeof(uint32_t) + asked_.size() * sizeof(Asked) +
                  piece_.size();
  // a signal must reach a thread that the interpreter knows
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Lookahead::~Lookahead() { stop(); }

void Lookahead::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

uint64_t Lookahead::add(std::span<const int64_t> ids) {
  const std::lock_guard lock(mutex_);
  const uint64_t number = ++last_ticket_;
  Ticket& ticket = tickets_[number];
  ticket.ids.assign(ids.begin(), ids.end());
  ticket.state.wanted = ids.size();
  ticket.state.over = ids.empty();
  if (!ids.empty()) queue_.push_back(number);
  work_.notify_one();
  return number;
}

TicketState Lookahead::state(uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  const auto found = tickets_.find(ticket);
  if (found != tickets_.end()) return found->second.state;
  return {0, 0, true};
}

void Lookahead::drop(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  end(ticket);
}

void Lookahead::end(uint64_t ticket) {
  if (tickets_.erase(ticket) == 0) return;
  std::erase(queue_, ticket);
  for (uint32_t entry = 0; entry < held_.size(); ++entry) {
    if (held_[entry].ticket == ticket) release(entry);
  }
}

bool Lookahead::take(const GroupKey& key, std::byte* out) {
  const std::lock_guard lock(mutex_);
  const uint32_t entry = store_.find(key);
  if (entry == GroupStore::kNone) {
    // a gather that has overtaken us reads this itself: by the time we did, nobody would want it
    asked_[key.hash & (kAsked - 1)] = {key.hash, last_ticket_};
    return false;
  }
  std::memcpy(out, store_.rows(entry), store_.rows_bytes());
  if (--held_[entry].uses == 0) release(entry);
  return true;
}

void Lookahead::release(uint32_t entry) {
  store_.remove(entry);
  held_[entry] = {};
  free_.push_back(entry);
  // a reader that waits for room is woken once there is enough of it to be worth a piece
  if (free_.size() == kPieceGroups) work_.notify_one();
}

// Rows that nobody took for so long: whoever asked for them is gone, and with it the ticket.
void Lookahead::expire() {
  const Clock::time_point now = Clock::now();
  for (uint32_t entry = 0; entry < held_.size(); ++entry) {
    if (held_[entry].ticket == 0 || held_[entry].until >= now) continue;
    end(held_[entry].ticket);
    if (held_[entry].ticket != 0) release(entry);  // of a ticket that ended before
  }
}

// Under the lock. Whether a gather has asked for the group since the ticket was made: it reads the
// group itself, and what we bring would lie here unwanted.
bool Lookahead::overtaken(uint64_t ticket, const GroupKey& key) {
  Asked& asked = asked_[key.hash & (kAsked - 1)];
  if (asked.hash != key.hash || asked.tickets < ticket) return false;
  asked = {};
  return true;
}

// Under the lock. Groups that need not be read are counted as arrived on the way.
std::optional<uint64_t> Lookahead::next_piece(std::vector<int64_t>& ids) {
  ids.clear();
  while (!queue_.empty()) {
    const uint64_t number = queue_.front();
    Ticket& ticket = tickets_.at(number);
    for (; ticket.next < ticket.ids.size() && ids.size() < kPieceGroups * width_;
         ticket.next += width_) {
      const GroupKey key({&ticket.ids[ticket.next], width_});
      const uint32_t entry = store_.find(key);
      if (entry != GroupStore::kNone) {
        held_[entry] = {number, held_[entry].uses + 1, Clock::now() + kKeepFor};
      } else if (!overtaken(number, key) && !holds_(key)) {
        if (free_.size() < kPieceGroups) return {};  // until gathers have taken some
        ids.insert(ids.end(), key.ids.begin(), key.ids.end());
        continue;
      }
      ticket.state.arrived += width_;
    }
    if (ticket.next == ticket.ids.size()) {
      queue_.pop_front();
      if (ids.empty()) ticket.state.over = true;
    }
    if (!ids.empty()) return number;
  }
  return {};
}

// Under the lock: puts the piece that was read into the pool.
void Lookahead::keep(uint64_t number, std::span<const int64_t> ids) {
  const auto ticket = tickets_.find(number);
  if (ticket == tickets_.end()) return;  // dropped meanwhile
  for (size_t at = 0; at < ids.size(); at += width_) {
    const GroupKey key(ids.subspan(at, width_));
    uint32_t entry = store_.find(key);
    if (entry == GroupStore::kNone) {
      if (overtaken(number, key)) continue;
      entry = free_.back();
      free_.pop_back();
      store_.fill(entry, key, piece_.data() + at * row_bytes_);
    }
    held_[entry] = {number, held_[entry].uses + 1, Clock::now() + kKeepFor};
  }
  ticket->second.state.arrived += ids.size();
  ticket->second.state.over = ticket->second.next == ticket->second.ids.size();
}

void Lookahead::run() {
  std::vector<int64_t> ids;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const std::optional<uint64_t> ticket = next_piece(ids);
    if (!ticket) {
      work_.wait_for(lock, kSweepEvery);
      expire();
      continue;
    }
    lock.unlock();
    const auto given_up = [this, number = *ticket] {
      const std::lock_guard inner(mutex_);
      return stopping_ || !tickets_.contains(number);
    };
    bool read = true;
    try {
      read_(ids, piece_.data(), given_up);
    } catch (const std::exception&) {
      // the lookup that needs these rows reads them itself, and reports what fails
      read = false;
    }
    lock.lock();
    if (read) {
      keep(*ticket, ids);
    } else if (const auto failed = tickets_.find(*ticket); failed != tickets_.end()) {
      std::erase(queue_, *ticket);
      failed->second.state.over = true;
    }
  }
}

}  // namespace rowstream
