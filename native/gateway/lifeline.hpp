// A lifeline: a descriptor whose other end the gateway holds. When that end closes, this process ends, even if its
// interpreter is stuck in code that never gives the GIL back.
#pragma once

namespace penstock::gateway {

// Starts a detached thread that waits for `descriptor` to hang up, gives the process `grace_ms` to leave in order,
// then ends it with status 1. The descriptor must stay open; nothing is read from it.
bool exit_when_hung_up(int descriptor, int grace_ms);

}  // namespace penstock::gateway
