// Ctrl-C: the first asks a long run to end with what is done so far, the second kills.
#pragma once

namespace pdsim {

/// Thrown by a command that has nothing to show for a part of its work: exit status 130.
struct Interrupted {};

/// From here on the first SIGINT or SIGTERM only sets interrupted(). Call it in commands that poll;
/// the others die at once, as they should.
void catch_interrupts();

/// Whether to stop. One relaxed load: cheap enough to poll every few hundred events.
bool interrupted();

}  // namespace pdsim
