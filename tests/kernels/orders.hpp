// Every kernel test runs in each order that the emulator can choose warps, lanes and blocks in.
#pragma once

#include <cstdint>

#include "kernels/emulator.hpp"

namespace pdsim::kernels {

/// Calls body() under ascending, descending and two random orders; bank counters start at 0 in each.
template <class Body>
void in_every_order(Body body) {
  using emulator::Order;
  constexpr emulator::Settings kOrders[] = {
      {Order::ascending, 0}, {Order::descending, 0}, {Order::random, 1}, {Order::random, 2}};
  for (const emulator::Settings& order : kOrders) {
    emulator::settings = order;
    emulator::banks = {};
    body();
  }
  emulator::settings = {};
}

}  // namespace pdsim::kernels
