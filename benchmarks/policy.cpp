// Exact simulators of cache policies over a trace of keys, to compare policies and as the oracle of
// the real cache's counters. Keys are dense numbers, each with the hash that the real cache has for
// it. A gather looks up its distinct keys in the order of their first occurrence, then admits those
// it missed in that order.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

using Key = uint32_t;
constexpr Key kNone = ~Key{0};

struct Node {
  Key newer = kNone, older = kNone;
};

// what all shards of a policy know of a key; a key is in one list of its shard at most
struct State {
  uint8_t list = 0;  // 0: nowhere
  uint8_t used = 0;
};

struct Keys {
  std::vector<Node> nodes;
  std::vector<State> states;
  const uint64_t* hashes = nullptr;
  std::vector<uint8_t> counts;  // TinyLFU: how often a key was asked for, halved now and then
};

class List {
 public:
  List(Keys& keys, uint8_t id) : keys_(keys), id_(id) {}

  void push(Key key) {
    keys_.nodes[key] = {kNone, newest_};
    (newest_ == kNone ? oldest_ : keys_.nodes[newest_].newer) = key;
    newest_ = key;
    keys_.states[key].list = id_;
    ++size;
  }

  void remove(Key key) {
    const Node node = keys_.nodes[key];
    (node.newer == kNone ? newest_ : keys_.nodes[node.newer].older) = node.older;
    (node.older == kNone ? oldest_ : keys_.nodes[node.older].newer) = node.newer;
    keys_.states[key].list = 0;
    --size;
  }

  Key pop() {
    const Key key = oldest_;
    remove(key);
    return key;
  }

  Key oldest() const { return oldest_; }
  Key newer(Key key) const { return keys_.nodes[key].newer; }

  uint64_t size = 0;

 private:
  Keys& keys_;
  const uint8_t id_;
  Key newest_ = kNone, oldest_ = kNone;
};

class Policy {
 public:
  explicit Policy(Keys& keys) : keys(keys) {}
  virtual ~Policy() = default;
  virtual bool find(Key key) = 0;
  virtual void admit(Key key) = 0;

 protected:
  Keys& keys;
};

// Segmented: what is used again moves from the first part to the second. share 0: plain LRU.
class Lru : public Policy {
 public:
  Lru(Keys& keys, uint64_t capacity, double share)
      : Policy(keys),
        kept_most_(static_cast<uint64_t>(share * static_cast<double>(capacity))),
        capacity_(capacity) {}

  bool find(Key key) override {
    const uint8_t list = keys.states[key].list;
    if (list == 0) return false;
    (list == 1 ? fresh_ : kept_).remove(key);
    (kept_most_ == 0 ? fresh_ : kept_).push(key);
    if (kept_.size > kept_most_) fresh_.push(kept_.pop());
    return true;
  }

  void admit(Key key) override {
    while (fresh_.size + kept_.size >= capacity_) (fresh_.size ? fresh_ : kept_).pop();
    fresh_.push(key);
  }

 private:
  List fresh_{keys, 1}, kept_{keys, 2};
  const uint64_t kept_most_, capacity_;
};

// Ghosts are a list of keys, oldest out first; or, as in the real cache, a table of fingerprints
// where a later ghost takes an earlier one's place.
class S3Fifo : public Policy {
 public:
  S3Fifo(Keys& keys, uint64_t capacity, double small, uint8_t promote, double ghosts)
      : Policy(keys), capacity_(capacity), promote_(promote) {
    small_most_ =
        std::max<uint64_t>(1, static_cast<uint64_t>(small * static_cast<double>(capacity)));
    if (ghosts < 0) {
      prints_.resize(std::bit_ceil(capacity));
    } else {
      ghost_most_ = static_cast<uint64_t>(ghosts * static_cast<double>(capacity - small_most_));
    }
  }

  bool find(Key key) override {
    State& state = keys.states[key];
    if (state.list != 1 && state.list != 2) return false;
    if (state.used < 3) ++state.used;
    return true;
  }

  void admit(Key key) override {
    bool known = keys.states[key].list == 3;
    if (known) ghost_.remove(key);
    while (small_.size + main_.size >= capacity_) {
      if (small_.size >= small_most_ || main_.size == 0) {
        leave_small();
      } else {
        leave_main();
      }
    }
    if (!prints_.empty() && print_at(key) == print_of(key)) {
      print_at(key) = 0;
      known = true;
    }
    keys.states[key].used = 0;
    (known ? main_ : small_).push(key);
  }

 private:
  uint32_t& print_at(Key key) { return prints_[keys.hashes[key] & (prints_.size() - 1)]; }
  uint32_t print_of(Key key) const { return static_cast<uint32_t>(keys.hashes[key] >> 36) | 1; }

  void leave_small() {
    const Key key = small_.pop();
    State& state = keys.states[key];
    const bool keep = state.used >= promote_;
    state.used = 0;
    if (keep) return main_.push(key);
    if (!prints_.empty()) print_at(key) = print_of(key);
    if (ghost_most_ == 0) return;
    if (ghost_.size >= ghost_most_) ghost_.pop();
    ghost_.push(key);
  }

  void leave_main() {
    while (keys.states[main_.oldest()].used > 0) {
      const Key key = main_.pop();
      --keys.states[key].used;
      main_.push(key);
    }
    main_.pop();
  }

  List small_{keys, 1}, main_{keys, 2}, ghost_{keys, 3};
  std::vector<uint32_t> prints_;
  uint64_t capacity_, small_most_ = 0, ghost_most_ = 0;
  const uint8_t promote_;
};

class Sieve : public Policy {
 public:
  Sieve(Keys& keys, uint64_t capacity) : Policy(keys), capacity_(capacity) {}

  bool find(Key key) override {
    if (keys.states[key].list == 0) return false;
    keys.states[key].used = 1;
    return true;
  }

  void admit(Key key) override {
    while (all_.size >= capacity_) {
      if (hand_ == kNone) hand_ = all_.oldest();
      const Key looked = hand_;
      hand_ = all_.newer(looked);
      if (keys.states[looked].used) {
        keys.states[looked].used = 0;
      } else {
        all_.remove(looked);
      }
    }
    keys.states[key].used = 0;
    all_.push(key);
  }

 private:
  List all_{keys, 1};
  Key hand_ = kNone;
  const uint64_t capacity_;
};

// W-TinyLFU with exact counts in place of a sketch: the most that such a policy could do
class TinyLfu : public Policy {
 public:
  TinyLfu(Keys& keys, uint64_t capacity, double window) : Policy(keys), capacity_(capacity) {
    window_most_ =
        std::max<uint64_t>(1, static_cast<uint64_t>(window * static_cast<double>(capacity)));
    kept_most_ = (capacity - window_most_) * 8 / 10;
    keys.counts.resize(keys.states.size());
  }

  bool find(Key key) override {
    if (keys.counts[key] < 15) ++keys.counts[key];
    if (++asked_ == 10 * capacity_) {
      // one shard halves the counts of all, too often with several: use one
      for (auto& count : keys.counts) count /= 2;
      asked_ = 0;
    }
    const uint8_t list = keys.states[key].list;
    if (list == 0) return false;
    if (list == 1) {
      window_.remove(key);
      window_.push(key);
      return true;
    }
    (list == 2 ? fresh_ : kept_).remove(key);
    kept_.push(key);
    if (kept_.size > kept_most_) fresh_.push(kept_.pop());
    return true;
  }

  void admit(Key key) override {
    window_.push(key);
    if (window_.size <= window_most_) return;
    const Key candidate = window_.pop();
    if (window_.size + fresh_.size + kept_.size < capacity_) return fresh_.push(candidate);
    List& from = fresh_.size ? fresh_ : kept_;
    if (keys.counts[candidate] <= keys.counts[from.oldest()]) return;
    from.pop();
    fresh_.push(candidate);
  }

 private:
  List window_{keys, 1}, fresh_{keys, 2}, kept_{keys, 3};
  uint64_t capacity_, window_most_ = 0, kept_most_ = 0, asked_ = 0;
};

struct Simulator {
  Keys keys;
  std::vector<std::unique_ptr<Policy>> shards;
  std::vector<uint64_t> hashes;
  std::vector<uint64_t> seen;  // the last gather that asked for a key
  uint64_t gathers = 0;

  Policy& shard_of(Key key) { return *shards[hashes[key] >> 32 & (shards.size() - 1)]; }
};

}  // namespace

extern "C" {

// kind 0: LRU, a = share kept for what was used again; 1: S3-FIFO, a = share of small, b = uses
// that promote, c = ghosts for each main entry, or -1 for the real cache's table of them; 2: SIEVE;
// 3: TinyLFU, a = share of the window. num_shards is a power of two.
void* policy_new(int kind, const uint64_t* hashes, uint64_t num_keys, uint32_t num_shards,
                 uint64_t shard_entries, double a, double b, double c) {
  auto simulator = std::make_unique<Simulator>();
  simulator->hashes.assign(hashes, hashes + num_keys);
  Keys& keys = simulator->keys;
  keys.hashes = simulator->hashes.data();
  keys.nodes.resize(num_keys);
  keys.states.resize(num_keys);
  simulator->seen.resize(num_keys);
  for (uint32_t shard = 0; shard < num_shards; ++shard) {
    std::unique_ptr<Policy> policy;
    if (kind == 0) policy = std::make_unique<Lru>(keys, shard_entries, a);
    if (kind == 1) {
      policy = std::make_unique<S3Fifo>(keys, shard_entries, a, static_cast<uint8_t>(b), c);
    }
    if (kind == 2) policy = std::make_unique<Sieve>(keys, shard_entries);
    if (kind == 3) policy = std::make_unique<TinyLfu>(keys, shard_entries, a);
    if (!policy) return nullptr;
    simulator->shards.push_back(std::move(policy));
  }
  return simulator.release();
}

// Runs gathers: trace[ends[i - 1] .. ends[i]) each. Of its distinct keys gather i missed missed[i]
// and found found[i].
void policy_run(void* handle, const uint32_t* trace, const uint64_t* ends, uint64_t num_gathers,
                uint32_t* missed, uint32_t* found) {
  Simulator& simulator = *static_cast<Simulator*>(handle);
  std::vector<Key> misses;
  uint64_t next = 0;
  for (uint64_t gather = 0; gather < num_gathers; ++gather) {
    misses.clear();
    found[gather] = 0;
    ++simulator.gathers;
    for (; next < ends[gather]; ++next) {
      const Key key = trace[next];
      if (simulator.seen[key] == simulator.gathers) continue;
      simulator.seen[key] = simulator.gathers;
      if (simulator.shard_of(key).find(key)) {
        ++found[gather];
      } else {
        misses.push_back(key);
      }
    }
    for (const Key key : misses) simulator.shard_of(key).admit(key);
    missed[gather] = static_cast<uint32_t>(misses.size());
  }
}

void policy_delete(void* handle) { delete static_cast<Simulator*>(handle); }

}  // extern "C"
