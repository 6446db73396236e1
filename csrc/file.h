// One checkpoint file opened for row reads: O_DIRECT with the alignment that
// the file system asks for, or buffered where direct reads are refused. Owns
// its descriptors; reads nothing itself but for the one probe that finds the
// alignment.
#pragma once

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
  TableFile(std::string path, bool direct);  // throws ReadFailure
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
  bool direct() const { return direct_ >= 0 && !refused_; }
  bool on_tmpfs() const { return tmpfs_; }
  // why reads are buffered, empty while they are direct
  const std::string& note() const { return note_; }

  // A direct read was refused after all (EINVAL, EOPNOTSUPP): reads go on
  // through the page cache. Planned spans keep their alignment, which a
  // buffered read takes as well.
  void read_buffered(const std::string& why);

  // throws ReadFailure when size or modification time are not those of the
  // opening
  void check_unchanged() const;
  FileState state() const { return {path_, identity_, direct(), alignment(), note_}; }
  void close();

 private:
  void open_direct();

  std::string path_;
  FileIdentity identity_;
  std::string note_;
  uint32_t alignment_ = 512;
  int direct_ = -1;
  int buffered_ = -1;
  bool refused_ = false;
  bool tmpfs_ = false;
};

}  // namespace rowstream
