// What a channel tells of its dead members, for the user's file of deaths (platform/deaths.hpp). Any thread; nothing throws.
#pragma once

#include <string>

#include "shm/channel.hpp"

namespace penstock::shm {

// Notes the dead ones among a channel's members, if there are any. `channel` has its control block, and its tables if
// they are there. `encoded` is the channel's file name.
void note_deaths(const std::string &encoded, const Channel &channel) noexcept;

}  // namespace penstock::shm
