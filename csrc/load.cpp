#include "load.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "chunk.h"
#include "failure.h"
#include "fork.h"

namespace rowstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kDepth = 32;  // reads in flight, of all threads together
constexpr unsigned kMaxThreads = 4;
constexpr auto kPollEvery = std::chrono::milliseconds(50);
constexpr auto kProgressEvery = std::chrono::milliseconds(100);
// after a failure, without any completion: then the rest is not waited for
constexpr auto kDrainFor = std::chrono::seconds(1);
constexpr unsigned kMaxAttempts = 32;
constexpr unsigned kMaxErrors = 2;
constexpr auto kPause = std::chrono::milliseconds(1);

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

unsigned usable_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<unsigned>(CPU_COUNT(&set));
}

}  // namespace

// What the threads of one load share with the caller.
struct Loader::Job {
  std::shared_ptr<Source> source;
  std::vector<Chunk> chunks;
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<uint64_t> completions{0};
  std::atomic<bool> stop{false};

  std::mutex mutex;
  std::condition_variable ended;
  unsigned running = 0;
  bool lost = false;  // a ring broke with reads in flight
  std::exception_ptr failure;

  void fail(std::exception_ptr why) {
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::move(why);
    stop = true;
  }
};

struct Loader::Slot {
  Chunk chunk;
  uint32_t got = 0;
  unsigned attempts = 0;
  unsigned errors = 0;
  bool direct = false;    // the read in flight
  bool buffered = false;  // asked for after errors
};

class Loader::Worker {
 public:
  Worker(std::shared_ptr<Job> job, std::unique_ptr<Reader> reader, unsigned depth)
      : job_(std::move(job)),
        reader_(std::move(reader)),
        // in small pages a read would be in hundreds of segments
        bounce_(Pages::huge(depth * Chunk::kMaxBytes, "rowstream bounce")),
        slots_(depth),
        done_(depth) {
    for (unsigned slot = depth; slot > 0; --slot) free_.push_back(slot - 1);
  }

  void run() {
    try {
      read_all();
    } catch (...) {  // the ring itself is broken, reads in flight with it
      job_->fail(std::current_exception());
      if (free_.size() < slots_.size()) {
        (void)reader_.release();
        (void)new Pages(std::move(bounce_));
        const std::lock_guard lock(job_->mutex);
        job_->lost = true;
      }
    }
    const std::lock_guard lock(job_->mutex);
    job_->running -= 1;
    job_->ended.notify_all();
  }

 private:
  void read_all() {
    for (;;) {
      while (!free_.empty() && !job_->stop) {
        const size_t next = job_->next++;
        if (next >= job_->chunks.size()) break;
        const uint32_t number = free_.back();
        free_.pop_back();
        slots_[number] = {job_->chunks[next]};
        push(number);
      }
      if (free_.size() == slots_.size()) return;
      for (const Completion& completion :
           std::span(done_).first(reader_->wait(1, std::span(done_)))) {
        job_->completions += 1;
        if (!job_->stop && !finished(completion)) continue;
        free_.push_back(completion.slot);
      }
    }
  }

  // false: what is missing was asked for
  bool finished(const Completion& completion) {
    try {
      return judge(completion.slot, completion.result);
    } catch (const ReadFailure&) {
      job_->fail(std::current_exception());
      return true;
    }
  }

  std::byte* target(uint32_t number) const {
    const Chunk& chunk = slots_[number].chunk;
    return chunk.in_place ? chunk.into : bounce_.data() + number * Chunk::kMaxBytes;
  }

  void push(uint32_t number) {
    Slot& slot = slots_[number];
    const TableFile& file = job_->source->files[slot.chunk.file];
    slot.direct = file.direct() && !slot.buffered;
    const int fd = slot.direct ? file.fd() : file.buffered_fd();
    // what arrived is kept, but a direct read starts on a block
    const uint32_t skip = kept(slot);
    reader_->push({slot.chunk.offset + skip, target(number) + skip, slot.chunk.length - skip,
                   number, slot.chunk.file, fd});
  }

  static uint32_t kept(const Slot& slot) { return slot.got / slot.chunk.align * slot.chunk.align; }

  // As Gather judges: what a short read, an error or the end of the file means.
  bool judge(uint32_t number, int32_t result) {
    Slot& slot = slots_[number];
    TableFile& file = job_->source->files[slot.chunk.file];
    const int code = result < 0 ? -result : 0;
    if (code == 0) {
      const uint32_t got = kept(slot) + static_cast<uint32_t>(result);
      if (got > slot.got) slot.attempts = 0;
      slot.got = std::max(slot.got, got);
      const auto lead = static_cast<uint32_t>(slot.chunk.wanted_at - slot.chunk.offset);
      if (slot.got >= lead + slot.chunk.wanted) {
        arrived(number, lead);
        return true;
      }
      if (result == 0 || slot.attempts >= kMaxAttempts) fail(slot, EIO, "file ends early");
    } else if (code == EINTR || code == EAGAIN) {
      if (slot.attempts >= kMaxAttempts) fail(slot, code);
      if (slot.attempts >= kMaxAttempts / 2) std::this_thread::sleep_for(kPause);
    } else if ((code == EINVAL || code == EOPNOTSUPP) && slot.direct) {
      if (slot.chunk.in_place) {  // the memory may be what it does not take
        slot.chunk.in_place = false;
        slot.got = 0;
      } else {
        file.read_buffered(code);
      }
    } else if (slot.errors < kMaxErrors) {
      // once more the same way, then through the page cache, which may hold the block
      slot.buffered = ++slot.errors == kMaxErrors;
    } else {
      fail(slot, code);
    }
    ++slot.attempts;
    push(number);
    return false;
  }

  void arrived(uint32_t number, uint32_t lead) {
    const Slot& slot = slots_[number];
    const Chunk& chunk = slot.chunk;
    if (!chunk.in_place) std::memcpy(chunk.into, target(number) + lead, chunk.wanted);
    const TableFile& file = job_->source->files[chunk.file];
    // the copy is ours now; the page cache need not hold a second one
    if (!slot.direct && !file.on_tmpfs()) {
      posix_fadvise(file.buffered_fd(), static_cast<off_t>(chunk.offset), chunk.length,
                    POSIX_FADV_DONTNEED);
    }
    job_->done_bytes += chunk.wanted;
  }

  [[noreturn]] void fail(const Slot& slot, int code, std::string reason = {}) const {
    const Chunk& chunk = slot.chunk;
    const auto lead = static_cast<uint32_t>(chunk.wanted_at - chunk.offset);
    const uint32_t got = std::min(chunk.wanted, slot.got - std::min(lead, slot.got));
    throw ReadFailure(code, job_->source->files[chunk.file].path(), chunk.wanted_at, chunk.wanted,
                      got, std::move(reason));
  }

  const std::shared_ptr<Job> job_;
  std::unique_ptr<Reader> reader_;
  Pages bounce_;
  std::vector<Slot> slots_;
  std::vector<Completion> done_;
  std::vector<uint32_t> free_;
};

Loader::Loader(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
               Options options)
    : options_(std::move(options)),
      forks_(fork_generation()),
      source_(std::make_shared<Source>(paths, std::move(planes), options_.direct)) {}

int64_t Loader::num_rows() const { return source_->num_rows(); }
uint32_t Loader::row_bytes(size_t plane) const { return source_->planes.at(plane).row_bytes(); }
size_t Loader::planes() const { return source_->planes.size(); }
std::vector<FileState> Loader::files() const { return source_->states(); }

void Loader::load(size_t plane, int64_t first, int64_t count, std::byte* into, const Poll& poll,
                  const Progress& progress) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::unique_lock only(mutex_, std::try_to_lock);
  if (!only) throw std::runtime_error("loader is in use");
  if (stuck_) throw std::runtime_error("reads of an earlier load did not end");
  if (first < 0 || count < 0 || first > num_rows() - count) {
    throw std::out_of_range("rows [" + std::to_string(first) + ", " +
                            std::to_string(first + count) + ") of a table of " +
                            std::to_string(num_rows()));
  }
  const auto job = std::make_shared<Job>();
  job->source = source_;
  job->chunks = cut(*source_, source_->planes.at(plane), first, count, into, options_.in_place);
  const uint64_t total = static_cast<uint64_t>(count) * row_bytes(plane);
  std::vector<std::thread> threads = start(job);
  std::unique_lock lock(job->mutex);
  Clock::time_point moved_at = Clock::now();
  Clock::time_point next_progress = moved_at + kProgressEvery;
  uint64_t completions = 0;
  while (!job->ended.wait_for(lock, kPollEvery, [&] { return job->running == 0; })) {
    const bool stopping = job->failure != nullptr;
    lock.unlock();
    const Clock::time_point now = Clock::now();
    if (job->completions != completions) moved_at = now;
    completions = job->completions;
    if (!stopping) {
      watch(*job, total, now - moved_at, now >= next_progress, poll, progress);
      if (now >= next_progress) next_progress = now + kProgressEvery;
    } else if (now - moved_at > kDrainFor) {
      lock.lock();
      break;
    }
    lock.lock();
  }
  stuck_ = job->running > 0 || job->lost;
  const std::exception_ptr failure = job->failure;
  lock.unlock();
  for (std::thread& thread : threads) stuck_ ? thread.detach() : thread.join();
  if (failure) std::rethrow_exception(failure);
  source_->check_unchanged();
  if (progress) progress(total, total);
}

// One look of the calling thread at a load that goes on; what is wrong stops it.
void Loader::watch(Job& job, uint64_t total, std::chrono::nanoseconds silent, bool tell,
                   const Poll& poll, const Progress& progress) {
  try {
    if (silent > options_.timeout) {
      throw ReadFailure(ETIMEDOUT, source_->files.front().path(), 0, 0, 0,
                        no_answer_for(seconds(options_.timeout)));
    }
    if (poll()) throw Interrupted();
    if (tell && progress) progress(job.done_bytes, total);
  } catch (...) {
    job.fail(std::current_exception());
  }
}

std::vector<std::thread> Loader::start(const std::shared_ptr<Job>& job) const {
  const auto& files = source_->files;
  const bool on_tmpfs = std::all_of(files.begin(), files.end(),
                                    [](const TableFile& file) { return file.on_tmpfs(); });
  const unsigned wanted =
      options_.threads > 0 ? options_.threads : std::min(kMaxThreads, usable_processors());
  const auto faults =
      options_.faults.empty() ? nullptr : std::make_shared<FaultSchedule>(options_.faults);
  std::vector<std::thread> threads;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  // a signal must reach a thread that the interpreter knows
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (unsigned count = wanted; threads.size() < count;) {
      const unsigned depth = std::max(1u, kDepth / count);
      ReaderOptions options{options_.reader, depth, {}, {}};
      std::unique_ptr<Reader> reader = make_reader(options, on_tmpfs).reader;
      // it has threads of its own
      if (std::string_view(reader->name()) == "pool") count = 1;
      if (faults) reader = std::make_unique<FaultReader>(std::move(reader), faults, depth);
      const auto worker = std::make_shared<Worker>(job, std::move(reader), depth);
      const std::lock_guard lock(job->mutex);
      threads.emplace_back([worker] { worker->run(); });
      job->running += 1;
    }
  } catch (...) {
    // fewer of them load as well, none cannot
    if (threads.empty()) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return threads;
}

}  // namespace rowstream
