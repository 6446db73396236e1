#include "disk.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
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
// Bounce memory of a lane for spans of several rows. What an ordinary user may lock is 8 MiB.
constexpr size_t kBounceBytes = size_t{4} << 20;

// beside lookups the look-ahead keeps so few reads in the device's queue: 8 cost a 16-read round
// 5 % and keep half of the rate, 16 cost 23 % (2-core guest, virtio disk)
constexpr unsigned kBackgroundDepth = 8;
// a token every 20 ms or more often is decoding
constexpr int64_t kQuietAfterNs = 20'000'000;

// counts a gather while it waits or runs
class Present {
 public:
  Present(std::atomic<unsigned>& count, std::atomic<int64_t>& last) : count_(count), last_(last) {
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Present() {
    last_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    count_.fetch_sub(1, std::memory_order_relaxed);
  }
  Present(const Present&) = delete;
  Present& operator=(const Present&) = delete;

 private:
  std::atomic<unsigned>& count_;
  std::atomic<int64_t>& last_;
};

// the longest aligned span that one row can need
uint32_t row_span(uint32_t row_bytes, uint32_t align) {
  const uint32_t blocks = (row_bytes + align - 2) / align + 1;
  return blocks * align;
}

// One slot's part of the bounce memory, or 0 where that is less than a block. An odd number of
// blocks: at a power of two the slots would share the sets of the processor's caches.
uint32_t joined_span(unsigned depth, uint32_t align) {
  const auto blocks = static_cast<uint32_t>(kBounceBytes / depth / align);
  return blocks == 0 ? 0 : ((blocks - 1) | 1) * align;
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
      slot_bytes_ = std::max(slot_bytes_, row_span(plane.row_bytes(), file.alignment()));
    }
  }
  uint32_t largest = 512;
  for (const uint32_t align : alignments_) largest = std::max(largest, align);
  row_slot_bytes_ = slot_bytes_;
  slot_bytes_ = std::max(slot_bytes_, joined_span(options_.queue_depth, largest));
  if (!options_.faults.empty()) faults_ = std::make_shared<FaultSchedule>(options_.faults);
  if (source_.has_copies()) drives_ = std::make_unique<Drives>(source_.files);
  plan_ = std::make_unique<Plan>(source_.planes, kPieceRows, slot_bytes_);
  lane_ = make_lane(slot_bytes_, &reader_note_);
  reader_name_ = lane_->reader().name();
  memory_bytes_ = plan_->memory_bytes() + lane_->memory_bytes();
  if (options_.cache_bytes > 0 && options_.group_width > 0) {
    cache_ = std::make_unique<Cache>(options_.cache_bytes, options_.group_width, row_bytes());
    memory_bytes_ += cache_->memory_bytes();
  }
}

std::unique_ptr<Lane> DiskTable::make_lane(uint32_t slot_bytes, std::string* note) const {
  Pages bounce(Lane::bounce_bytes(options_.queue_depth, row_slot_bytes_, slot_bytes),
               "rowstream bounce");
  ReaderOptions reader;
  reader.name = options_.reader;
  reader.depth = options_.queue_depth;
  reader.bounce = {bounce.data(), bounce.size()};
  reader.files = registered_;
  const auto& files = source_.files;
  const bool on_tmpfs = std::all_of(files.begin(), files.end(),
                                    [](const TableFile& file) { return file.on_tmpfs(); });
  ReaderChoice choice = make_reader(reader, on_tmpfs);
  if (note != nullptr) *note = std::move(choice.note);
  if (faults_) {
    choice.reader =
        std::make_unique<FaultReader>(std::move(choice.reader), faults_, options_.queue_depth);
  }
  return std::make_unique<Lane>(std::move(choice.reader), std::move(bounce), options_.queue_depth,
                                row_slot_bytes_, slot_bytes, drives_.get());
}

DiskTable::~DiskTable() {
  if (forks_ == fork_generation()) {
    close();
    return;
  }
  // a forked child has neither the threads nor the bounce memory: nothing of it is its to end
  (void)lookahead_.release();
  (void)ahead_lane_.release();
  (void)lane_.release();
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
  const std::lock_guard lock(mutex_);
  lane_.reset();
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
  const std::lock_guard lock(mutex_);
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
  const uint32_t slot_bytes = lane->slot_bytes();
  {
    const std::lock_guard lock(parked_mutex_);
    parked_.push_back(std::move(lane));
  }
  lane = make_lane(slot_bytes);
  return *lane;
}

// how many are still there
size_t DiskTable::reap_parked() {
  const std::lock_guard lock(parked_mutex_);
  std::erase_if(parked_, [](const std::unique_ptr<Lane>& lane) { return lane->drained(); });
  return parked_.size();
}

void DiskTable::check_identities() {
  const Clock::time_point now = Clock::now();
  if (now < next_identity_check_) return;
  source_.check_unchanged();
  next_identity_check_ = now + kIdentityEvery;
}

void DiskTable::gather(const Batch& batch, std::byte* out, const Poll& poll) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const Present present(gathering_, last_gather_ns_);
  const std::lock_guard lock(mutex_);
  if (!lane_) throw ClosedError("table is closed");
  const Clock::time_point began = Clock::now();
  check_row_ids({batch.row_ids, batch.tokens * batch.heads}, num_rows());
  if (batch.heads > kPieceRows) throw std::invalid_argument("a token has more rows than a piece");
  check_identities();
  const size_t parked = reap_parked();
  if (parked >= kMaxParked) {
    throw ReadFailure(ETIMEDOUT, source_.files.front().path(), 0, 0, 0,
                      std::to_string(parked) + " earlier gathers still have reads waiting");
  }
  const std::unique_ptr<Plan> large = large_plan(batch.tokens * batch.heads);
  Plan& plan = large ? *large : *plan_;
  const size_t piece = plan.rows() / batch.heads;
  for (size_t token = 0; token < batch.tokens; token += piece) {
    Batch part = batch;
    part.row_ids += token * batch.heads;
    part.tokens = std::min(piece, batch.tokens - token);
    gather_piece(plan, part, out + token * batch.heads * row_bytes(), poll);
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
        source_.planes, static_cast<uint32_t>(std::min(rows, kLargePieceRows)), slot_bytes_);
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void DiskTable::gather_piece(Plan& plan, const Batch& batch, std::byte* out, const Poll& poll) {
  std::array<RowPool*, Plan::kMaxPools> pools{};
  if (kept(batch)) pools = {cache_.get(), ahead_pool_.load(std::memory_order_acquire)};
  const bool any = pools[0] != nullptr || pools[1] != nullptr;
  const Clock::time_point began = Clock::now();
  plan.build(batch, alignments_, any ? std::span<RowPool* const>(pools) : std::span<RowPool*>(),
             out);
  counters_.plan_ns += static_cast<uint64_t>((Clock::now() - began).count());
  if (plan.rows() > kPieceRows && poll()) throw Interrupted();  // that took a while
  Gather gather(source_, plan, alignments_, policy_, counters_, out);
  gather.run(*lane_, [this]() -> Lane& { return replace(lane_); }, poll);
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
    ahead_lane_ = make_lane(row_slot_bytes_);
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
      [this] { return background_limit(); });
}

// Priority in our own queue does nothing for reads that the device has already: beside a lookup,
// or between two of them, only a few may be there.
unsigned DiskTable::background_limit() const {
  const int64_t since = Clock::now().time_since_epoch().count() - kQuietAfterNs;
  const bool decoding = gathering_.load(std::memory_order_relaxed) > 0 ||
                        last_gather_ns_.load(std::memory_order_relaxed) > since;
  return decoding ? std::min(kBackgroundDepth, options_.queue_depth) : options_.queue_depth;
}

}  // namespace rowstream
