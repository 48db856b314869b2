// Where files in shared memory live: one function per platform.
//
// Rules: every name in the directory is a plain file name made by Penstock, opened relative to the directory's
// descriptor and never through a symbolic link. May be called by any thread.
#pragma once

#include <string>

namespace penstock {

// PENSTOCK_SHM_DIR when set, else /dev/shm/penstock-UID, else the same in the system's temporary directory; made private
// to the user, and not used where another user could remove what is in it. Throws std::system_error that says why.
std::string shared_directory_path();

// A descriptor of that directory, opened once per process and path; not to be closed by the caller.
int shared_directory();

}  // namespace penstock
