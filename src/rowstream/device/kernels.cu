// The kernels of a lookup: post (row ids to the host), verdict (did the rows come?), take (rows
// from staging to the model) and rows (out of a table that the GPU can address).
// Plain CUDA C++ that NVRTC compiles without any header; the package carries its PTX (`make ptx`).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// device memory of a channel: int64[8], zeroed once by the host
struct State {
  u64 epoch;
  u32 busy, unused_busy;
  u64 good;  // the epoch whose rows may be taken, or 0
  u32 mismatch, unused_mismatch;
  u32 done, unused_done;
};

// pinned memory; nobody but the GPU writes it
struct Fault {
  u64 word;  // epoch << 8 | status
  u32 count;
};

enum Status : u32 { TIMEOUT = 2, IDS = 3, MISUSE = 5 };

#define DEVICE static __device__ __forceinline__

// A volatile access is relaxed at system scope and is never cached in a register or in L1.
template <class T>
DEVICE void store_system(T* at, T value) {
  *reinterpret_cast<volatile T*>(at) = value;
}

template <class T>
DEVICE T load_system(const T* at) {
  return *reinterpret_cast<const volatile T*>(at);
}

DEVICE u64 load_acquire_system(const u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

DEVICE u32 live_tokens(const int* live, u32 tokens) {
  if (live == nullptr) return tokens;
  return *live < 0 ? 0 : min(static_cast<u32>(*live), tokens);
}

DEVICE i64 load_id(const void* ids, u32 ids_bytes, u64 at) {
  return ids_bytes == 8 ? static_cast<const i64*>(ids)[at] : static_cast<const int*>(ids)[at];
}

// One block. Padded tokens and ids below 0 are posted as -1; gated, the host has put the ids there
// before the launch and they are compared.
extern "C" __global__ void __launch_bounds__(1024)
    post(const void* ids, u32 ids_bytes, u32 tokens, u32 heads, const int* live, const int* head_of,
         u32 owned, i64* mailbox, u32* rows, u64* door, State* state, u32 gated) {
  __shared__ u32 was;
  __shared__ u64 epoch;
  if (threadIdx.x == 0) {
    was = atomicExch(&state->busy, 1u);
    // before the first id is written: no take can match a header made from another ring's ids
    epoch = atomicAdd(&state->epoch, 1ull) + 1;
    if (!was) {
      state->mismatch = 0;
      state->done = 0;
    }
  }
  __syncthreads();
  if (was) {
    // another stream is between its post and its take: its ids and rows stay as they are
    if (threadIdx.x == 0) {
      __threadfence();
      store_system(door, ~0ull);
    }
    return;
  }

  const u32 count = tokens * owned;
  const u32 until = live_tokens(live, tokens);
  bool differs = false;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    const u32 token = i / owned, place = i - token * owned;
    i64 id = -1;
    if (token < until) {
      const u32 head = head_of == nullptr ? place : static_cast<u32>(head_of[place]);
      id = max(load_id(ids, ids_bytes, static_cast<u64>(token) * heads + head), -1ll);
    }
    if (!gated) mailbox[i] = id;
    if (gated) differs |= load_system(mailbox + i) != id;
  }
  if (differs) state->mismatch = 1;
  // The barrier orders every thread's ids before thread 0's fence, and fences are cumulative:
  // whoever sees the door sees the ids.
  __syncthreads();
  if (threadIdx.x == 0) {
    store_system(rows, count);
    __threadfence_system();
    store_system(door, epoch);
    // Another stream's post may have left its mark in the door while we wrote the ids, and we have
    // just wiped it off. It bumps the epoch first, so one of the two of us sees the other. Both are
    // of this GPU: its own order is enough, and does not wait for the host's memory.
    __threadfence();
    if (load_system(&state->epoch) != epoch) store_system(door, ~0ull);
  }
}

// Where the answer to a ring is, and what is said where it is not good.
struct Answer {
  const u64* header;
  Fault* fault;
  u64 timeout_ns;
};

// By one thread, and the only one that reads the header: a read of a pinned line takes a
// microsecond, and those of several blocks queue up. With a time-out it is the wait itself. Returns
// the epoch whose rows may be taken, or 0.
DEVICE u64 judge(State* state, const Answer& answer) {
  const auto [header, fault, timeout_ns] = answer;
  const u64 epoch = load_system(&state->epoch);
  // acquire: the rows, which were written before the header, are read after it
  u64 word;
  bool late = false;
  if (timeout_ns == 0) {
    word = load_acquire_system(header);
  } else {
    u64 began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    for (;;) {
      word = load_acquire_system(header);
      // 0 is the header of a channel never answered; epoch 0 with a status, of an open one
      if (word >> 8 == epoch || (word != 0 && word >> 8 == 0)) break;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      late = now - began > timeout_ns;
      if (late) break;
      __nanosleep(100);
    }
  }

  const bool good = word == epoch << 8 && state->mismatch == 0;
  if (good) return epoch;
  u32 status = MISUSE;  // a header of another epoch, or ids that the host did not expect
  if ((word >> 8 == epoch || word >> 8 == 0) && (word & 255) != 0) status = word & 255;
  if (late) status = TIMEOUT;
  store_system(&fault->word, epoch << 8 | status);
  __threadfence_system();
  // one writer: no atomic over PCIe, which not every machine has
  store_system(&fault->count, load_system(&fault->count) + 1);
  return 0;
}

// For a take of several blocks, and where it is the wait itself.
extern "C" __global__ void verdict(State* state, const u64* header, Fault* fault, u64 timeout_ns) {
  const u64 good = judge(state, {header, fault, timeout_ns});
  // Not a mere yes: another stream's ring may have come in between, and its take would believe it.
  store_system(&state->good, good);
}

// --- where a row of the output comes from: a row of the source, or one of these

enum : i64 { ZERO = -1, VOID = -2 };

// rows in staging, in the order in which post wrote their ids
struct Staged {
  bool ok;
  u32 heads, owned;
  const int* slot_of;

  __device__ i64 find(u32 row) const {
    if (!ok) return VOID;
    const u32 token = row / heads, head = row - token * heads;
    const int slot = slot_of == nullptr ? static_cast<int>(head) : slot_of[head];
    return slot < 0 ? ZERO : static_cast<i64>(static_cast<u64>(token) * owned + slot);
  }
};

// rows of a whole table
struct Indexed {
  const void* ids;
  u32 ids_bytes, until, heads;
  const int* slot_of;
  i64 num_rows;
  u64* fault;

  __device__ i64 find(u32 row) const {
    const u32 token = row / heads, head = row - token * heads;
    if (token >= until || (slot_of != nullptr && slot_of[head] < 0)) return ZERO;
    const i64 id = load_id(ids, ids_bytes, row);
    if (id < 0) return ZERO;
    if (id < num_rows) return id;
    store_system(fault, static_cast<u64>(id) << 8 | IDS);  // any of them, if there are several
    return VOID;
  }
};

// --- what becomes of it: the same bytes, or a value for each

DEVICE void fill(uint4* unit, u32 word) { *unit = make_uint4(word, word, word, word); }
DEVICE void fill(u32* unit, u32 word) { *unit = word; }
DEVICE void fill(u8* unit, u32 word) { *unit = static_cast<u8>(word); }

struct Bytes {
  u8* out;
  u32 void_byte;

  __device__ bool takes(u32 unit_bytes) const {
    return reinterpret_cast<u64>(out) % unit_bytes == 0;
  }
  template <class Unit>
  __device__ void store(u32 i, Unit unit, i64 at) const {
    if (at < 0) fill(&unit, at == VOID ? void_byte * 0x01010101u : 0u);
    reinterpret_cast<Unit*>(out)[i] = unit;
  }
};

DEVICE u32 word_of(const uint4& unit, u32 k) {
  return k == 0 ? unit.x : k == 1 ? unit.y : k == 2 ? unit.z : unit.w;
}
DEVICE u32 word_of(u32 unit, u32) { return unit; }

template <class Value>
DEVICE void store_values(const Value* table, u8 code, Value* to) {
  *to = table[code];
}

template <class Value, class Unit>
DEVICE void store_values(const Value* table, const Unit& unit, Value* to) {
  constexpr u32 PER_WORD = 4 / sizeof(Value), WORDS = sizeof(Unit) / PER_WORD;
  u32 words[WORDS];
#pragma unroll
  for (u32 k = 0; k < WORDS; k++) {
    words[k] = 0;
#pragma unroll
    for (u32 j = 0; j < PER_WORD; j++) {
      const u32 place = k * PER_WORD + j;
      const u32 code = word_of(unit, place / 4) >> (place % 4 * 8) & 255u;
      words[k] |= static_cast<u32>(table[code]) << (j * 16);
    }
  }
#pragma unroll
  for (u32 k = 0; k < WORDS; k += 4) {
    if constexpr (WORDS % 4 == 0) {
      reinterpret_cast<uint4*>(to)[k / 4] =
          make_uint4(words[k], words[k + 1], words[k + 2], words[k + 3]);
    } else {
      reinterpret_cast<uint2*>(to)[0] = make_uint2(words[0], words[1]);
    }
  }
}

// the 256 outputs, made on the CPU, then those of rows that are zeroes or void
enum : u32 { ZERO_PLACE = 256, VOID_PLACE = 257 };

template <class Value>
struct Values {
  Value* out;
  const Value* table;

  __device__ Values(Value* to, Value* shared, const Value* lut, u32 void_value)
      : out(to), table(shared) {
    for (u32 i = threadIdx.x; i <= VOID_PLACE; i += blockDim.x) {
      shared[i] = i < ZERO_PLACE ? lut[i] : static_cast<Value>(i == VOID_PLACE ? void_value : 0u);
    }
    __syncthreads();
  }
  __device__ bool takes(u32 unit_bytes) const {
    return reinterpret_cast<u64>(out) % min(unit_bytes * static_cast<u32>(sizeof(Value)), 16u) == 0;
  }
  template <class Unit>
  __device__ void store(u32 i, Unit unit, i64 at) const {
    if (at < 0) fill(&unit, 0u);
    const u32 place = at >= 0 ? 0u : at == VOID ? VOID_PLACE : ZERO_PLACE;
    store_values(table + place, unit, out + static_cast<u64>(i) * sizeof(Unit));
  }
};

// Loads in flight per thread before its first store: bytes on the way are what fills PCIe.
#define AHEAD 2

// No pointer here is __restrict__: loads of staging must not become ld.global.nc, whose cache may
// hold what the host has meanwhile replaced.
template <class Unit, class Source, class Sink>
DEVICE void move_units(const Source& source, const u8* base, u32 count, u32 row_bytes,
                       const Sink& sink) {
  const Unit* from = reinterpret_cast<const Unit*>(base);
  const u32 row_units = row_bytes / sizeof(Unit), total = count * row_units;
  const u32 step = gridDim.x * blockDim.x;
  for (u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += AHEAD * step) {
    Unit units[AHEAD];
    i64 at[AHEAD];
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++) {
      const u32 i = first + k * step;
      if (i >= total) continue;
      const u32 row = i / row_units;
      at[k] = source.find(row);
      if (at[k] >= 0) units[k] = from[static_cast<u64>(at[k]) * row_units + (i - row * row_units)];
    }
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++) {
      const u32 i = first + k * step;
      if (i < total) sink.store(i, units[k], at[k]);
    }
  }
}

// In the widest unit in which every row starts and ends, on both sides.
template <class Source, class Sink>
DEVICE void move_rows(const Source& source, const u8* base, u32 count, u32 row_bytes,
                      const Sink& sink) {
  const u64 low = reinterpret_cast<u64>(base) | row_bytes;
  if (low % 16 == 0 && sink.takes(16)) {
    move_units<uint4>(source, base, count, row_bytes, sink);
  } else if (low % 4 == 0 && sink.takes(4)) {
    move_units<u32>(source, base, count, row_bytes, sink);
  } else {
    move_units<u8>(source, base, count, row_bytes, sink);
  }
}

// --- take: with its verdict where it is one block, by what the verdict said otherwise

// The last block to get here gives the channel free. Not earlier: a post of another stream would
// ring and have staging refilled while blocks of this take still read it.
DEVICE void release(State* state) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicInc(&state->done, gridDim.x - 1) < gridDim.x - 1) return;
  __threadfence();
  atomicExch(&state->busy, 0u);
}

DEVICE Bytes sink_for(u8* out, u8*, const u8*, u32 void_byte) { return {out, void_byte}; }

template <class Value>
DEVICE Values<Value> sink_for(Value* out, Value* table, const Value* lut, u32 void_value) {
  return Values<Value>(out, table, lut, void_value);
}

#define TAKE(NAME, Value)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 4)                                          \
      NAME(State* state, const u8* rows, Value* out, u32 tokens, u32 heads, const int* slot_of, \
           u32 owned, u32 row_bytes, const Value* lut, u32 void_value, const u64* header,       \
           Fault* fault, u64 timeout_ns) {                                                      \
    __shared__ Value table[VOID_PLACE + 1];                                                     \
    __shared__ u64 good;                                                                        \
    if (threadIdx.x == 0) {                                                                     \
      good = header == nullptr ? load_system(&state->good)                                      \
                               : judge(state, {header, fault, timeout_ns});                     \
    }                                                                                           \
    const auto sink = sink_for(out, table, lut, void_value);                                    \
    __syncthreads();                                                                            \
    const Staged source = {good == load_system(&state->epoch), heads, owned, slot_of};          \
    move_rows(source, rows, tokens * heads, row_bytes, sink);                                   \
    release(state);                                                                             \
  }
TAKE(take_bytes, u8)
TAKE(take_lut16, u16)
TAKE(take_lut32, u32)

// --- rows

#define ROWS(NAME, Value)                                                                          \
  extern "C" __global__ void __launch_bounds__(256, 4)                                             \
      NAME(const u8* base, const void* ids, u32 ids_bytes, const int* live, u32 tokens, u32 heads, \
           const int* slot_of, Value* out, u32 row_bytes, i64 num_rows, u64* fault,                \
           const Value* lut, u32 void_value) {                                                     \
    __shared__ Value table[VOID_PLACE + 1];                                                        \
    const u32 until = live_tokens(live, tokens);                                                   \
    const Indexed source = {ids, ids_bytes, until, heads, slot_of, num_rows, fault};               \
    move_rows(source, base, tokens * heads, row_bytes, sink_for(out, table, lut, void_value));     \
  }
ROWS(rows_bytes, u8)
ROWS(rows_lut16, u16)
ROWS(rows_lut32, u32)
