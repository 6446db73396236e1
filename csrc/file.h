// One checkpoint file opened for row reads: O_DIRECT with the alignment that
// the file system asks for, or buffered where direct reads are refused. Owns
// its descriptors; reads nothing itself but for the one probe that finds the
// alignment.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace rowstream {

// what tells this file from another one put in its place
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t mtime_ns = 0;
};

// what is known of an open file
struct FileState {
  std::string path;
  FileIdentity identity;
  bool direct;
  uint32_t alignment;
  std::string note;
};

class TableFile {
 public:
  // block: of direct reads, a power of two; a smaller one than the file system asks for, such as
  // 0, is that. Throws ReadFailure.
  TableFile(std::string path, bool direct, uint32_t block);
  ~TableFile();
  TableFile(TableFile&& other) noexcept;
  TableFile& operator=(TableFile&&) = delete;

  const std::string& path() const { return path_; }
  const FileIdentity& identity() const { return identity_; }
  // offsets and lengths of reads through fd() are multiples of this; 1 when
  // buffered
  uint32_t alignment() const { return direct() ? alignment_ : 1; }
  int fd() const { return direct() ? direct_ : buffered_; }
  int buffered_fd() const { return buffered_; }
  bool direct() const { return direct_ >= 0 && refused_.load(std::memory_order_relaxed) == 0; }
  bool on_tmpfs() const { return tmpfs_; }
  // why reads are buffered, empty while they are direct
  std::string note() const;

  // A direct read was refused after all (EINVAL, EOPNOTSUPP): reads go on
  // through the page cache. Planned spans keep their alignment, which a
  // buffered read takes as well.
  void read_buffered(int code) { refused_.store(code, std::memory_order_relaxed); }

  // throws ReadFailure when size or modification time are not those of the
  // opening
  void check_unchanged() const;
  // whether it is that long just now
  bool holds(uint64_t bytes) const;
  FileState state() const { return {path_, identity_, direct(), alignment(), note()}; }
  void close();

 private:
  void open_direct();

  std::string path_;
  FileIdentity identity_;
  std::string note_;
  uint32_t alignment_ = 512;
  int direct_ = -1;
  int buffered_ = -1;
  std::atomic<int> refused_{0};  // the errno of a direct read that was; several gathers may find it
  bool tmpfs_ = false;
};

}  // namespace rowstream
