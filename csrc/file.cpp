#include "file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "failure.h"
#include "memory.h"

namespace rowstream {
namespace {

// statx by hand: the C library of older build images has neither the mask nor
// the fields (STATX_DIOALIGN: Linux 6.1; both offsets from the kernel's struct
// statx)
constexpr unsigned kStatxDioAlign = 0x2000;
constexpr size_t kDioOffsetAlignAt = 156;

// false with errno where that is no regular file
bool identity_of(int fd, FileIdentity& identity) {
  struct stat st{};
  if (fstat(fd, &st) != 0) return false;
  if (!S_ISREG(st.st_mode)) {
    errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
    return false;
  }
  identity = {st.st_dev, st.st_ino, st.st_size,
              st.st_mtim.tv_sec * 1'000'000'000 + st.st_mtim.tv_nsec};
  return true;
}

// Looking at the access time is a twentieth of what a read costs. Refused where the file is
// another user's, whose reads go on with it.
void without_access_time(int fd) { (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NOATIME); }

// nothing: the file system does not say. 0: it says that it takes no direct
// reads.
std::optional<uint32_t> stated_alignment(int fd) {
  std::array<unsigned char, 256> buffer{};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, buffer.data()) != 0) return {};
  uint32_t mask = 0;
  uint32_t align = 0;
  std::memcpy(&mask, buffer.data(), sizeof mask);
  std::memcpy(&align, buffer.data() + kDioOffsetAlignAt, sizeof align);
  if ((mask & kStatxDioAlign) == 0) return {};
  return align;
}

// one real read: "not stated" is not "refused" (an overlay over tmpfs takes
// O_DIRECT and states nothing)
bool takes_direct_read(int fd, uint32_t align) {
  const Pages buffer(4096, "rowstream probe");
  ssize_t got;
  do {
    got = pread(fd, buffer.data(), align, 0);
  } while (got < 0 && errno == EINTR);
  return got >= 0;
}

}  // namespace

TableFile::TableFile(std::string path, bool direct, uint32_t block) : path_(std::move(path)) {
  buffered_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (buffered_ < 0) throw ReadFailure(errno, path_);
  if (!identity_of(buffered_, identity_)) {
    const int code = errno;
    close();
    throw ReadFailure(code, path_);
  }
  without_access_time(buffered_);
  struct statfs fs{};
  tmpfs_ = fstatfs(buffered_, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
  // a row is not followed by the next one: read-ahead would fetch what nobody
  // asked for
  posix_fadvise(buffered_, 0, 0, POSIX_FADV_RANDOM);
  if (!direct) {
    note_ = "buffered reads asked for";
  } else if (tmpfs_) {
    // it takes O_DIRECT and then copies from memory all the same, whole blocks
    // where a row would do
    note_ = "tmpfs has no device to read directly from";
  } else {
    open_direct();
    alignment_ = std::max(alignment_, block);
  }
}

void TableFile::open_direct() {
  direct_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (direct_ < 0) {
    note_ = std::string("O_DIRECT refused: ") + std::strerror(errno);
    return;
  }
  without_access_time(direct_);
  const std::optional<uint32_t> stated = stated_alignment(direct_);
  if (stated && *stated > 0) {
    alignment_ = *stated < 512 ? 512 : *stated;
    return;
  }
  // not less than 4096: btrfs takes smaller ones, and reads through the page cache without a word
  if (!stated && takes_direct_read(direct_, 4096)) {
    alignment_ = 4096;
    return;
  }
  ::close(std::exchange(direct_, -1));
  note_ = "the file system takes no direct reads";
}

std::string TableFile::note() const {
  const int code = refused_.load(std::memory_order_relaxed);
  return code == 0 ? note_ : std::string("a direct read was refused: ") + std::strerror(code);
}

void TableFile::check_unchanged() const {
  FileIdentity now;
  if (!identity_of(buffered_, now)) throw ReadFailure(errno, path_);
  if (now.size != identity_.size || now.mtime_ns != identity_.mtime_ns) {
    throw ReadFailure(ESTALE, path_, 0, 0, 0, "file changed since it was opened");
  }
}

bool TableFile::holds(uint64_t bytes) const {
  FileIdentity now;
  return identity_of(buffered_, now) && static_cast<uint64_t>(now.size) >= bytes;
}

void TableFile::close() {
  if (direct_ >= 0) ::close(std::exchange(direct_, -1));
  if (buffered_ >= 0) ::close(std::exchange(buffered_, -1));
}

TableFile::~TableFile() { close(); }

TableFile::TableFile(TableFile&& other) noexcept
    : path_(std::move(other.path_)),
      identity_(other.identity_),
      note_(std::move(other.note_)),
      alignment_(other.alignment_),
      direct_(std::exchange(other.direct_, -1)),
      buffered_(std::exchange(other.buffered_, -1)),
      refused_(other.refused_.load()),
      tmpfs_(other.tmpfs_) {}

}  // namespace rowstream
