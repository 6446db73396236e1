// Page-aligned anonymous memory: bounce slots, plan scratch and tables held in
// RAM. The owner frees it; a forked child does not inherit it, so a read that
// the kernel still has in flight can never be copied-on-write away from its
// buffer.
#pragma once

#include <cstddef>
#include <string>

namespace rowstream {

class Pages {
 public:
  Pages() = default;
  // zeroed on first touch; the name shows in /proc/self/smaps where the kernel
  // allows it
  Pages(size_t bytes, const char* name);  // throws std::system_error
  // in pages of 2 MiB where the kernel has some, which are few enough to register with a device
  static Pages huge(size_t bytes, const char* name);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Pages(size_t bytes, const char* name, size_t alignment);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  unsigned forks_ = 0;
};

}  // namespace rowstream
