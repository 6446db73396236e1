// The peer of gathers from memory: one pread of exactly the row's bytes after the other, straight
// to its place. Compiled on demand by native.py.
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <ctime>

// returns the nanoseconds taken, or -1 with errno
extern "C" int64_t pread_rows(const int* files, const uint32_t* file, const uint64_t* offset,
                              uint64_t count, uint32_t row_bytes, char* out) {
  timespec began{};
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (uint64_t i = 0; i < count; ++i) {
    const ssize_t got =
        pread(files[file[i]], out + i * row_bytes, row_bytes, static_cast<off_t>(offset[i]));
    if (got != static_cast<ssize_t>(row_bytes)) {
      if (got >= 0) errno = EIO;
      return -1;
    }
  }
  timespec ended{};
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return (ended.tv_sec - began.tv_sec) * 1'000'000'000 + ended.tv_nsec - began.tv_nsec;
}
