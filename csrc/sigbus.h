// Reads of mapped memory that end in SIGBUS (a bad sector, a file cut short) as results instead of
// the end of the process. Installs one handler, which passes on every signal that is not of such
// a read to the handler that was there before.
#pragma once

#include <span>

#include "mapping.h"

namespace rowstream {

// Puts the handler in front, if it is not there. A handler that somebody installs later gets the
// signal first, until this is called again.
void catch_sigbus();

// Runs work(context). Returns nullptr when it came to its end, or the address in one of `ranges`
// that could not be read: work is left there without unwinding, so while it touches the ranges it
// may hold no lock and no object with a destructor, and must keep what is needed afterwards in
// volatile members of its context.
const void* run_guarded(std::span<const AddressRange> ranges, void (*work)(void*), void* context);

}  // namespace rowstream
