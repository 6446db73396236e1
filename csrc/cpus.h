// Which processors this process may use, and how much of them: affinity and the quota of its
// control group. A thread that spins takes both from somebody else.
#pragma once

#include <vector>

namespace rowstream {

// processors' worth of time that this process may take; the smaller of affinity and quota
double usable_cpus();

// The calling thread runs there from now on; empty, or processors that are not ours: no change.
void run_on(const std::vector<int>& cpus);

}  // namespace rowstream
