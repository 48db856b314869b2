#include "platform/shared_directory.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <system_error>
#include <utility>

#include "platform/liveness.hpp"

namespace penstock {

namespace {

bool usable(const std::string &path, mode_t mode) {
    if (mkdir(path.c_str(), 0700) == 0) chmod(path.c_str(), mode);
    struct stat status {};
    return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && access(path.c_str(), W_OK | X_OK) == 0;
}

}  // namespace

static std::string find_path() {
    if (const char *set = std::getenv("PENSTOCK_SHM_DIR"); set && *set) {
        if (usable(set, 0700)) return set;
        throw std::system_error(errno ? errno : ENOTDIR, std::generic_category(),
                                std::string("PENSTOCK_SHM_DIR=") + set + " is not a directory that can be written");
    }
#ifdef __linux__
    if (usable("/dev/shm/penstock", 01777)) return "/dev/shm/penstock";
#endif
    const char *temporary = std::getenv("TMPDIR");
    std::string path = std::string(temporary && *temporary ? temporary : "/tmp") + "/penstock";
    if (usable(path, 01777)) return path;
    throw std::system_error(errno ? errno : ENOTDIR, std::generic_category(),
                            "neither /dev/shm/penstock nor " + path + " is a directory that can be written");
}

std::string shared_directory_path() {
    NoFork guard;  // one thread at a time, and no child that inherits it half done
    static auto *known = new std::pair<std::string, std::string>;  // what the environment says, and what came of it
    const char *set = std::getenv("PENSTOCK_SHM_DIR");
    std::string asked = set ? set : "";
    struct stat status {};
    bool stands = known->first == asked && !known->second.empty() && lstat(known->second.c_str(), &status) == 0 &&
                  S_ISDIR(status.st_mode);
    if (!stands) *known = {asked, find_path()};
    return known->second;
}

int shared_directory() {
    NoFork guard;
    static auto *opened = new std::map<std::string, int>;  // never destroyed: finalisers may come later
    std::string path = shared_directory_path();
    if (auto found = opened->find(path); found != opened->end()) {
        struct stat now {}, then {};  // the directory may have been removed and made again
        if (stat(path.c_str(), &now) == 0 && fstat(found->second, &then) == 0 && now.st_ino == then.st_ino &&
            now.st_dev == then.st_dev)
            return found->second;
        close(found->second);
        opened->erase(found);
    }
    int directory = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (directory < 0) throw std::system_error(errno, std::generic_category(), path);
    (*opened)[path] = directory;
    return directory;
}

}  // namespace penstock
