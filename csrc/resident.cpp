#include "resident.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "clock.h"
#include "failure.h"
#include "fork.h"
#include "resident_set.h"
#include "sigbus.h"

namespace rowstream {
namespace {

constexpr size_t kPollRows = 65'536;
// rows asked for ahead of their copy: many times what a device works on at once
constexpr size_t kAdviseRows = 8'192;
// Copied between two looks at what that did to the page tables, and to the reads of this thread.
constexpr size_t kStepRows = Trimmer::kMaxRows;
constexpr int64_t kIdentityEveryNs = 1'000'000'000;

bool same(const FileIdentity& one, const FileIdentity& other) {
  return one.device == other.device && one.inode == other.inode && one.size == other.size &&
         one.mtime_ns == other.mtime_ns;
}

}  // namespace

// One step of a gather. Copying may end at any byte of it, without unwinding.
struct ResidentTable::Copy {
  const ResidentTable& table;
  const int64_t* row_ids;
  std::byte* out;
  size_t rows;
  volatile size_t at = 0;
  volatile uint64_t missing = 0;
  // what is being read
  const std::byte* volatile from = nullptr;
  volatile uint32_t bytes = 0;
};

ResidentTable::ResidentTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
                             Kind kind, const Poll& poll, Options options,
                             const Loader::Progress& progress)
    : kind_(kind),
      options_(options),
      forks_(fork_generation()),
      source_(paths, planes, /*direct=*/false) {
  if (kind_ == Kind::kLoaded) {
    Loader loader(paths, std::move(planes), {});
    load(loader, poll, progress);
    return;
  }
  mappings_.reserve(source_.files.size());
  for (const TableFile& file : source_.files) {
    ranges_.push_back(mappings_.emplace_back(file).range());
  }
  catch_sigbus();
  advice_ = std::make_unique<Advice>();
  if (options_.budget_bytes > 0) {
    trimmer_ = std::make_unique<Trimmer>(ranges_, options_.budget_bytes);
  }
}

ResidentTable::~ResidentTable() {
  // a forked child has no such thread to end
  if (forks_ != fork_generation()) (void)trimmer_.release();
}

void ResidentTable::load(Loader& loader, const Poll& poll, const Loader::Progress& progress) {
  uint64_t total = 0;
  for (const Plane& plane : source_.planes) {
    total += static_cast<uint64_t>(plane.num_rows()) * plane.row_bytes();
  }
  uint64_t before = 0;
  const auto told = [&](uint64_t done, uint64_t) {
    if (progress) progress(before + done, total);
  };
  for (size_t plane = 0; plane < source_.planes.size(); ++plane) {
    const size_t bytes = static_cast<size_t>(num_rows()) * source_.planes[plane].row_bytes();
    const auto pages = std::make_shared<Pages>(Pages::huge(bytes, "rowstream table"));
    try {
      loader.load(plane, 0, num_rows(), pages->data(), poll, told);
    } catch (...) {
      // reads that did not end may still write to it
      if (loader.stuck()) (void)new std::shared_ptr<Pages>(pages);
      throw;
    }
    memory_bytes_ += pages->size();
    before += bytes;
    loaded_.push_back(pages);
  }
  // the loader opened the files by their names once more
  source_.check_unchanged();
  const std::vector<FileState> read = loader.files();
  for (size_t file = 0; file < read.size(); ++file) {
    if (!same(read[file].identity, source_.files[file].identity())) {
      throw ReadFailure(ESTALE, read[file].path, 0, 0, 0, "file changed since it was opened");
    }
  }
}

std::shared_ptr<const Pages> ResidentTable::memory() const {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::shared_lock lock(mutex_);
  if (closed_) throw ClosedError("table is closed");
  if (loaded_.size() != 1) {
    throw std::invalid_argument(kind_ == Kind::kMapped
                                    ? "a mapped table is not in one piece of memory"
                                    : "a table of several planes is not in one piece of memory");
  }
  return loaded_.front();
}

std::vector<FileState> ResidentTable::files() const {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::shared_lock lock(mutex_);
  return source_.states();
}

// Loaded bytes are ours; a mapping shows whatever is written to the file.
void ResidentTable::check_identities() {
  if (kind_ == Kind::kLoaded) return;
  const int64_t now = now_ns();
  if (now < next_identity_check_ns_.load(std::memory_order_relaxed)) return;
  source_.check_unchanged();
  catch_sigbus();
  next_identity_check_ns_.store(now + kIdentityEveryNs, std::memory_order_relaxed);
}

const std::byte* ResidentTable::address(size_t plane, int64_t row) const {
  if (kind_ == Kind::kLoaded) {
    return loaded_[plane]->data() + static_cast<size_t>(row) * source_.planes[plane].row_bytes();
  }
  const Location at = source_.planes[plane].locate(row);
  return mappings_[at.file].data() + at.offset;
}

ResidentTable::MappedPages ResidentTable::mapped_pages() const {
  const std::shared_lock lock(mutex_);
  MappedPages pages{};
  if (!advice_) return pages;
  for (const AddressRange& range : ranges_) pages.mapped_bytes += range.size;
  if (!ranges_.empty()) pages.resident_bytes = resident_bytes(ranges_);
  pages.faults = faults_;
  pages.advise_failures = advice_->failures() + (trimmer_ ? trimmer_->failures() : 0);
  pages.drops = trimmer_ ? trimmer_->drops() : 0;
  return pages;
}

void ResidentTable::advise(const Batch& batch, size_t from, size_t to) {
  Advice::Batch wanted(*advice_);
  for (size_t i = from; i < to; ++i) {
    const int64_t row = batch.row_ids[i];
    if (row < 0 || row >= num_rows()) continue;
    for (size_t plane = 0; plane < source_.planes.size(); ++plane) {
      wanted.add(address(plane, row), source_.planes[plane].row_bytes());
    }
  }
}

// Runs under the guard: no locks, nothing with a destructor.
void ResidentTable::copy_rows(void* context) {
  Copy& copy = *static_cast<Copy*>(context);
  const Source& source = copy.table.source_;
  for (size_t i = copy.at; i < copy.rows; ++i) {
    copy.at = i;
    std::byte* const out = copy.out + i * source.row_bytes;
    const int64_t row = copy.row_ids[i];
    // checked again: the caller's array may have changed since
    if (row < 0 || row >= source.num_rows()) {
      std::memset(out, 0, source.row_bytes);
      copy.missing = copy.missing + 1;
      continue;
    }
    for (size_t plane = 0; plane < source.planes.size(); ++plane) {
      const std::byte* const from = copy.table.address(plane, row);
      const uint32_t bytes = source.planes[plane].row_bytes();
      copy.from = from;
      copy.bytes = bytes;
      std::memcpy(out + source.starts[plane], from, bytes);
    }
  }
}

void ResidentTable::copy(Copy& copy) {
  if (kind_ == Kind::kLoaded) return copy_rows(&copy);
  while (run_guarded(ranges_, copy_rows, &copy) != nullptr) {
    faults_ += 1;
    counters_.read_errors += 1;
    if (options_.on_read_error == OnReadError::kRaise) fail(copy);
    // the whole row: of several planes, one that could not be read spoils the others
    std::memset(copy.out + copy.at * source_.row_bytes, 0, source_.row_bytes);
    counters_.zeroed_rows += 1;
    copy.at = copy.at + 1;
  }
}

void ResidentTable::fail(const Copy& copy) const {
  const std::byte* const from = copy.from;
  const auto in = std::find_if(ranges_.begin(), ranges_.end(),
                               [from](const AddressRange& range) { return range.contains(from); });
  const TableFile& file = source_.files[static_cast<size_t>(in - ranges_.begin())];
  const auto offset = static_cast<uint64_t>(from - in->data);
  throw ReadFailure(EIO, file.path(), offset, copy.bytes, 0,
                    file.holds(offset + copy.bytes) ? "" : "file ends early");
}

void ResidentTable::gather(const Batch& batch, std::byte* out, const Poll& poll) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::shared_lock lock(mutex_);
  if (closed_) throw ClosedError("table is closed");
  const auto began = std::chrono::steady_clock::now();
  const size_t rows = batch.tokens * batch.heads;
  check_row_ids({batch.row_ids, rows}, num_rows());
  check_identities();
  uint64_t missing = 0;
  size_t advised = 0;
  for (size_t at = 0; at < rows;) {
    if (at % kPollRows == 0 && at > 0 && poll()) throw Interrupted();
    const size_t step = std::min(kStepRows, rows - at);
    // a row on its own is read by its fault as well as by advice
    if (advice_ && rows > 1 && at >= advised && advice_->worth_it()) {
      advised = std::min(rows, at + kAdviseRows);
      advise(batch, at, advised);
    }
    Copy part{*this, batch.row_ids + at, out + at * source_.row_bytes, step};
    copy(part);
    missing += part.missing;
    at += step;
    if (advice_) advice_->learn(step);
    if (trimmer_) trimmer_->touched(step);
  }
  counters_.gathers += 1;
  counters_.rows += rows;
  counters_.missing_rows += missing;
  counters_.gather_ns += static_cast<uint64_t>((std::chrono::steady_clock::now() - began).count());
}

void ResidentTable::close() {
  if (forks_ != fork_generation()) return;
  const std::unique_lock lock(mutex_);
  closed_ = true;
  if (trimmer_) trimmer_->stop();
  ranges_.clear();
  mappings_.clear();
  loaded_.clear();
  for (TableFile& file : source_.files) file.close();
}

}  // namespace rowstream
