#include "sim/transfer/handoff.hpp"

namespace pdsim {

namespace {

// Both ends are known to the poster, and it has not begun.
std::uint32_t connect_if_known(Handoff& h) {
  if (!h.source_known || !h.destination_known || h.wire != Handoff::Wire::idle) return kNothing;
  h.wire = Handoff::Wire::connecting;
  return kConnect;
}

}  // namespace

std::uint32_t advance(Handoff& h, HandoffEvent event) {
  using Wire = Handoff::Wire;
  switch (event) {
    case HandoffEvent::source_known:
      h.source_known = true;
      return connect_if_known(h);
    case HandoffEvent::destination_allocated:
      h.destination_owns = true;
      if (h.push) return kRegister;
      h.destination_known = true;
      return connect_if_known(h);
    case HandoffEvent::registered:
      if (!h.push) return kNothing;
      h.destination_known = true;
      return connect_if_known(h);
    case HandoffEvent::connected:
      if (h.wire != Wire::connecting) return kNothing;
      h.wire = Wire::posted;
      return kPost;
    case HandoffEvent::landed:
      if (h.wire != Wire::posted) return kNothing;
      h.wire = Wire::landed;
      return kTellDestination | (h.push ? kTellSource : kNothing);
    case HandoffEvent::failed:
      if (h.wire != Wire::posted && h.wire != Wire::connecting) return kNothing;
      h.wire = Wire::failed;
      return h.push ? kNothing : kTellDestination;
    case HandoffEvent::seen: {
      const bool good = h.wire == Wire::landed;
      if (!good && h.wire != Wire::failed) return kNothing;
      h.wire = Wire::over;
      return (good ? kLoad : kFailLoad) | (h.push || !good ? kNothing : kNotifySource);
    }
    case HandoffEvent::declined:
      if (h.wire != Wire::idle) return kNothing;
      h.wire = Wire::over;
      return h.push ? kNothing : kNotifySource;
    case HandoffEvent::source_lost:
      h.source_owns = false;
      if (h.push && (h.wire == Wire::idle || h.wire == Wire::connecting)) h.wire = Wire::over;
      return kNothing;
    case HandoffEvent::destination_lost:
      h.destination_owns = false;
      return kNothing;
  }
  return kNothing;
}

}  // namespace pdsim
