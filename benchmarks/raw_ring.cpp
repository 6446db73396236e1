// The peer that gathers are measured against: a bare io_uring loop that plans nothing and copies
// nothing. Registered files and buffers where the kernel allows; every free slot is submitted by
// one system call. Compiled on demand by peers.py; one thread at a time.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

namespace {

struct Span {
  uint64_t offset;
  uint32_t length;
  uint32_t file;
};

struct Raw {
  std::vector<int> files;
  std::vector<uint64_t> sizes;
  unsigned depth = 0;
  unsigned slot_bytes = 0;
  int ring = -1;
  bool fixed_files = false;
  bool fixed_buffers = false;
  char* bounce = nullptr;
  std::vector<Span> slots;
  std::vector<unsigned> free;
  io_uring_sqe* sqes = nullptr;
  io_uring_cqe* cqes = nullptr;
  unsigned *sq_tail = nullptr, *sq_array = nullptr, *cq_head = nullptr, *cq_tail = nullptr;
  unsigned sq_mask = 0, cq_mask = 0;
  unsigned queued = 0;
};

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

int make_ring(Raw& raw, unsigned flags) {
  io_uring_params params{};
  params.flags = flags;
  raw.ring = static_cast<int>(syscall(SYS_io_uring_setup, raw.depth, &params));
  if (raw.ring < 0) return errno;
  const size_t ring_bytes =
      std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                       params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  const int access = PROT_READ | PROT_WRITE, how = MAP_SHARED | MAP_POPULATE;
  auto* rings =
      static_cast<char*>(mmap(nullptr, ring_bytes, access, how, raw.ring, IORING_OFF_SQ_RING));
  void* sqes = mmap(nullptr, params.sq_entries * sizeof(io_uring_sqe), access, how, raw.ring,
                    IORING_OFF_SQES);
  if (rings == MAP_FAILED || sqes == MAP_FAILED) return errno;
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) return ENOSYS;
  const auto word = [&](unsigned at) { return reinterpret_cast<unsigned*>(rings + at); };
  raw.sqes = static_cast<io_uring_sqe*>(sqes);
  raw.cqes = reinterpret_cast<io_uring_cqe*>(rings + params.cq_off.cqes);
  raw.sq_tail = word(params.sq_off.tail);
  raw.sq_array = word(params.sq_off.array);
  raw.sq_mask = *word(params.sq_off.ring_mask);
  raw.cq_head = word(params.cq_off.head);
  raw.cq_tail = word(params.cq_off.tail);
  raw.cq_mask = *word(params.cq_off.ring_mask);
  const iovec region{raw.bounce, size_t{raw.depth} * raw.slot_bytes};
  raw.fixed_buffers =
      syscall(SYS_io_uring_register, raw.ring, IORING_REGISTER_BUFFERS, &region, 1) == 0;
  raw.fixed_files = syscall(SYS_io_uring_register, raw.ring, IORING_REGISTER_FILES,
                            raw.files.data(), raw.files.size()) == 0;
  return 0;
}

void push(Raw& raw, const Span& span) {
  const unsigned slot = raw.free.back();
  raw.free.pop_back();
  raw.slots[slot] = span;
  const unsigned tail = *raw.sq_tail;
  const unsigned index = tail & raw.sq_mask;
  io_uring_sqe& sqe = raw.sqes[index];
  std::memset(&sqe, 0, sizeof sqe);
  sqe.opcode = raw.fixed_buffers ? IORING_OP_READ_FIXED : IORING_OP_READ;
  sqe.flags = raw.fixed_files ? IOSQE_FIXED_FILE : 0;
  sqe.fd = raw.fixed_files ? static_cast<int>(span.file) : raw.files[span.file];
  sqe.off = span.offset;
  sqe.len = span.length;
  sqe.addr = reinterpret_cast<uint64_t>(raw.bounce + size_t{slot} * raw.slot_bytes);
  sqe.user_data = slot;
  raw.sq_array[index] = index;
  std::atomic_ref(*raw.sq_tail).store(tail + 1, std::memory_order_release);
  ++raw.queued;
}

// 0, or the errno of the call or of the first read that failed
int enter(Raw& raw, unsigned at_least) {
  const long taken = syscall(SYS_io_uring_enter, raw.ring, raw.queued, at_least,
                             IORING_ENTER_GETEVENTS, nullptr, 0);
  if (taken < 0 && errno != EINTR && errno != EAGAIN) return errno;
  if (taken > 0) raw.queued -= static_cast<unsigned>(taken);
  unsigned head = *raw.cq_head;
  const unsigned tail = std::atomic_ref(*raw.cq_tail).load(std::memory_order_acquire);
  int failure = 0;
  for (; head != tail; ++head) {
    const io_uring_cqe& cqe = raw.cqes[head & raw.cq_mask];
    const Span& span = raw.slots[cqe.user_data];
    // a block that reaches past the end of its file comes short
    const uint64_t whole = std::min<uint64_t>(span.length, raw.sizes[span.file] - span.offset);
    if (cqe.res < 0)
      failure = -cqe.res;
    else if (static_cast<uint64_t>(cqe.res) < whole)
      failure = EIO;
    raw.free.push_back(static_cast<unsigned>(cqe.user_data));
  }
  std::atomic_ref(*raw.cq_head).store(head, std::memory_order_release);
  return failure;
}

}  // namespace

extern "C" {

// nullptr with errno set where it cannot be opened; slot_bytes: the longest read
void* raw_open(const char* const* paths, unsigned num_files, unsigned depth, unsigned slot_bytes,
               unsigned setup_flags) {
  Raw* raw = new Raw;
  raw->depth = depth;
  raw->slot_bytes = slot_bytes;
  for (unsigned i = 0; i < num_files; ++i) {
    const int fd = open(paths[i], O_RDONLY | O_DIRECT | O_CLOEXEC);
    struct stat status{};
    if (fd < 0 || fstat(fd, &status) != 0) return nullptr;
    raw->files.push_back(fd);
    raw->sizes.push_back(static_cast<uint64_t>(status.st_size));
  }
  void* bounce = mmap(nullptr, size_t{depth} * slot_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (bounce == MAP_FAILED) return nullptr;
  raw->bounce = static_cast<char*>(bounce);
  raw->slots.resize(depth);
  for (unsigned slot = depth; slot > 0; --slot) raw->free.push_back(slot - 1);
  const int failure = make_ring(*raw, setup_flags);
  errno = failure;
  return failure == 0 ? raw : nullptr;
}

// Reads every span, `depth` in flight, waiting for at_least completions in each system call.
// Nanoseconds, or -errno, after which the handle is of no more use.
int64_t raw_replay(void* handle, const uint32_t* files, const uint64_t* offsets,
                   const uint32_t* lengths, uint64_t count, unsigned at_least) {
  Raw& raw = *static_cast<Raw*>(handle);
  const int64_t began = now_ns();
  uint64_t next = 0;
  while (next < count || raw.free.size() < raw.depth) {
    for (; next < count && !raw.free.empty(); ++next) {
      push(raw, {offsets[next], lengths[next], files[next]});
    }
    const unsigned in_flight = raw.depth - static_cast<unsigned>(raw.free.size());
    if (const int failure = enter(raw, std::min(at_least, in_flight))) return -failure;
  }
  return now_ns() - began;
}

// `count` reads (the depth at most) in one system call that waits for them all
int64_t raw_once(void* handle, const uint32_t* files, const uint64_t* offsets,
                 const uint32_t* lengths, uint64_t count) {
  return raw_replay(handle, files, offsets, lengths, count, static_cast<unsigned>(count));
}

unsigned raw_registered(void* handle) {
  const Raw& raw = *static_cast<Raw*>(handle);
  return (raw.fixed_files ? 1u : 0u) | (raw.fixed_buffers ? 2u : 0u);
}

}  // extern "C"
