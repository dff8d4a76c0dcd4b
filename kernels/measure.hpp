// How long an operation takes on the GPU, measured so that the figure can be believed.
//
// A sample: L2 is flushed (where asked), a kernel that spins until the host says go holds the stream while
// the host posts event, operation, event, so that the cost of launching is not in the time between them; a
// timestamp before and after gives the clock that the multiprocessors really ran at, and a sample below full
// clock is thrown away (statistics.hpp has that rule and the one that ends a series). The order is that of
// NVIDIA's nvbench.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>

#include "kernels/launch.hpp"
#include "kernels/statistics.hpp"

namespace pdsim::kernels {

/// Posts the operation on a stream and returns; called once a sample, and first for warm-up.
using Operation = std::function<void(Stream)>;

/// The operation could not be measured so: its posting waits for the stream that is held, or it outlives
/// whatever runs beside it.
class NotApart : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Harness {
 public:
  /// On the current GPU. Throws CudaError.
  Harness();
  ~Harness();
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;

  enum class Cache : std::uint8_t {
    cold,  ///< L2 is flushed before each sample
    as_is  ///< the operation itself sees to it, or data is to be warm
  };
  enum class Posting : std::uint8_t {
    hidden,  ///< the GPU waits until all is posted; at most some hundred launches
    counted  ///< the time runs from the first launch on: what a descriptor costs is part of it
  };

  /// Runs the operation until the rule says stop; twice before, unmeasured. Leaves the stream empty. Throws
  /// NotApart (hidden: after some seconds), CudaError.
  Measured time(const Operation& operation, const StopRule& rule, Cache cache = Cache::cold,
                Posting posting = Posting::hidden);

  /// The same while `background` runs again and again on another stream, from before each sample until after
  /// it: a sample that outlived it is not used, and the next gets twice as much. Requires the time of both
  /// alone, and that both have run. Throws as above.
  Measured time_beside(const Operation& operation, double operation_us, const Operation& background,
                       double background_us, const StopRule& rule);

  Stream stream() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pdsim::kernels
