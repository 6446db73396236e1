// Rows read in bulk, in the order of their files: what fills a table that is held in memory, or on
// a device window by window. Several threads, each with a reader of its own, read straight into
// place where file system and memory allow it and through a buffer elsewhere.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fault.h"
#include "gather.h"
#include "source.h"

namespace rowstream {

class Loader {
 public:
  // bytes done of bytes in all; may throw, which ends the load
  using Progress = std::function<void(uint64_t done, uint64_t total)>;

  struct Options {
    std::string reader = "auto";
    bool direct = true;
    bool in_place = true;  // false: every direct read through a buffer
    unsigned threads = 0;  // 0: as many as this process has processors, four at most
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // without any completion
    std::vector<Fault> faults;
  };

  Loader(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes, Options options);
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  int64_t num_rows() const;
  uint32_t row_bytes(size_t plane) const;
  size_t planes() const;
  std::vector<FileState> files() const;

  // Rows [first, first + count) of a plane, one after the other. Throws ReadFailure, Interrupted,
  // and what progress throws; asks poll and progress on the calling thread, 10 times a second.
  void load(size_t plane, int64_t first, int64_t count, std::byte* into, const Poll& poll,
            const Progress& progress);

  // Reads did not end: they may still write to the memory of the last load, which must stay.
  bool stuck() const { return stuck_; }

 private:
  struct Job;
  struct Slot;
  class Worker;

  std::vector<std::thread> start(const std::shared_ptr<Job>& job) const;
  void watch(Job& job, uint64_t total, std::chrono::nanoseconds silent, bool tell, const Poll& poll,
             const Progress& progress);

  const Options options_;
  const unsigned forks_;
  std::mutex mutex_;
  // a job's threads keep it where their reads do not end
  std::shared_ptr<Source> source_;
  bool stuck_ = false;
};

}  // namespace rowstream
