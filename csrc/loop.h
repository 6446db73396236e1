// Answers the rings of a store's channels: one thread that looks at the doors, reads and fills, one
// that does so for rings of many rows, which others do not wait for, and one that only sleeps and
// voids what was not answered in time. Nothing here depends on the thread that launches work on the
// device, and none of them ever calls the device's driver.
//
// The threads hold no Python object, take no signals and are never joined: a stream may still wait
// for them while the process ends. They end by themselves once the loop is closed and nobody holds
// a channel.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "bell.h"
#include "channel.h"
#include "gather.h"
#include "traffic.h"

namespace rowstream {

class Loop {
 public:
  // Fills `out` with the rows of the ids; ends with Interrupted soon after `late` is true. Two
  // threads call it.
  using Serve = std::function<void(std::span<const int64_t> ids, std::byte* out, const Poll& late)>;
  enum class Spin { kAuto, kAlways, kNever };

  struct Options {
    double read_timeout_s = 2;
    Spin spin = Spin::kAuto;
    unsigned ranks = 1;                        // processes of this kind on the host, for kAuto
    std::vector<int> cpus;                     // where the threads run; empty: anywhere
    uint32_t long_rows = Traffic::kShortRows;  // rings of more rows are long
  };

  Loop(Serve serve, Options options);
  ~Loop();  // closes

  std::shared_ptr<Channel> add(std::shared_ptr<Arena> arena, uint32_t max_rows, uint32_t row_bytes,
                               bool gated);
  void kick();
  bool spins() const;
  size_t channels() const;
  // void steps that devices have reported, of channels that are gone as well
  uint64_t faults() const;
  Record& record() const;

  // Opens all channels and refuses new ones. True when the threads have let go of what `serve`
  // uses, for which it waits up to the read time-out and a second.
  bool close();

 private:
  struct State;
  const unsigned forks_;
  std::shared_ptr<State> state_;
};

}  // namespace rowstream
