// One io_uring on the kernel's own header, used for reads only. Registers the
// table's files and its bounce memory where the locked-memory limit allows it,
// and works without.
#pragma once

#include <atomic>

#include "reader.h"

struct io_uring_cqe;
struct io_uring_params;
struct io_uring_sqe;

namespace rowstream {

class Ring final : public Reader {
 public:
  // throws std::system_error: EPERM, ENOSYS and ENOMEM mean "use the pool"
  Ring(unsigned depth, std::span<std::byte> bounce, const std::vector<int>& files);
  // the caller has taken every completion: nothing of the kernel's may outlive
  // the bounce memory
  ~Ring() override;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  const char* name() const override { return "uring"; }
  void push(const Read& read) override;
  size_t wait(unsigned at_least, std::span<Completion> done) override;
  size_t memory_bytes() const override { return rings_bytes_ + sqes_bytes_; }
  // what could not be registered and why, else empty
  const std::string& note() const { return note_; }

 private:
  void map(const io_uring_params& params);
  void unmap() noexcept;
  void register_memory(std::span<std::byte> bounce, const std::vector<int>& files);
  int enter(unsigned submit, unsigned at_least);
  size_t reap(std::span<Completion> done);

  int fd_ = -1;

  bool fixed_buffers_ = false;
  unsigned unsubmitted_ = 0;
  std::vector<int> files_;  // registered, by index
  std::string note_;

  std::byte* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  size_t sqes_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  const io_uring_cqe* cqes_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned* sq_tail_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned cq_mask_ = 0;
};

}  // namespace rowstream
