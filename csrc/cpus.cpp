#include "cpus.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

namespace rowstream {
namespace {

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

File open_text(const std::string& path) { return {fopen(path.c_str(), "re"), fclose}; }

// Two numbers of a file, or of two.
std::optional<double> ratio(const std::string& quota_path, const std::string& period_path) {
  const File first = open_text(quota_path);
  double quota = 0;
  double period = 0;
  if (!first || fscanf(first.get(), "%lf", &quota) != 1) return {};  // "max": none
  const File second = period_path.empty() ? File(nullptr, fclose) : open_text(period_path);
  FILE* const from = period_path.empty() ? first.get() : second.get();
  if (from == nullptr || fscanf(from, "%lf", &period) != 1) return {};
  if (quota <= 0 || period <= 0) return {};  // -1: none
  return quota / period;
}

// Every group from our own to the root of what we see may have a quota; the smallest binds. In a
// container the own group usually is the root.
double smallest_quota() {
  double smallest = CPU_SETSIZE;
  const File groups = open_text("/proc/self/cgroup");
  char line[4096];
  while (groups && fgets(line, sizeof line, groups.get()) != nullptr) {
    // "0::/path" of version 2, "3:cpu,cpuacct:/path" of version 1
    std::string path = line;
    if (!path.empty() && path.back() == '\n') path.pop_back();
    const size_t first = path.find(':');
    const size_t second = path.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers(path, first, second - first);  // ":cpu,cpuacct"
    controllers.front() = ',';
    controllers += ',';
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    for (path.erase(0, second + 1);; path.erase(path.rfind('/'))) {
      const std::string folder = (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu") + path;
      const auto quota = unified
                             ? ratio(folder + "/cpu.max", "")
                             : ratio(folder + "/cpu.cfs_quota_us", folder + "/cpu.cfs_period_us");
      smallest = std::min(smallest, quota.value_or(smallest));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return smallest;
}

}  // namespace

double usable_cpus() {
  cpu_set_t ours;
  CPU_ZERO(&ours);
  const double allowed =
      sched_getaffinity(0, sizeof ours, &ours) == 0 ? static_cast<double>(CPU_COUNT(&ours)) : 1.0;
  return std::min(allowed, smallest_quota());
}

void run_on(const std::vector<int>& cpus) {
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &wanted);
  }
  // refused where none of them is ours: any processor does
  if (CPU_COUNT(&wanted) > 0) (void)sched_setaffinity(0, sizeof wanted, &wanted);
}

}  // namespace rowstream
