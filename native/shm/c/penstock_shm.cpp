// The C interface over Publisher and Subscriber: errors become codes, nothing is thrown across.
#include "shm/c/penstock_shm.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>

#include "shm/publisher.hpp"
#include "shm/subscriber.hpp"

using namespace penstock::shm;

struct penstock_shm_publisher {
    Publisher handle;
    std::int64_t spin_ns;
    int (*resize)(void *, uint64_t, uint64_t) = nullptr;
    void *resize_context = nullptr;
    std::unordered_map<std::uint32_t, std::size_t> reserved = {};  // bytes asked for, by slot
};

struct penstock_shm_subscriber {
    Subscriber handle;
    std::int64_t spin_ns;
    bool watched = false;
    void (*callback)(void *, penstock_shm_subscriber *, const penstock_shm_message *) = nullptr;
    void *callback_context = nullptr;
    void (*dropped)(void *, penstock_shm_subscriber *, uint64_t) = nullptr;
    void *dropped_context = nullptr;
    std::optional<View> kept;  // taken by a read whose function of on_dropped failed: the next read gives it
    std::uint64_t drops_told = 0;
};

namespace {

thread_local std::string last_error;

int fail(Fault fault, const std::string &text) {
    last_error = text;
    return -int(fault);
}

template <typename Function>
int guarded(Function &&function) {
    try {
        return function();
    } catch (const Error &error) {
        return fail(error.fault, error.what());
    } catch (const std::bad_alloc &) {
        return fail(Fault::system, "no memory");
    } catch (const std::exception &error) {
        return fail(Fault::system, error.what());
    }
}

void need(const void *pointer, const char *what) {
    if (!pointer) throw Error(Fault::invalid, std::string("the pointer to ") + what + " is null");
}

template <typename Handle>
void check(const Handle *handle) {
    if (!handle) throw Error(Fault::invalid, "the handle is null");
    if (!handle->handle.member.belongs_here())
        throw Error(Fault::state, handle->handle.member.describe() + " was opened before this process was forked");
}

Options options_of(const char *name, const penstock_shm_options *given) {
    penstock_shm_options fresh;
    penstock_shm_options_init(&fresh);
    if (!given) given = &fresh;
    if (!name) throw Error(Fault::invalid, "the name is null");
    if (given->struct_size != sizeof *given)
        throw Error(Fault::invalid, "options were not set up with penstock_shm_options_init");
    if (given->vchan_id >= 0 && !given->mux) throw Error(Fault::invalid, "vchan_id needs mux");
    Options options;
    options.name = name;
    options.mux = given->mux ? given->mux : "";
    options.type = given->type ? given->type : "";
    options.vchan_id = given->vchan_id;
    options.reliable = given->reliable;
    options.slots = given->slots;
    options.slot_size = given->slot_size;
    options.most_held = given->max_held;
    options.fixed_size = given->fixed_size;
    options.max_publishers = given->max_publishers;
    options.max_subscribers = given->max_subscribers;
    options.history = !given->no_history;
    options.local = given->local;
    options.retirement = given->retirement;
    if (given->metadata_size) options.metadata_size = given->metadata_size;
    if (given->mode) {
        options.access.mode = (given->mode & 0777) | 0600;
        options.access.shared = true;
    }
    return options;
}

std::int64_t deadline_of(double timeout_s) {
    if (std::isnan(timeout_s)) throw Error(Fault::invalid, "the time-out is not a number");
    if (timeout_s < 0 || timeout_s > 1e9) return -1;
    return timeout_s == 0 ? 0 : monotonic_ns() + std::int64_t(std::ceil(timeout_s * 1e9));
}

std::int64_t spin_until(std::int64_t spin_ns) { return spin_ns > 0 ? monotonic_ns() + spin_ns : 0; }

// A wait that signals only interrupt, never end.
template <typename Function>
Woken persist(Function &&function) {
    Woken woken;
    while ((woken = function()) == Woken::look) {
    }
    return woken;
}

void reserve(penstock_shm_publisher *publisher, std::size_t size, double timeout_s, Publisher::Place &place) {
    Publisher &handle = publisher->handle;
    if (size > handle.slot_size()) {
        if (publisher->resize && !publisher->resize(publisher->resize_context, handle.slot_size(),
                                                    Membership::grown_size(handle.slot_size(), size)))
            throw Error(Fault::refused, handle.member.describe() + ": growing its slots was vetoed");
        handle.grow(size);
        handle.slot_size();
    }
    if (handle.reserve(place, size) == Taken::yes) return;
    if (!handle.writer.reliable) {
        handle.member.recover();
        if (handle.reserve(place, size) == Taken::yes) return;
        throw Error(Fault::capacity, handle.why_full());
    }
    std::int64_t deadline = deadline_of(timeout_s);
    for (;;) {
        handle.wake_readers();
        Woken woken = Woken::timeout;
        std::int64_t until = monotonic_ns() + std::max(publisher->spin_ns, short_spin_ns);
        if (deadline) woken = persist([&] { return handle.wait(deadline, until, -1); });
        else handle.look_for_dead();
        if (handle.reserve(place, size) == Taken::yes) return;
        if (woken == Woken::timeout) throw Error(Fault::timeout, handle.why_full());
    }
}

std::uint64_t commit(penstock_shm_publisher *publisher, const Publisher::Place &place, std::size_t size,
                     std::uint32_t flags = 0) {
    Publisher &handle = publisher->handle;
    std::uint64_t ordinal = handle.publish(place, size, realtime_ns(), flags);
    if (!ordinal) throw Error(Fault::corruption, handle.member.describe() + ": its ring is damaged");
    handle.wake_readers();
    return ordinal;
}

Publisher::Place place_of(Publisher &handle, std::uint32_t slot) {
    Channel &channel = handle.member.channel;
    if (slot >= channel.slot_count) throw Error(Fault::invalid, "there is no slot " + std::to_string(slot));
    std::uint64_t state = channel.slots[slot].state.load();
    if (kind_of(state) != slot_owned || member_of(state) != handle.writer.index)
        throw Error(Fault::state, "slot " + std::to_string(slot) + " is not reserved by this publisher");
    return {slot, handle.member.payload(channel.slots[slot].segment.load(), slot)};
}

void message_of(const View &view, penstock_shm_message *message) {
    *message = {view.data, view.size, view.ordinal, view.timestamp_ns, view.vchan, view.slot, view.intact,
                (view.flags & message_activation) != 0, view.metadata, view.metadata_size};
}

const Reader::Pin &pin_of(const penstock_shm_subscriber *subscriber, const penstock_shm_message *message) {
    const auto &pins = subscriber->handle.reader.pins;
    if (message->slot >= pins.size() || !pins[message->slot].count)
        throw Error(Fault::state, "the message is not held: released twice?");
    return pins[message->slot];
}

void clear_metadata(Publisher &handle, std::uint32_t slot) {
    if (handle.metadata_size()) std::memset(handle.metadata(slot), 0, handle.metadata_size());
}

bool activate(penstock_shm_publisher *publisher) {
    Publisher::Place place;
    if (publisher->handle.reserve(place, 0) != Taken::yes) return false;
    clear_metadata(publisher->handle, place.slot);
    return commit(publisher, place, 0, message_activation) != 0;
}

// What a look that holds gives: 1 with a message, 0 without.
template <typename Look>
int found(penstock_shm_subscriber *subscriber, Look &&look, penstock_shm_message *message) {
    View view;
    Found result = look(view);
    if (result == Found::limit) throw Error(Fault::capacity, subscriber->handle.why_limit());
    if (result != Found::message) return 0;
    message_of(view, message);
    return 1;
}

int read_once(penstock_shm_subscriber *subscriber, penstock_shm_message *message, Found &found) {
    View view;
    if (subscriber->kept) {
        found = Found::message;
        view = *std::exchange(subscriber->kept, std::nullopt);
    } else {
        found = subscriber->handle.read(view);
        // On a virtual channel losses are counted when the next message is read. No message came, so count them now.
        if (found != Found::message && subscriber->handle.reader.vchan >= 0) subscriber->handle.update_counters(true);
    }
    std::uint64_t lost = subscriber->handle.counters->dropped[std::size_t(penstock::DropReason::overflow)].get();
    std::uint64_t news = lost - std::exchange(subscriber->drops_told, lost);
    if (news && subscriber->dropped) {
        try {
            subscriber->dropped(subscriber->dropped_context, subscriber, news);
        } catch (...) {  // a function of C++: the message that was taken is for the next read
            if (found == Found::message) subscriber->kept = view;
            throw;
        }
    }
    if (found != Found::message) return 0;
    subscriber->handle.counters->note_read();
    subscriber->handle.tell_publishers();
    message_of(view, message);
    return 1;
}

}  // namespace

extern "C" {

void penstock_shm_options_init(penstock_shm_options *options) {
    std::memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
    options->vchan_id = -1;
}

const char *penstock_shm_error(void) { return last_error.c_str(); }

int penstock_shm_publisher_open(const char *name, const penstock_shm_options *options, penstock_shm_publisher **opened) {
    return guarded([&] {
        need(opened, "the handle to be opened");
        Options given = options_of(name, options);
        auto publisher = std::unique_ptr<penstock_shm_publisher>(
            new penstock_shm_publisher{{given, options && options->checksum}, options ? options->spin_us * 1000 : 0});
        if (options && options->activation) activate(publisher.get());
        *opened = publisher.release();
        return 0;
    });
}

void penstock_shm_publisher_close(penstock_shm_publisher *publisher) { delete publisher; }

int penstock_shm_reserve(penstock_shm_publisher *publisher, size_t size, double timeout_s, void **data, uint32_t *slot) {
    return guarded([&] {
        check(publisher);
        need(data, "the data");
        need(slot, "the slot");
        if (std::isnan(timeout_s)) deadline_of(timeout_s);  // refused whether or not it has to wait
        Publisher::Place place;
        reserve(publisher, size, timeout_s, place);
        clear_metadata(publisher->handle, place.slot);
        publisher->reserved[place.slot] = size;
        *data = place.data;
        *slot = place.slot;
        return 0;
    });
}

int penstock_shm_publish(penstock_shm_publisher *publisher, uint32_t slot, size_t size, uint64_t *ordinal) {
    return guarded([&] {
        check(publisher);
        Publisher::Place place = place_of(publisher->handle, slot);
        if (size > publisher->reserved[slot])
            throw Error(Fault::invalid, std::to_string(size) + " bytes are more than the " +
                                            std::to_string(publisher->reserved[slot]) + " that were reserved");
        std::uint64_t number = commit(publisher, place, size);
        publisher->reserved.erase(slot);
        if (ordinal) *ordinal = number;
        return 0;
    });
}

int penstock_shm_cancel(penstock_shm_publisher *publisher, uint32_t slot) {
    return guarded([&] {
        check(publisher);
        place_of(publisher->handle, slot);
        publisher->reserved.erase(slot);
        publisher->handle.cancel(slot);
        return 0;
    });
}

int penstock_shm_publish_copy(penstock_shm_publisher *publisher, const void *data, size_t size, double timeout_s,
                              uint64_t *ordinal) {
    return guarded([&] {
        check(publisher);
        if (size) need(data, "the data");
        if (std::isnan(timeout_s)) deadline_of(timeout_s);  // refused whether or not it has to wait
        Publisher::Place place;
        reserve(publisher, size, timeout_s, place);
        if (size) std::memcpy(place.data, data, size);
        clear_metadata(publisher->handle, place.slot);
        std::uint64_t number = commit(publisher, place, size);
        if (ordinal) *ordinal = number;
        return 0;
    });
}

int penstock_shm_set_metadata(penstock_shm_publisher *publisher, uint32_t slot, const void *metadata, size_t size) {
    return guarded([&] {
        check(publisher);
        place_of(publisher->handle, slot);
        if (size > publisher->handle.metadata_size())
            throw Error(Fault::invalid, std::to_string(size) + " bytes of metadata do not fit the channel's " +
                                            std::to_string(publisher->handle.metadata_size()));
        if (size) need(metadata, "the metadata");
        clear_metadata(publisher->handle, slot);
        if (size) std::memcpy(publisher->handle.metadata(slot), metadata, size);
        return 0;
    });
}

uint32_t penstock_shm_metadata_size(const penstock_shm_publisher *publisher) { return publisher->handle.metadata_size(); }

int penstock_shm_activate(penstock_shm_publisher *publisher) {
    return guarded([&] {
        check(publisher);
        return int(activate(publisher));
    });
}

int penstock_shm_retired(penstock_shm_publisher *publisher, double timeout_s, uint32_t *slots, size_t room) {
    return guarded([&] {
        check(publisher);
        if (room) need(slots, "the room for slots");
        if (!publisher->handle.retirement) throw Error(Fault::state, "open the publisher with retirement");
        if (std::int64_t deadline = deadline_of(timeout_s))
            persist([&] { return publisher->handle.wait_retired(deadline); });
        std::vector<std::uint32_t> released = publisher->handle.retired(room);
        std::copy(released.begin(), released.end(), slots);
        return int(std::min<std::uint64_t>(released.size() + publisher->handle.count_retired(), INT_MAX));
    });
}

int penstock_shm_publisher_fileno(penstock_shm_publisher *publisher) {
    return guarded([&] {
        check(publisher);
        Publisher &handle = publisher->handle;
        bool nothing = handle.writer.reliable && !handle.could_reserve();
        if (!handle.arm_if(nothing) || handle.could_reserve()) handle.wake();
        return handle.member.bells.watched();
    });
}

int penstock_shm_on_resize(penstock_shm_publisher *publisher, int (*function)(void *, uint64_t, uint64_t), void *context) {
    return guarded([&] {
        check(publisher);
        publisher->resize = function;
        publisher->resize_context = context;
        return 0;
    });
}

uint64_t penstock_shm_slot_size(penstock_shm_publisher *publisher) { return publisher->handle.slot_size(); }
int32_t penstock_shm_publisher_vchan_id(const penstock_shm_publisher *publisher) { return publisher->handle.writer.vchan; }

int penstock_shm_wait_ready(penstock_shm_publisher *publisher, uint32_t subscribers, double timeout_s) {
    return guarded([&] {
        check(publisher);
        std::int64_t deadline = deadline_of(timeout_s);
        return int(persist([&] { return publisher->handle.wait_subscribers(subscribers, deadline); }) == Woken::ready);
    });
}

int penstock_shm_publisher_wait(penstock_shm_publisher *publisher, double timeout_s, int descriptor) {
    return guarded([&] {
        check(publisher);
        std::int64_t deadline = deadline_of(timeout_s);
        if (deadline == 0) deadline = monotonic_ns();
        std::int64_t until = spin_until(publisher->spin_ns);
        return int(persist([&] { return publisher->handle.wait(deadline, until, descriptor); }) == Woken::ready);
    });
}

int penstock_shm_subscriber_open(const char *name, const penstock_shm_options *options, penstock_shm_subscriber **opened) {
    return guarded([&] {
        need(opened, "the handle to be opened");
        Options given = options_of(name, options);
        *opened = new penstock_shm_subscriber{{given, options && options->pass_activation, options && options->checksum},
                                              options ? options->spin_us * 1000 : 0};
        return 0;
    });
}

void penstock_shm_subscriber_close(penstock_shm_subscriber *subscriber) { delete subscriber; }

int penstock_shm_read(penstock_shm_subscriber *subscriber, double timeout_s, penstock_shm_message *message) {
    return guarded([&] {
        check(subscriber);
        need(message, "the message");
        Found found;
        if (std::isnan(timeout_s)) deadline_of(timeout_s);  // refused whether or not it has to wait
        std::int64_t deadline = -2;
        for (;;) {
            if (read_once(subscriber, message, found)) return 1;
            if (deadline == -2) deadline = deadline_of(timeout_s);
            Subscriber &handle = subscriber->handle;
            if (deadline == 0) {
                if (subscriber->watched && found == Found::limit) handle.arm_release();
                else if (subscriber->watched && !handle.arm()) continue;
                return 0;
            }
            // At the limit one thread alone could not end the wait.
            if (found == Found::limit) throw Error(Fault::capacity, handle.why_limit());
            std::int64_t until = spin_until(subscriber->spin_ns);
            if (persist([&] { return handle.wait(deadline, until, -1); }) == Woken::timeout) return 0;
        }
    });
}

int penstock_shm_read_newest(penstock_shm_subscriber *subscriber, penstock_shm_message *message) {
    return guarded([&] {
        check(subscriber);
        need(message, "the message");
        View view;
        if (subscriber->handle.read_newest(view) != Found::message) return 0;
        subscriber->handle.counters->note_read();
        message_of(view, message);
        return 1;
    });
}

int penstock_shm_release(penstock_shm_subscriber *subscriber, const penstock_shm_message *message) {
    return guarded([&] {
        check(subscriber);
        need(message, "the message");
        pin_of(subscriber, message);
        subscriber->handle.release(message->slot);
        return 0;
    });
}

int penstock_shm_find(penstock_shm_subscriber *subscriber, int64_t timestamp_ns, penstock_shm_message *message) {
    return guarded([&] {
        check(subscriber);
        need(message, "the message");
        return found(subscriber, [&](View &view) { return subscriber->handle.find(view, timestamp_ns); }, message);
    });
}

int penstock_shm_weak_of(penstock_shm_subscriber *subscriber, const penstock_shm_message *message, penstock_shm_weak *weak) {
    return guarded([&] {
        check(subscriber);
        need(message, "the message");
        need(weak, "the weak reference");
        *weak = {pin_of(subscriber, message).sequence, message->slot};
        return 0;
    });
}

int penstock_shm_weak_read(penstock_shm_subscriber *subscriber, const penstock_shm_weak *weak, penstock_shm_message *message) {
    return guarded([&] {
        check(subscriber);
        need(weak, "the weak reference");
        need(message, "the message");
        return found(subscriber, [&](View &view) { return subscriber->handle.again(view, weak->slot, weak->sequence); }, message);
    });
}

int penstock_shm_on_dropped(penstock_shm_subscriber *subscriber, void (*function)(void *, penstock_shm_subscriber *, uint64_t),
                            void *context) {
    return guarded([&] {
        check(subscriber);
        subscriber->dropped = function;
        subscriber->dropped_context = context;
        return 0;
    });
}

int penstock_shm_wait(penstock_shm_subscriber *subscriber, double timeout_s, int descriptor) {
    return guarded([&] {
        check(subscriber);
        std::int64_t deadline = deadline_of(timeout_s);
        if (deadline == 0) deadline = monotonic_ns();
        if (subscriber->kept) return 1;
        std::int64_t until = spin_until(subscriber->spin_ns);
        return int(persist([&] { return subscriber->handle.wait(deadline, until, descriptor); }) == Woken::ready);
    });
}

int penstock_shm_fileno(penstock_shm_subscriber *subscriber) {
    return guarded([&] {
        check(subscriber);
        int descriptor = subscriber->handle.member.bells.watched();
        if (!subscriber->watched) {
            subscriber->watched = true;
            if (!subscriber->handle.arm()) subscriber->handle.wake();
        }
        return descriptor;
    });
}

int penstock_shm_on_message(penstock_shm_subscriber *subscriber,
                            void (*function)(void *, penstock_shm_subscriber *, const penstock_shm_message *), void *context) {
    return guarded([&] {
        check(subscriber);
        subscriber->callback = function;
        subscriber->callback_context = context;
        return 0;
    });
}

int penstock_shm_process_all(penstock_shm_subscriber *subscriber) {
    return guarded([&] {
        check(subscriber);
        int count = 0;
        Found found;
        penstock_shm_message message;
        Subscriber &handle = subscriber->handle;
        if (!subscriber->kept && !handle.has_next()) return 0;
        std::uint64_t end = handle.member.channel.tail();  // what comes meanwhile is for the next call
        while (subscriber->callback && (subscriber->kept || handle.reader.cursor < end) &&
               read_once(subscriber, &message, found)) {
            subscriber->callback(subscriber->callback_context, subscriber, &message);
            subscriber->handle.release(message.slot);
            ++count;
        }
        return count;
    });
}

uint64_t penstock_shm_dropped(const penstock_shm_subscriber *subscriber) { return subscriber->handle.counters->lost(); }
int32_t penstock_shm_subscriber_vchan_id(const penstock_shm_subscriber *subscriber) { return subscriber->handle.reader.vchan; }

int penstock_shm_channels(void (*function)(void *, const penstock_shm_channel *), void *context) {
    return guarded([&] {
        std::vector<ChannelView> channels = list_channels();
        for (const ChannelView &view : channels) {
            auto publishers = std::uint32_t(std::count_if(view.members.begin(), view.members.end(),
                                                          [](const MemberView &member) { return member.is_publisher; }));
            penstock_shm_channel channel = {view.name.c_str(), view.type.c_str(), view.problem.c_str(), view.slots, publishers,
                                            std::uint32_t(view.members.size()) - publishers, view.slot_size, view.messages,
                                            view.memory_bytes, (view.flags & channel_mux) != 0};
            if (function) function(context, &channel);
        }
        return int(channels.size());
    });
}

int penstock_shm_clean(void) {
    return guarded([] { return int(clean_channels().removed.size()); });
}

}  // extern "C"
