#include "sigbus.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>

// The handler runs in threads that have never been here, maybe in the middle of malloc: the first
// use of a thread-local of a loaded library may call malloc, unless its place is fixed at load.
#ifdef __GLIBC__
#define ROWSTREAM_STATIC_TLS __attribute__((tls_model("initial-exec")))
#else
#define ROWSTREAM_STATIC_TLS
#endif

namespace rowstream {
namespace {

struct Guard {
  std::span<const AddressRange> ranges;
  const void* volatile address;
  sigset_t mask;  // of the thread, when the signal came
  sigjmp_buf here;
};

// an earlier handler; never freed, since a signal may be on its way through it
struct Earlier {
  struct sigaction action;
  Earlier* older;
  std::atomic<bool> spent{false};  // SA_RESETHAND
};

constinit thread_local Guard* volatile active ROWSTREAM_STATIC_TLS = nullptr;
constinit thread_local Earlier* volatile calling ROWSTREAM_STATIC_TLS = nullptr;
std::atomic<Earlier*> newest{nullptr};

// the kernel's codes for an access that failed; BUS_MCEERR_AO tells of a page that nobody touched
bool of_access(const siginfo_t& info) {
  return info.si_code == BUS_ADRALN || info.si_code == BUS_ADRERR || info.si_code == BUS_OBJERR ||
         info.si_code == BUS_MCEERR_AR;
}

void die(const siginfo_t& info) {
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  sigaction(SIGBUS, &standard, nullptr);
  // an access is repeated when the handler returns, which leaves a core dump of the right place
  if (!of_access(info)) raise(SIGBUS);
}

void pass_on(Earlier* earlier, int number, siginfo_t* info, void* context) {
  if (earlier == nullptr) return die(*info);
  const struct sigaction& action = earlier->action;
  const bool with_info = (action.sa_flags & SA_SIGINFO) != 0;
  if (!with_info && action.sa_handler == SIG_IGN) {
    // the kernel does not let a failed access be ignored
    if (of_access(*info)) die(*info);
    return;
  }
  const bool once = (action.sa_flags & static_cast<int>(SA_RESETHAND)) != 0;
  if ((!with_info && action.sa_handler == SIG_DFL) || (once && earlier->spent.exchange(true))) {
    return die(*info);
  }
  // what was installed after us may pass the signal back to us: it goes on to what was there
  // before. A handler may leave by a jump, so the mark is made only where it is needed.
  Earlier* const outer = calling;
  if (earlier->older != nullptr) calling = earlier;
  if (with_info) {
    action.sa_sigaction(number, info, context);
  } else {
    action.sa_handler(number);
  }
  calling = outer;
}

void handle(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  Guard* const guard = active;
  if (guard != nullptr && of_access(*info)) {
    for (const AddressRange& range : guard->ranges) {
      if (!range.contains(info->si_addr)) continue;
      guard->address = info->si_addr;
      guard->mask = static_cast<const ucontext_t*>(context)->uc_sigmask;
      siglongjmp(guard->here, 1);
    }
  }
  // A handler in front of us (faulthandler, enabled later) may end with raise(), which names no
  // address. It has made way, so the access, repeated, comes here at once.
  const bool raised = info->si_code == SI_TKILL && info->si_pid == getpid();
  if (guard == nullptr || !raised) {
    pass_on(calling != nullptr ? calling->older : newest.load(), number, info, context);
  }
  errno = saved;
}

// A failed access kills a thread that blocks the signal. Asked once a thread: the mask of a thread
// is set when it starts.
bool thread_blocks_sigbus() {
  static thread_local const bool blocked = [] {
    sigset_t mask;
    return pthread_sigmask(SIG_BLOCK, nullptr, &mask) == 0 && sigismember(&mask, SIGBUS) == 1;
  }();
  return blocked;
}

// the frame that is jumped back to; nothing in it changes between the jump's two ends
__attribute__((noinline)) const void* guarded(std::span<const AddressRange> ranges,
                                              void (*work)(void*), void* context) {
  Guard guard{ranges, nullptr, {}, {}};
  // The mask is restored where that is needed, which saves the other gathers a system call: the
  // handler itself blocks nothing, but one that calls ours (a sanitizer's) may.
  if (sigsetjmp(guard.here, 0) != 0) {
    active = nullptr;
    pthread_sigmask(SIG_SETMASK, &guard.mask, nullptr);
    return guard.address;
  }
  active = &guard;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  work(context);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  active = nullptr;
  return nullptr;
}

}  // namespace

void catch_sigbus() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  struct sigaction now{};
  if (sigaction(SIGBUS, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle) return;
  struct sigaction ours{};
  ours.sa_sigaction = handle;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK | SA_RESTART;
  newest = new Earlier{now, newest.load()};
  sigaction(SIGBUS, &ours, nullptr);
}

const void* run_guarded(std::span<const AddressRange> ranges, void (*work)(void*), void* context) {
  if (!thread_blocks_sigbus()) return guarded(ranges, work, context);
  sigset_t only;
  sigset_t before;
  sigemptyset(&only);
  sigaddset(&only, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &only, &before);
  const void* const address = guarded(ranges, work, context);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return address;
}

}  // namespace rowstream
