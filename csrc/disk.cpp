#include "disk.h"

#include <algorithm>
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
constexpr auto kIdentityEvery = std::chrono::seconds(1);
// lanes whose reads never ended; with so many the device is gone
constexpr size_t kMaxParked = 4;

// the longest aligned span that one row can need
uint32_t row_span(uint32_t row_bytes, uint32_t align) {
  const uint32_t blocks = (row_bytes + align - 2) / align + 1;
  return blocks * align;
}

const DiskTable::Options& checked(const DiskTable::Options& options) {
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("queue_depth is " + std::to_string(options.queue_depth) +
                                ", needs to be in [1, 4096]");
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
      source_(paths, std::move(planes), options_.direct) {
  for (const TableFile& file : source_.files) {
    registered_.push_back(file.fd());
    alignments_.push_back(file.alignment());
    for (const Plane& plane : source_.planes) {
      slot_bytes_ = std::max(slot_bytes_, row_span(plane.row_bytes(), file.alignment()));
    }
  }
  if (!options_.faults.empty()) faults_ = std::make_shared<FaultSchedule>(options_.faults);
  plan_ = std::make_unique<Plan>(source_.planes, kPieceRows, slot_bytes_);
  lane_ = make_lane();
  memory_bytes_ = plan_->memory_bytes() + lane_->memory_bytes();
}

std::unique_ptr<Lane> DiskTable::make_lane() {
  Pages bounce(size_t{options_.queue_depth} * slot_bytes_, "rowstream bounce");
  ReaderOptions reader;
  reader.name = options_.reader;
  reader.depth = options_.queue_depth;
  reader.bounce = {bounce.data(), bounce.size()};
  reader.files = registered_;
  const auto& files = source_.files;
  const bool on_tmpfs = std::any_of(files.begin(), files.end(),
                                    [](const TableFile& file) { return file.on_tmpfs(); });
  ReaderChoice choice = make_reader(reader, on_tmpfs);
  reader_name_ = choice.reader->name();
  reader_note_ = std::move(choice.note);
  if (faults_) {
    choice.reader =
        std::make_unique<FaultReader>(std::move(choice.reader), faults_, options_.queue_depth);
  }
  return std::make_unique<Lane>(std::move(choice.reader), std::move(bounce), options_.queue_depth,
                                slot_bytes_);
}

DiskTable::~DiskTable() {
  if (forks_ == fork_generation()) {
    close();
    return;
  }
  // a forked child has neither the threads nor the bounce memory: nothing of it
  // is its to end
  (void)lane_.release();
  for (auto& lane : parked_) (void)lane.release();
}

void DiskTable::close() {
  if (forks_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  lane_.reset();
  const Clock::time_point until = Clock::now() + policy_.timeout;
  for (reap_parked(); !parked_.empty() && Clock::now() < until; reap_parked()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // memory that reads in flight still write to is the kernel's for good: leaked
  // on purpose
  for (auto& lane : parked_) (void)lane.release();
  parked_.clear();
  for (TableFile& file : source_.files) file.close();
}

std::vector<FileState> DiskTable::files() const {
  const std::lock_guard lock(mutex_);
  return source_.states();
}

// The reads in flight do not end: their slots and their reader are left to
// them.
Lane& DiskTable::replace_lane() {
  parked_.push_back(std::move(lane_));
  lane_ = make_lane();
  return *lane_;
}

void DiskTable::reap_parked() {
  std::erase_if(parked_, [](const std::unique_ptr<Lane>& lane) { return lane->drained(); });
}

void DiskTable::check_identities() {
  const Clock::time_point now = Clock::now();
  if (now < next_identity_check_) return;
  source_.check_unchanged();
  next_identity_check_ = now + kIdentityEvery;
}

void DiskTable::gather(const Batch& batch, std::byte* out, Poll poll) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::lock_guard lock(mutex_);
  if (!lane_) throw ClosedError("table is closed");
  const Clock::time_point began = Clock::now();
  check_row_ids({batch.row_ids, batch.tokens * batch.heads}, num_rows());
  if (batch.heads > kPieceRows) throw std::invalid_argument("a token has more rows than a piece");
  check_identities();
  if (!parked_.empty()) reap_parked();
  if (parked_.size() >= kMaxParked) {
    throw ReadFailure(ETIMEDOUT, source_.files.front().path(), 0, 0, 0,
                      std::to_string(parked_.size()) + " earlier gathers still have reads waiting");
  }
  const size_t piece = kPieceRows / batch.heads;
  for (size_t token = 0; token < batch.tokens; token += piece) {
    Batch part = batch;
    part.row_ids += token * batch.heads;
    part.tokens = std::min(piece, batch.tokens - token);
    plan_->build(part, alignments_);
    Gather gather(source_, *plan_, alignments_, policy_, counters_,
                  out + token * batch.heads * row_bytes());
    gather.run(*lane_, [this]() -> Lane& { return replace_lane(); }, poll);
  }
  counters_.gathers += 1;
  counters_.rows += batch.tokens * batch.heads;
  counters_.gather_ns += static_cast<uint64_t>((Clock::now() - began).count());
}

}  // namespace rowstream
