// How much of some mappings is in this process's page tables: exactly, from /proc/self/smaps, in
// milliseconds; or the whole process's file pages, from /proc/self/statm, in a microsecond.
#pragma once

#include <cstdint>
#include <span>

#include "mapping.h"

namespace rowstream {

// the sum of Rss over the ranges; 0 where the kernel does not say
uint64_t resident_bytes(std::span<const AddressRange> ranges);

class FilePages {
 public:
  FilePages();
  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  // mapped pages of all files; any thread may ask
  int64_t bytes() const;

 private:
  int fd_;
  int64_t page_bytes_;
};

}  // namespace rowstream
