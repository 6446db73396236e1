#include "gather.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "failure.h"
#include "fork.h"

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;

// rows planned and read at a time: an 8K-token chunk of 16 heads. Scratch is sized for it.
constexpr uint32_t kPieceRows = 131'072;
constexpr auto kPollEvery = std::chrono::milliseconds(50);
// EINTR and EAGAIN are the kernel's "not now"; so many in a row are a failure
constexpr unsigned kMaxAttempts = 1000;
// short reads in a row that brought nothing new: a direct read cannot start where one ended
constexpr unsigned kMaxShort = 8;

// the longest aligned span that one row can need
uint32_t row_span(uint32_t row_bytes, uint32_t align) {
  const uint32_t blocks = (row_bytes + align - 2) / align + 1;
  return blocks * align;
}

}  // namespace

uint32_t total_row_bytes(const std::vector<Plane>& planes) {
  uint32_t bytes = 0;
  for (const Plane& plane : planes) bytes += plane.row_bytes();
  return bytes;
}

std::vector<Plane> make_planes(std::vector<PlaneSpec> specs) {
  std::vector<Plane> planes;
  for (PlaneSpec& spec : specs) planes.emplace_back(spec.row_bytes, std::move(spec.extents));
  if (planes.empty()) throw std::invalid_argument("a table has no planes");
  for (const Plane& plane : planes) {
    if (plane.num_rows() != planes.front().num_rows()) {
      throw std::invalid_argument("planes differ in rows: " + std::to_string(plane.num_rows()) +
                                  " and " + std::to_string(planes.front().num_rows()));
    }
  }
  return planes;
}

void check_extents(const std::vector<Plane>& planes, const std::vector<TableFile>& files) {
  for (const Plane& plane : planes) {
    for (const Extent& extent : plane.extents()) {
      if (extent.file >= files.size()) {
        throw std::invalid_argument("extent names file " + std::to_string(extent.file) +
                                    ", table has " + std::to_string(files.size()));
      }
      const TableFile& file = files[extent.file];
      const uint64_t end =
          extent.offset + static_cast<uint64_t>(extent.num_rows) * plane.row_bytes();
      if (end > static_cast<uint64_t>(file.identity().size)) {
        throw std::invalid_argument(file.path() + ": rows need " + std::to_string(end) +
                                    " bytes, file has " + std::to_string(file.identity().size));
      }
    }
  }
}

DiskTable::DiskTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
                     const Options& options)
    : planes_(make_planes(std::move(planes))),
      row_bytes_(total_row_bytes(planes_)),
      depth_(options.queue_depth),
      forks_(fork_generation()) {
  if (depth_ < 1 || depth_ > 4096) {
    throw std::invalid_argument("queue_depth is " + std::to_string(depth_) +
                                ", needs to be in [1, 4096]");
  }
  if (paths.size() >= (1u << 16)) throw std::invalid_argument("more than 65535 files");
  files_.reserve(paths.size());
  for (const std::string& path : paths) files_.emplace_back(path, options.direct);
  check_extents(planes_, files_);

  uint32_t start = 0;
  for (const Plane& plane : planes_) {
    plane_starts_.push_back(start);
    start += plane.row_bytes();
  }
  ReaderOptions reader;
  bool on_tmpfs = false;
  for (const TableFile& file : files_) {
    alignments_.push_back(file.alignment());
    registered_.push_back(file.fd());
    on_tmpfs = on_tmpfs || file.on_tmpfs();
    for (const Plane& plane : planes_) {
      slot_bytes_ = std::max(slot_bytes_, row_span(plane.row_bytes(), file.alignment()));
    }
  }
  bounce_ = Pages(size_t{depth_} * slot_bytes_, "rowstream bounce");
  plan_ = std::make_unique<Plan>(planes_, kPieceRows, slot_bytes_);

  reader.name = options.reader;
  reader.files = registered_;
  reader.depth = depth_;
  reader.bounce = {bounce_.data(), bounce_.size()};
  ReaderChoice choice = make_reader(reader, on_tmpfs);
  reader_ = std::move(choice.reader);
  if (!options.faults.empty()) {
    reader_ = std::make_unique<FaultReader>(std::move(reader_), options.faults, depth_);
  }
  reader_name_ = reader_->name();
  reader_note_ = std::move(choice.note);

  slots_.resize(depth_);
  done_.resize(depth_);
  free_.reserve(depth_);
  for (unsigned slot = depth_; slot > 0; --slot) free_.push_back(slot - 1);
  memory_bytes_ = bounce_.size() + plan_->memory_bytes() + reader_->memory_bytes() +
                  slots_.size() * sizeof(Slot) + done_.size() * sizeof(Completion);
}

DiskTable::~DiskTable() {
  // a forked child has neither the threads nor the bounce memory: nothing here is its to end
  if (forks_ != fork_generation()) {
    (void)reader_.release();
  }
}

void DiskTable::close() {
  if (forks_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  reader_.reset();
  files_.clear();
}

void DiskTable::gather(const Batch& batch, std::byte* out, Poll poll) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::lock_guard lock(mutex_);
  if (!reader_) throw ClosedError("table is closed");
  const Clock::time_point began = Clock::now();
  check_row_ids({batch.row_ids, batch.tokens * batch.heads}, num_rows());
  if (batch.heads > kPieceRows) throw std::invalid_argument("a token has more rows than a piece");
  const size_t piece = kPieceRows / batch.heads;
  for (size_t token = 0; token < batch.tokens; token += piece) {
    Batch part = batch;
    part.row_ids += token * batch.heads;
    part.tokens = std::min(piece, batch.tokens - token);
    gather_piece(part, out + token * batch.heads * row_bytes_, poll);
  }
  counters_.gathers += 1;
  counters_.rows += batch.tokens * batch.heads;
  counters_.gather_ns += static_cast<uint64_t>((Clock::now() - began).count());
}

void DiskTable::gather_piece(const Batch& batch, std::byte* out, Poll poll) {
  plan_->build(batch, alignments_);
  for (const uint32_t row : plan_->missing()) {
    std::memset(out + size_t{row} * row_bytes_, 0, row_bytes_);
  }
  // A read that failed ends the gather, but only after the kernel has let go of every slot:
  // what is in flight still writes to the bounce memory.
  std::exception_ptr failure;
  bool more = true;
  Clock::time_point next_poll = Clock::now() + kPollEvery;
  while (more || free_.size() < depth_) {
    while (more && !failure && !free_.empty()) {
      Slot slot;
      more = plan_->next(slot.span);
      if (!more) break;
      const uint32_t number = free_.back();
      free_.pop_back();
      slots_[number] = slot;
      push(number);
    }
    if (failure) more = false;
    const unsigned in_flight = depth_ - static_cast<unsigned>(free_.size());
    if (in_flight == 0) break;
    // In bulk a quarter of the queue per system call. At the end there is nothing to submit in
    // between: the last few are waited for at once, or each would cost a wake-up of its own.
    const unsigned at_least = more ? std::max(1u, depth_ / 4) : std::max(in_flight / 2, 32u);
    const size_t count = wait(std::min(at_least, in_flight));
    for (const Completion& completion : std::span(done_).first(count)) {
      try {
        if (!failure && !complete(completion)) continue;
        if (!failure) copy_rows(slots_[completion.slot], bounce_of(completion.slot), out);
      } catch (...) {
        failure = std::current_exception();
      }
      free_.push_back(completion.slot);
    }
    if (Clock::now() >= next_poll && !failure) {
      if (poll()) failure = std::make_exception_ptr(Interrupted());
      next_poll = Clock::now() + kPollEvery;
    }
  }
  if (failure) std::rethrow_exception(failure);
  for (const Copy& copy : plan_->copies()) {
    std::memcpy(out + size_t{copy.to_row} * row_bytes_, out + size_t{copy.from_row} * row_bytes_,
                size_t{copy.rows} * row_bytes_);
  }
  counters_.duplicate_rows += plan_->duplicate_rows();
  counters_.missing_rows += plan_->missing().size();
}

size_t DiskTable::wait(unsigned at_least) {
  try {
    return reader_->wait(at_least, done_);
  } catch (...) {
    abandon();
    throw;
  }
}

// The reader itself is broken, with reads in flight: they belong to the kernel for good, and so
// does the memory they write to. Leaked on purpose.
void DiskTable::abandon() {
  (void)reader_.release();
  (void)new Pages(std::move(bounce_));
}

void DiskTable::push(uint32_t number) {
  Slot& slot = slots_[number];
  const TableFile& file = files_[slot.span.file];
  slot.direct = file.direct();
  // what arrived is kept, but the rest must start on a block again
  const uint32_t skip = slot.got / alignments_[slot.span.file] * alignments_[slot.span.file];
  reader_->push({slot.span.offset + skip, bounce_of(number) + skip, slot.span.length - skip, number,
                 slot.span.file, file.fd(), file.fd() == registered_[slot.span.file]});
  counters_.reads += 1;
  counters_.read_bytes += slot.span.length - skip;
}

bool DiskTable::complete(const Completion& completion) {
  Slot& slot = slots_[completion.slot];
  TableFile& file = files_[slot.span.file];
  const auto fail = [&](int code) {
    throw ReadFailure(code, file.path(), slot.span.offset, slot.span.needed, slot.got);
  };
  if (completion.result >= 0) {
    const uint32_t align = alignments_[slot.span.file];
    const uint32_t got = slot.got / align * align + static_cast<uint32_t>(completion.result);
    if (got > slot.got) slot.attempts = 0;
    slot.got = std::max(slot.got, got);
    // the last block of a file may be shorter than asked for: what the rows need is there
    if (slot.got >= slot.span.needed) return true;
    // nothing, or time and again no more than before, is the end of the file
    if (completion.result == 0 || slot.attempts >= kMaxShort) fail(0);
  } else if (completion.result == -EINVAL || completion.result == -EOPNOTSUPP) {
    if (!slot.direct) fail(-completion.result);
    if (file.direct()) {
      file.read_buffered(std::string("a direct read was refused: ") +
                         std::strerror(-completion.result));
    }
  } else if (completion.result != -EINTR && completion.result != -EAGAIN) {
    fail(-completion.result);
  } else if (slot.attempts >= kMaxAttempts) {
    fail(-completion.result);
  }
  ++slot.attempts;
  counters_.retries += 1;
  push(completion.slot);
  return false;
}

void DiskTable::copy_rows(const Slot& slot, const std::byte* from, std::byte* out) const {
  for (const Item& item : slot.span.items) {
    std::memcpy(out + size_t{item.row} * row_bytes_ + plane_starts_[item.plane],
                from + (item.offset() - slot.span.offset), planes_[item.plane].row_bytes());
  }
}

}  // namespace rowstream
