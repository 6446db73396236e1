#include "disk.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "failure.h"
#include "fork.h"

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;

// rows planned and read at a time: an 8K-token chunk of 16 heads. Scratch is
// sized for it.
constexpr uint32_t kPieceRows = 131'072;
// A larger gather has a plan of its own for as long as it takes, of so many rows at most: the
// denser the rows, the fewer the reads.
constexpr size_t kLargePieceRows = Plan::kMaxRows;
constexpr auto kIdentityEvery = std::chrono::seconds(1);
// lanes whose reads never ended; with so many the device is gone
constexpr size_t kMaxParked = 4;
constexpr uint32_t kMaxBlock = 65'536;
// Bounce memory of the two lanes for spans of several rows. What an ordinary user may lock is 8
// MiB.
constexpr size_t kLongBounceBytes = size_t{4} << 20;
constexpr size_t kShortBounceBytes = size_t{1} << 20;
constexpr unsigned kShortDepth = 16;  // at least: the rows of a token

// the longest aligned span that one row can need
uint32_t row_span(uint32_t row_bytes, uint32_t align) {
  const uint32_t blocks = (row_bytes + align - 2) / align + 1;
  return blocks * align;
}

// One slot's part of the bounce memory, or 0 where that is less than a block. An odd number of
// blocks: at a power of two the slots would share the sets of the processor's caches.
uint32_t joined_span(size_t bounce_bytes, unsigned depth, uint32_t align) {
  const auto blocks = static_cast<uint32_t>(bounce_bytes / depth / align);
  return blocks == 0 ? 0 : ((blocks - 1) | 1) * align;
}

// without the padding at the end: tokens that have no row
size_t tokens_wanted(const Batch& batch) {
  size_t rows = batch.tokens * batch.heads;
  while (rows > 0 && batch.row_ids[rows - 1] == -1) --rows;
  return (rows + batch.heads - 1) / batch.heads;
}

const DiskTable::Options& checked(const DiskTable::Options& options) {
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("queue_depth is " + std::to_string(options.queue_depth) +
                                ", needs to be in [1, 4096]");
  }
  if (options.block != 0 && (!std::has_single_bit(options.block) || options.block > kMaxBlock)) {
    throw std::invalid_argument("block is " + std::to_string(options.block) +
                                ", needs to be 0 or a power of two up to " +
                                std::to_string(kMaxBlock));
  }
  if (!(options.read_timeout_s > 0 && options.read_timeout_s <= 86'400)) {
    throw std::invalid_argument("read_timeout_s is " + std::to_string(options.read_timeout_s) +
                                ", needs to be in (0, 86400]");
  }
  return options;
}

}  // namespace

DiskTable::DiskTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
                     Options options)
    : options_(checked(options)),
      policy_{std::chrono::duration_cast<std::chrono::nanoseconds>(
                  std::chrono::duration<double>(options_.read_timeout_s)),
              options_.on_read_error},
      forks_(fork_generation()),
      source_(paths, std::move(planes), options_.direct, options_.block) {
  for (const TableFile& file : source_.files) {
    registered_.push_back(file.fd());
    alignments_.push_back(file.alignment());
    for (const Plane& plane : source_.planes) {
      row_slot_bytes_ = std::max(row_slot_bytes_, row_span(plane.row_bytes(), file.alignment()));
    }
  }
  uint32_t largest = 512;
  for (const uint32_t align : alignments_) largest = std::max(largest, align);
  if (!options_.faults.empty()) faults_ = std::make_shared<FaultSchedule>(options_.faults);
  if (source_.has_copies()) drives_ = std::make_unique<Drives>(source_.files);
  const unsigned depth = options_.queue_depth;
  // of very long rows fewer, which are as much
  const auto few = static_cast<unsigned>(kShortBounceBytes / row_slot_bytes_);
  const unsigned short_depth = std::min(depth, std::max(few, kShortDepth));
  make(short_, Traffic::kShortRows, short_depth,
       joined_span(kShortBounceBytes, short_depth, largest));
  make(long_, kPieceRows, depth, joined_span(kLongBounceBytes, depth, largest));
  reader_name_ = long_.lane->reader().name();
  if (options_.cache_bytes > 0 && options_.group_width > 0) {
    cache_ = std::make_unique<Cache>(options_.cache_bytes, options_.group_width, row_bytes());
    memory_bytes_ += cache_->memory_bytes();
  }
}

void DiskTable::make(Track& track, uint32_t rows, unsigned depth, uint32_t joined_bytes) {
  track.depth = depth;
  track.slot_bytes = std::max(row_slot_bytes_, joined_bytes);
  track.plan = std::make_unique<Plan>(source_.planes, rows, track.slot_bytes);
  track.lane = make_lane(depth, track.slot_bytes, &reader_note_);
  memory_bytes_ += track.plan->memory_bytes() + track.lane->memory_bytes();
}

std::unique_ptr<Lane> DiskTable::make_lane(unsigned depth, uint32_t slot_bytes,
                                           std::string* note) const {
  Pages bounce(Lane::bounce_bytes(depth, row_slot_bytes_, slot_bytes), "rowstream bounce");
  ReaderOptions reader;
  reader.name = options_.reader;
  reader.depth = depth;
  reader.bounce = {bounce.data(), bounce.size()};
  reader.files = registered_;
  const auto& files = source_.files;
  const bool on_tmpfs = std::all_of(files.begin(), files.end(),
                                    [](const TableFile& file) { return file.on_tmpfs(); });
  ReaderChoice choice = make_reader(reader, on_tmpfs);
  if (note != nullptr) *note = std::move(choice.note);
  if (faults_) {
    choice.reader = std::make_unique<FaultReader>(std::move(choice.reader), faults_, depth);
  }
  return std::make_unique<Lane>(std::move(choice.reader), std::move(bounce), depth, row_slot_bytes_,
                                slot_bytes, drives_.get());
}

DiskTable::~DiskTable() {
  if (forks_ == fork_generation()) {
    close();
    return;
  }
  // a forked child has neither the threads nor the bounce memory: nothing of it is its to end
  (void)lookahead_.release();
  (void)ahead_lane_.release();
  for (Track* track : {&short_, &long_}) (void)track->lane.release();
  for (auto& lane : parked_) (void)lane.release();
}

void DiskTable::close() {
  if (forks_ != fork_generation()) return;
  {
    const std::lock_guard lock(lookahead_mutex_);
    closed_ = true;
    // its thread ends here; the pool itself may still be asked by a gather that runs
    if (lookahead_) lookahead_->stop();
  }
  // no others take both; one after the other, or gathers that come and go would keep us out
  const std::lock_guard lock_of_long(long_.mutex);
  const std::lock_guard lock_of_short(short_.mutex);
  for (Track* track : {&short_, &long_}) track->lane.reset();
  ahead_lane_.reset();
  const Clock::time_point until = Clock::now() + policy_.timeout;
  while (reap_parked() > 0 && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // memory that reads in flight still write to is the kernel's for good: leaked on purpose
  const std::lock_guard parked(parked_mutex_);
  for (auto& lane : parked_) (void)lane.release();
  parked_.clear();
  for (TableFile& file : source_.files) file.close();
}

std::vector<FileState> DiskTable::files() const {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::lock_guard lock(short_.mutex);
  return source_.states();
}

size_t DiskTable::memory_bytes() const {
  const std::lock_guard lock(lookahead_mutex_);
  if (!lookahead_) return memory_bytes_;
  return memory_bytes_ + lookahead_->memory_bytes() + ahead_plan_->memory_bytes() +
         ahead_lane_bytes_;
}

// The reads in flight do not end: their slots and their reader are left to them.
Lane& DiskTable::replace(std::unique_ptr<Lane>& lane) {
  const unsigned depth = lane->depth();
  const uint32_t slot_bytes = lane->slot_bytes();
  {
    const std::lock_guard lock(parked_mutex_);
    parked_.push_back(std::move(lane));
  }
  lane = make_lane(depth, slot_bytes);
  return *lane;
}

// how many are still there
size_t DiskTable::reap_parked() {
  const std::lock_guard lock(parked_mutex_);
  std::erase_if(parked_, [](const std::unique_ptr<Lane>& lane) { return lane->drained(); });
  return parked_.size();
}

void DiskTable::check_identities(Track& track) {
  const Clock::time_point now = Clock::now();
  if (now < track.next_identity_check) return;
  source_.check_unchanged();
  track.next_identity_check = now + kIdentityEvery;
}

void DiskTable::gather(const Batch& batch, std::byte* out, const Poll& poll) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const size_t wanted = tokens_wanted(batch);
  const bool is_short = wanted * batch.heads <= Traffic::kShortRows;
  const Traffic::Present present(traffic_, is_short);
  Track& track = is_short ? short_ : long_;
  if (closed_) throw ClosedError("table is closed");
  const std::lock_guard lock(track.mutex);
  if (closed_) throw ClosedError("table is closed");
  // none where there was no memory for another one
  if (!track.lane) track.lane = make_lane(track.depth, track.slot_bytes);
  const Clock::time_point began = Clock::now();
  check_row_ids({batch.row_ids, batch.tokens * batch.heads}, num_rows());
  if (batch.heads > kPieceRows) throw std::invalid_argument("a token has more rows than a piece");
  check_identities(track);
  const size_t parked = reap_parked();
  if (parked >= kMaxParked) {
    throw ReadFailure(ETIMEDOUT, source_.files.front().path(), 0, 0, 0,
                      std::to_string(parked) + " earlier gathers still have reads waiting");
  }
  const std::unique_ptr<Plan> large = large_plan(wanted * batch.heads);
  Plan& plan = large ? *large : *track.plan;
  const size_t piece = plan.rows() / batch.heads;
  for (size_t token = 0; token < wanted; token += piece) {
    Batch part = batch;
    part.row_ids += token * batch.heads;
    part.tokens = std::min(piece, wanted - token);
    gather_piece(track, plan, part, out + token * batch.heads * row_bytes(), poll);
  }
  const size_t padding = (batch.tokens - wanted) * batch.heads;
  if (padding > 0) {
    std::memset(out + wanted * batch.heads * row_bytes(), 0, padding * row_bytes());
    counters_.missing_rows += padding;
  }
  counters_.gathers += 1;
  counters_.rows += batch.tokens * batch.heads;
  counters_.gather_ns += static_cast<uint64_t>((Clock::now() - began).count());
}

// None where the scratch will do, or where there is no memory for more.
std::unique_ptr<Plan> DiskTable::large_plan(size_t rows) const {
  if (rows <= kPieceRows) return nullptr;
  try {
    return std::make_unique<Plan>(
        source_.planes, static_cast<uint32_t>(std::min(rows, kLargePieceRows)), long_.slot_bytes);
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void DiskTable::gather_piece(Track& track, Plan& plan, const Batch& batch, std::byte* out,
                             const Poll& poll) {
  std::array<RowPool*, Plan::kMaxPools> pools{};
  if (kept(batch)) pools = {cache_.get(), ahead_pool_.load(std::memory_order_acquire)};
  const bool any = pools[0] != nullptr || pools[1] != nullptr;
  const Clock::time_point began = Clock::now();
  plan.build(batch, alignments_, any ? std::span<RowPool* const>(pools) : std::span<RowPool*>(),
             out);
  counters_.plan_ns += static_cast<uint64_t>((Clock::now() - began).count());
  if (plan.rows() > kPieceRows && poll()) throw Interrupted();  // that took a while
  Gather gather(source_, plan, alignments_, policy_, counters_, out);
  Limit limit;
  if (&track == &long_) {
    limit = [this, began] { return traffic_.limit_of_long(options_.queue_depth, began); };
  }
  gather.run(*track.lane, [&]() -> Lane& { return replace(track.lane); }, poll, limit);
  counters_.cached_rows += plan.pooled_rows(0);
  counters_.ahead_rows += plan.pooled_rows(1);
  if (!cache_ || gather.lost_rows()) return;
  for (const uint32_t row : plan.fresh()) {
    cache_->put(GroupKey(plan.ids(row, options_.group_width)), out + size_t{row} * row_bytes());
  }
}

// whether rows of such a batch are looked for in memory
bool DiskTable::kept(const Batch& batch) const {
  return options_.group_width > 0 &&
         std::all_of(batch.groups.begin(), batch.groups.end(),
                     [this](uint32_t width) { return width == options_.group_width; });
}

uint64_t DiskTable::prefetch(std::span<const int64_t> ids) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  check_row_ids(ids, num_rows());
  const std::lock_guard lock(lookahead_mutex_);
  if (closed_) throw ClosedError("table is closed");
  if (options_.lookahead_bytes == 0 || options_.group_width == 0) return 0;
  if (ids.size() % options_.group_width != 0) {
    throw std::invalid_argument("ids to prefetch are not whole groups of " +
                                std::to_string(options_.group_width));
  }
  if (!lookahead_) {
    ahead_plan_ = std::make_unique<Plan>(
        source_.planes, Lookahead::kPieceGroups * options_.group_width, row_slot_bytes_);
    ahead_lane_ = make_lane(short_.depth, row_slot_bytes_);
    ahead_lane_bytes_ = ahead_lane_->memory_bytes();
    const auto read = [this](std::span<const int64_t> groups, std::byte* out, const Poll& stop) {
      read_ahead(groups, out, stop);
    };
    const auto holds = [this](const GroupKey& key) { return cache_ && cache_->holds(key); };
    lookahead_ = std::make_unique<Lookahead>(options_.lookahead_bytes, options_.group_width,
                                             row_bytes(), read, holds);
    ahead_pool_.store(lookahead_.get(), std::memory_order_release);
  }
  return lookahead_->add(ids);
}

TicketState DiskTable::ticket(uint64_t number) const {
  const std::lock_guard lock(lookahead_mutex_);
  return lookahead_ ? lookahead_->state(number) : TicketState{0, 0, true};
}

void DiskTable::drop(uint64_t number) {
  if (forks_ != fork_generation()) return;
  const std::lock_guard lock(lookahead_mutex_);
  if (lookahead_) lookahead_->drop(number);
}

// On the look-ahead's thread. A read that fails here is no error: the lookup will try it itself.
void DiskTable::read_ahead(std::span<const int64_t> ids, std::byte* out, const Poll& stop) {
  const std::array<uint32_t, 1> groups{options_.group_width};
  const Batch batch{ids.data(), ids.size() / options_.group_width, groups, options_.group_width};
  ahead_plan_->build(batch, alignments_, {}, out);
  Gather gather(source_, *ahead_plan_, alignments_, {policy_.timeout, OnReadError::kRaise},
                lookahead_counters_, out);
  gather.run(
      *ahead_lane_, [this]() -> Lane& { return replace(ahead_lane_); }, stop,
      [this] { return traffic_.limit_of_lookahead(options_.queue_depth); });
}

}  // namespace rowstream
