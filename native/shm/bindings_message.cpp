// Messages of penstock._core.shm: plain ones, and those that carry metadata or a verified checksum.
#include "shm/bindings_subscriber.hpp"

namespace penstock::shm {

namespace {

// A message with what only this reach has. Plain messages are made where the channel has neither.
struct RichMessage {
    Message message;
    PyObject *metadata;
    bool intact;
};
PyTypeObject *rich_type = nullptr;

void rich_dealloc(PyObject *self) {
    Py_CLEAR(reinterpret_cast<RichMessage *>(self)->metadata);
    message_type->tp_dealloc(self);  // frees and gives the type back
}
PyObject *rich_metadata(PyObject *self, void *) {
    PyObject *metadata = reinterpret_cast<RichMessage *>(self)->metadata;
    return metadata ? Py_NewRef(metadata) : PyBytes_FromStringAndSize(nullptr, 0);
}
PyObject *rich_intact(PyObject *self, void *) { return PyBool_FromLong(reinterpret_cast<RichMessage *>(self)->intact); }

PyGetSetDef rich_getset[] = {
    {"metadata", rich_metadata, nullptr, "The publisher's metadata, metadata_size bytes.", nullptr},
    {"intact", rich_intact, nullptr, "False when the checksum does not match the bytes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot rich_slots[] = {{Py_tp_doc, const_cast<char *>("A message with metadata or a verified checksum.")},
                            {Py_tp_dealloc, reinterpret_cast<void *>(rich_dealloc)},
                            {Py_tp_getset, rich_getset},
                            {0, nullptr}};

PyType_Spec rich_spec = {"penstock._core.shm.Message", sizeof(RichMessage), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, rich_slots};

}  // namespace

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
    Subscriber *handle = self->handle;
    if (!check_intact(self, view)) return nullptr;
    Envelope envelope;
    envelope_of(view, envelope);
    PyObject *message;
    if (!view.metadata_size && (self->refuse_broken || !handle->verify)) [[likely]] {
        message = message_new(envelope, &self->holder, self->channel, reinterpret_cast<PyObject *>(self));
    } else {
        PyObject *metadata = nullptr;
        if (view.metadata_size)
            metadata = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(view.metadata), view.metadata_size);
        message = PyErr_Occurred() ? nullptr
                                   : message_new_of(rich_type, envelope, &self->holder, self->channel,
                                                    reinterpret_cast<PyObject *>(self));
        if (message) {
            reinterpret_cast<RichMessage *>(message)->metadata = metadata;
            reinterpret_cast<RichMessage *>(message)->intact = view.intact;
        } else {
            Py_XDECREF(metadata);
        }
    }
    if (!message) handle->release(view.slot);
    return message;
}

bool message_ready(PyObject *module) {
    rich_type = reinterpret_cast<PyTypeObject *>(
        PyType_FromSpecWithBases(&rich_spec, reinterpret_cast<PyObject *>(message_type)));
    return rich_type && PyModule_AddObjectRef(module, "Message", reinterpret_cast<PyObject *>(rich_type)) == 0;
}

}  // namespace penstock::shm
