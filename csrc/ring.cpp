#include "ring.h"

#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#ifndef IORING_SETUP_COOP_TASKRUN  // Linux 5.19
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif

namespace rowstream {
namespace {

// the kernel shares these words; everything else of the ring is ours alone
unsigned load_acquire(unsigned* word) {
  return std::atomic_ref<unsigned>(*word).load(std::memory_order_acquire);
}
void store_release(unsigned* word, unsigned value) {
  std::atomic_ref<unsigned>(*word).store(value, std::memory_order_release);
}

int setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(syscall(SYS_io_uring_setup, entries, params));
}

int register_with(int fd, unsigned what, const void* data, unsigned count) {
  return static_cast<int>(syscall(SYS_io_uring_register, fd, what, data, count));
}

}  // namespace

Ring::Ring(unsigned depth, std::span<std::byte> bounce, const std::vector<int>& files) {
  io_uring_params params{};
  // completions are delivered when we enter anyway: no interrupt of the running
  // thread
  params.flags = IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN;
  fd_ = setup(depth, &params);
  if (fd_ < 0 && errno == EINVAL) {  // before 5.19
    params = {};
    params.flags = IORING_SETUP_CLAMP;
    fd_ = setup(depth, &params);
  }
  if (fd_ < 0) throw std::system_error(errno, std::system_category(), "io_uring_setup");
  try {
    // a wait that can end without a completion: Linux 5.11, younger than all
    // else used here
    if ((params.features & IORING_FEAT_EXT_ARG) == 0 || params.sq_entries < depth) {
      throw std::system_error(ENOSYS, std::system_category(), "io_uring is too old or too small");
    }
    map(params);
    // a seccomp filter may let a ring be made and refuse its use
    if (enter(0, 0) < 0) throw std::system_error(errno, std::system_category(), "io_uring_enter");
  } catch (...) {
    unmap();
    throw;
  }

  register_memory(bounce, files);
}

Ring::~Ring() { unmap(); }

void Ring::map(const io_uring_params& params) {
  rings_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                  params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  const auto map_at = [this](size_t bytes, off_t offset) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    if (at == MAP_FAILED) throw std::system_error(errno, std::system_category(), "io_uring mmap");
    madvise(at, bytes, MADV_DONTFORK);
    return static_cast<std::byte*>(at);
  };
  rings_ = map_at(rings_bytes_, IORING_OFF_SQ_RING);
  sqes_ = reinterpret_cast<io_uring_sqe*>(map_at(sqes_bytes_, IORING_OFF_SQES));
  const auto word = [this](unsigned offset) {
    return reinterpret_cast<unsigned*>(rings_ + offset);
  };
  sq_tail_ = word(params.sq_off.tail);
  sq_mask_ = *word(params.sq_off.ring_mask);
  sq_array_ = word(params.sq_off.array);
  cq_head_ = word(params.cq_off.head);
  cq_tail_ = word(params.cq_off.tail);
  cq_mask_ = *word(params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<const io_uring_cqe*>(rings_ + params.cq_off.cqes);
}

void Ring::unmap() noexcept {
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
  if (fd_ >= 0) close(fd_);
}

void Ring::register_memory(std::span<std::byte> bounce, const std::vector<int>& files) {
  const auto failed = [this](const char* what) {
    note_ += (note_.empty() ? "" : ", ") + std::string(what) + " not registered (" +
             std::strerror(errno) + ")";
  };
  // ENOMEM here is an ordinary user's locked-memory limit: the ring works
  // unregistered
  const iovec region{bounce.data(), bounce.size()};
  fixed_buffers_ = !bounce.empty() && register_with(fd_, IORING_REGISTER_BUFFERS, &region, 1) == 0;
  if (!fixed_buffers_ && !bounce.empty()) failed("buffers");
  if (!files.empty()) {
    if (register_with(fd_, IORING_REGISTER_FILES, files.data(),
                      static_cast<unsigned>(files.size())) == 0) {
      files_ = files;
    } else {
      failed("files");
    }
  }
}

void Ring::push(const Read& read) {
  const unsigned tail = *sq_tail_;  // only this thread writes it
  const unsigned index = tail & sq_mask_;
  io_uring_sqe& sqe = sqes_[index];
  std::memset(&sqe, 0, sizeof sqe);
  sqe.opcode = fixed_buffers_ ? IORING_OP_READ_FIXED : IORING_OP_READ;
  // a file that was turned buffered is read through a descriptor that is not
  // registered
  if (read.file < files_.size() && files_[read.file] == read.fd) {
    sqe.flags = IOSQE_FIXED_FILE;
    sqe.fd = static_cast<int>(read.file);
  } else {
    sqe.fd = read.fd;
  }
  sqe.off = read.offset;
  sqe.addr = reinterpret_cast<uint64_t>(read.into);
  sqe.len = read.length;
  sqe.user_data = read.slot;
  sq_array_[index] = index;
  store_release(sq_tail_, tail + 1);
  ++unsubmitted_;
}

int Ring::enter(unsigned submit, unsigned at_least) {
  const unsigned flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
  __kernel_timespec limit{0, 100'000'000};
  io_uring_getevents_arg arg{};
  arg.sigmask_sz = _NSIG / 8;
  arg.ts = reinterpret_cast<uint64_t>(&limit);
  return static_cast<int>(
      syscall(SYS_io_uring_enter, fd_, submit, at_least, flags, &arg, sizeof arg));
}

size_t Ring::wait(unsigned at_least, std::span<Completion> done) {
  size_t count = reap(done);
  while (count < at_least || unsubmitted_ > 0) {
    const unsigned missing = at_least > count ? at_least - static_cast<unsigned>(count) : 0;
    const int submitted = enter(unsubmitted_, missing);
    if (submitted >= 0) {
      unsubmitted_ -= static_cast<unsigned>(submitted);
    } else if (errno == EINTR || errno == ETIME) {
      // nothing was taken, or it was and the wait alone ended: the queue's head
      // tells
    } else if (errno != EAGAIN && errno != EBUSY) {
      throw std::system_error(errno, std::system_category(), "io_uring_enter");
    }
    const bool stopped = submitted < 0 && (errno == EINTR || errno == ETIME);
    count += reap(done.subspan(count));
    if (stopped || count == done.size()) break;
  }
  return count;
}

size_t Ring::reap(std::span<Completion> done) {
  unsigned head = *cq_head_;  // only this thread writes it
  const unsigned tail = load_acquire(cq_tail_);
  size_t count = 0;
  for (; head != tail && count < done.size(); ++head, ++count) {
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    done[count] = {static_cast<uint32_t>(cqe.user_data), cqe.res};
  }
  store_release(cq_head_, head);
  return count;
}

}  // namespace rowstream
