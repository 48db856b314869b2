// Messages of shared memory, made of what was read.
#include "shm/bindings_subscriber.hpp"

namespace penstock::shm {

bool check_intact(SubscriberObject *self, const View &view) {
    if (view.intact) [[likely]] return true;
    self->handle->counters->errors.add();
    if (!self->refuse_broken) return true;
    self->handle->release(view.slot);
    raise_error("CorruptionError", "%s: the checksum of message %llu does not match its %llu bytes",
                self->handle->member.describe().c_str(), static_cast<unsigned long long>(view.ordinal),
                static_cast<unsigned long long>(view.size));
    return false;
}

PyObject *message_of(SubscriberObject *self, const View &view) {
    if (!check_intact(self, view)) return nullptr;
    Envelope envelope;
    envelope_of(view, envelope);
    PyObject *message = message_new(envelope, &self->holder, self->channel, reinterpret_cast<PyObject *>(self));
    if (!message) self->handle->release(view.slot);
    return message;
}

}  // namespace penstock::shm
