#include "resident.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "failure.h"
#include "fork.h"

namespace rowstream {
namespace {

constexpr size_t kLoadBytes = size_t{8} << 20;
constexpr size_t kPollRows = 65'536;
constexpr int64_t kIdentityEveryNs = 1'000'000'000;

// all of it or ReadFailure
void read_fully(const TableFile& file, uint64_t offset, std::byte* into, size_t bytes) {
  size_t got = 0;
  while (got < bytes) {
    const ssize_t n = pread(file.fd(), into + got, bytes - got, static_cast<off_t>(offset + got));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw ReadFailure(n < 0 ? errno : 0, file.path(), offset, bytes, got);
    got += static_cast<size_t>(n);
  }
}

}  // namespace

Mapping::Mapping(const TableFile& file) : size_(static_cast<size_t>(file.identity().size)) {
  void* at = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (at == MAP_FAILED) throw ReadFailure(errno, file.path());
  data_ = static_cast<const std::byte*>(at);
  // read-ahead would fetch hundreds of kilobytes for a row of 160 bytes
  if (madvise(at, size_, MADV_RANDOM) != 0) {
    const int code = errno;
    munmap(at, size_);
    throw ReadFailure(code, file.path());
  }
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}

ResidentTable::ResidentTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
                             Kind kind, Poll poll)
    : kind_(kind), forks_(fork_generation()), source_(paths, std::move(planes), /*direct=*/false) {
  if (kind_ == Kind::kMapped) {
    mappings_.reserve(source_.files.size());
    for (const TableFile& file : source_.files) mappings_.emplace_back(file);
  } else {
    load(poll);
  }
}

void ResidentTable::load(Poll poll) {
  for (const TableFile& file : source_.files) {
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
  }
  for (const Plane& plane : source_.planes) {
    Pages& pages = loaded_.emplace_back(static_cast<size_t>(plane.num_rows()) * plane.row_bytes(),
                                        "rowstream table");
    memory_bytes_ += pages.size();
    for (const Extent& extent : plane.extents()) {
      const TableFile& file = source_.files[extent.file];
      std::byte* into = pages.data() + static_cast<size_t>(extent.first_row) * plane.row_bytes();
      const size_t bytes = static_cast<size_t>(extent.num_rows) * plane.row_bytes();
      for (size_t at = 0; at < bytes; at += kLoadBytes) {
        const size_t part = std::min(kLoadBytes, bytes - at);
        read_fully(file, extent.offset + at, into + at, part);
        // the copy is ours now; the page cache need not hold a second one
        posix_fadvise(file.fd(), static_cast<off_t>(extent.offset + at), static_cast<off_t>(part),
                      POSIX_FADV_DONTNEED);
        if (poll()) throw Interrupted();
      }
    }
  }
}

std::vector<FileState> ResidentTable::files() const {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::shared_lock lock(mutex_);
  return source_.states();
}

// Loaded bytes are ours; a mapping shows whatever is written to the file.
void ResidentTable::check_identities() {
  if (kind_ == Kind::kLoaded) return;
  const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  if (now < next_identity_check_ns_.load(std::memory_order_relaxed)) return;
  source_.check_unchanged();
  next_identity_check_ns_.store(now + kIdentityEveryNs, std::memory_order_relaxed);
}

const std::byte* ResidentTable::address(size_t plane, int64_t row) const {
  if (kind_ == Kind::kLoaded) {
    return loaded_[plane].data() + static_cast<size_t>(row) * source_.planes[plane].row_bytes();
  }
  const Location at = source_.planes[plane].locate(row);
  return mappings_[at.file].data() + at.offset;
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
  for (size_t i = 0; i < rows; ++i, out += source_.row_bytes) {
    if (i % kPollRows == kPollRows - 1 && poll()) throw Interrupted();
    const int64_t row = batch.row_ids[i];
    // checked again: the caller's array may have changed since
    if (row < 0 || row >= num_rows()) {
      std::memset(out, 0, source_.row_bytes);
      ++missing;
      continue;
    }
    for (size_t plane = 0; plane < source_.planes.size(); ++plane) {
      std::memcpy(out + source_.starts[plane], address(plane, row),
                  source_.planes[plane].row_bytes());
    }
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
  mappings_.clear();
  loaded_.clear();
  for (TableFile& file : source_.files) file.close();
}

}  // namespace rowstream
