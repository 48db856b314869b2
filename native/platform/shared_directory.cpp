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

// Why a directory may not be used: an errno, 0 if it may, and what it does not say.
struct Refusal {
    int code = 0;
    std::string why;
};

// A user who could delete our files could make live processes look dead.
Refusal refuse(const std::string &path, bool must_be_ours) {
    const int not_made = mkdir(path.c_str(), 0700) == 0 ? 0 : errno;
    struct stat status {};
    if (lstat(path.c_str(), &status) != 0) return {not_made && not_made != EEXIST ? not_made : errno, ""};
    if (S_ISLNK(status.st_mode)) return {ENOTDIR, "it is a symbolic link; name the directory itself"};
    if (!S_ISDIR(status.st_mode)) return {ENOTDIR, ""};
    if (must_be_ours && status.st_uid != geteuid()) return {EACCES, "it belongs to user " + std::to_string(status.st_uid)};
    if ((status.st_mode & 022) && !(status.st_mode & S_ISVTX))
        return {EACCES, "others may write to it and it has no sticky bit, so they could remove our files (chmod +t)"};
    if (access(path.c_str(), W_OK | X_OK) != 0) return {errno, ""};
    return {};
}

}  // namespace

static std::string find_path() {
    if (const char *set = std::getenv("PENSTOCK_SHM_DIR"); set && *set) {
        Refusal refusal = refuse(set, false);
        if (!refusal.code) return set;
        throw std::system_error(refusal.code, std::generic_category(),
                                std::string("PENSTOCK_SHM_DIR=") + set + " cannot be used" +
                                    (refusal.why.empty() ? "" : " (" + refusal.why + ")"));
    }
    std::string name = "/penstock-" + std::to_string(geteuid()), why;
    int code = EACCES;
    const char *temporary = std::getenv("TMPDIR");
    for (const std::string &parent : {std::string("/dev/shm"), std::string(temporary && *temporary ? temporary : "/tmp")}) {
        Refusal refusal = refuse(parent + name, true);
        if (!refusal.code) return parent + name;
        code = refusal.code;
        why += (why.empty() ? "" : "; ") + parent + name + ": " +
               (refusal.why.empty() ? std::generic_category().message(code) : refusal.why);
    }
    throw std::system_error(code, std::generic_category(), "no directory for shared memory (" + why + ")");
}

std::string shared_directory_path() {
    NoFork guard;  // one thread at a time, and no forked child may inherit a half-made directory
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
