// Independent pieces of work on a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace pdsim {

/// Threads that `jobs` asks for: itself, or one a core when it is 0.
unsigned threads_for(unsigned jobs);

/// Calls work(i) once for each i < count, begun in order, on threads_for(jobs) threads, the calling one
/// among them. After an exception none begins any more; of those thrown, the one of the least i is thrown
/// again once all have ended. `progress`, if any, is called after each, one call at a time.
void parallel_for(std::size_t count, unsigned jobs, const std::function<void(std::size_t)>& work,
                  const std::function<void(std::uint64_t done, std::uint64_t total)>& progress = {});

}  // namespace pdsim
