// Draft: the writable buffer between reserve and publish. A view cannot be taken back from who holds it, so a draft
// with a live view is not published: the bytes that readers see can then never be changed through it.
#include <Python.h>
#include <structmember.h>

#include "message/arguments.hpp"
#include "message/message.hpp"

namespace penstock {

PyTypeObject *draft_type = nullptr;

namespace {

Draft *as_draft(PyObject *self) { return reinterpret_cast<Draft *>(self); }

void give_back(Draft *draft) {
    if (!draft->memory_held) return;
    draft->memory_held = false;
    draft->owner->cancel(draft->token);
}

void draft_dealloc(PyObject *self) {
    Draft *draft = as_draft(self);
    PyTypeObject *type = Py_TYPE(self);
    if (draft->weakrefs) PyObject_ClearWeakRefs(self);
    give_back(draft);
    Py_XDECREF(draft->views);
    Py_XDECREF(draft->keep);
    type->tp_free(self);
    Py_DECREF(type);
}

bool check_open(Draft *draft) {
    if (draft->state == DraftState::open) return true;
    raise_error("StateError", draft->state == DraftState::published ? "this draft was published before"
                                                                    : "this draft was cancelled");
    return false;
}

int draft_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    Draft *draft = as_draft(self);
    if (draft->state != DraftState::open) {
        view->obj = nullptr;
        PyErr_Format(PyExc_BufferError, "this draft was %s; its memory cannot be written any more",
                     draft->state == DraftState::published ? "published" : "cancelled");
        return -1;
    }
    static std::uint8_t nothing = 0;
    if (PyBuffer_FillInfo(view, self, draft->data ? draft->data : &nothing, draft->size, 0, flags) != 0) return -1;
    ++draft->exports;
    return 0;
}

void draft_releasebuffer(PyObject *self, Py_buffer *) {
    Draft *draft = as_draft(self);
    if (--draft->exports == 0 && draft->state == DraftState::cancelled) give_back(draft);
}

PyObject *draft_view(PyObject *self, PyObject *) {
    Draft *draft = as_draft(self);
    if (!check_open(draft)) return nullptr;
    if (!draft->views) {
        draft->views = PyList_New(0);
        if (!draft->views) return nullptr;
    }
    PyObject *view = PyMemoryView_FromObject(self);
    if (view && PyList_Append(draft->views, view) != 0) Py_CLEAR(view);
    return view;
}

// Releases the memoryviews that view() gave; false with an error set where one of them is itself exported.
bool drop_views(Draft *draft) {
    if (!draft->views) return true;
    PyObject *views = draft->views;
    draft->views = nullptr;
    bool dropped = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(views); ++i) {
        PyObject *done = PyObject_CallMethod(PyList_GET_ITEM(views, i), "release", nullptr);
        if (!done) {
            dropped = false;
            PyErr_Clear();  // publish tells it, with what to do about it
        }
        Py_XDECREF(done);
    }
    Py_DECREF(views);
    return dropped;
}

PyObject *publish_size(Draft *draft, Py_ssize_t size) {
    if (!check_open(draft)) return nullptr;
    if (size < 0 || size > draft->size)
        return raise_error("InvalidArgument", "size %zd is not between 0 and the %zd bytes reserved", size,
                           static_cast<Py_ssize_t>(draft->size));
    if (draft->exports)
        return PyErr_Format(PyExc_BufferError,
                            "%u writable view(s) of this draft are still alive; delete them (del array) and publish "
                            "again: nothing was published",
                            draft->exports);
    // First: whoever publishes, cancels or writes to it while its owner waits finds it published.
    draft->state = DraftState::published;
    PyObject *result = draft->owner->publish(reinterpret_cast<PyObject *>(draft), draft->token, size);
    if (result) draft->memory_held = false;
    else if (draft->memory_held) draft->state = DraftState::open;
    return result;
}

PyObject *draft_publish(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Draft *draft = as_draft(self);
    Py_ssize_t size = static_cast<Py_ssize_t>(draft->size);
    if (count > 1) return PyErr_Format(PyExc_TypeError, "publish() takes at most a size, not %zd arguments", count);
    if (count == 1 && arguments[0] != Py_None) {
        size = PyNumber_AsSsize_t(arguments[0], PyExc_OverflowError);
        if (size == -1 && PyErr_Occurred()) return nullptr;
    }
    return publish_size(draft, size);
}

PyObject *draft_cancel(PyObject *self, PyObject *) {
    Draft *draft = as_draft(self);
    if (!check_open(draft)) return nullptr;
    drop_views(draft);
    draft->state = DraftState::cancelled;
    if (draft->exports == 0) give_back(draft);
    Py_RETURN_NONE;
}

PyObject *draft_write(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Draft *draft = as_draft(self);
    if (!check_open(draft)) return nullptr;
    if (count < 1 || count > 2) return PyErr_Format(PyExc_TypeError, "write() takes data and an offset");
    Py_ssize_t offset = 0;
    if (count == 2) {
        offset = PyNumber_AsSsize_t(arguments[1], PyExc_OverflowError);
        if (offset == -1 && PyErr_Occurred()) return nullptr;
    }
    Py_buffer data;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_CONTIG_RO) != 0) return nullptr;
    Py_ssize_t room = static_cast<Py_ssize_t>(draft->size);
    if (offset < 0 || offset > room || data.len > room - offset) {
        raise_error("InvalidArgument", "%zd bytes at offset %zd do not fit the %zd bytes reserved", data.len, offset,
                    room);
        PyBuffer_Release(&data);
        return nullptr;
    }
    if (data.len) PyBuffer_ToContiguous(draft->data + offset, &data, data.len, 'C');
    offset += data.len;
    PyBuffer_Release(&data);
    return PyLong_FromSsize_t(offset);
}

PyObject *draft_array(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    return array_over(self, arguments, count, names);
}

PyObject *draft_enter(PyObject *self, PyObject *) { return Py_NewRef(self); }

PyObject *draft_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Draft *draft = as_draft(self);
    if (draft->state != DraftState::open) Py_RETURN_NONE;
    if (count > 0 && arguments[0] != Py_None) {
        PyObject *done = draft_cancel(self, nullptr);
        Py_XDECREF(done);
        return done ? Py_NewRef(Py_None) : nullptr;
    }
    drop_views(draft);
    PyObject *result = publish_size(draft, static_cast<Py_ssize_t>(draft->size));
    if (!result) {  // nothing was published; the memory goes back now or with the last view
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        draft->state = DraftState::cancelled;
        if (draft->exports == 0) give_back(draft);
        PyErr_Restore(type, value, trace);
        return nullptr;
    }
    Py_DECREF(result);
    Py_RETURN_NONE;
}

Py_ssize_t draft_length(PyObject *self) { return static_cast<Py_ssize_t>(as_draft(self)->size); }

PyObject *draft_repr(PyObject *self) {
    Draft *draft = as_draft(self);
    static const char *const states[] = {"open", "published", "cancelled"};
    return PyUnicode_FromFormat("<Draft of %zd bytes, %s>", static_cast<Py_ssize_t>(draft->size),
                                states[static_cast<int>(draft->state)]);
}

PyObject *get_size(PyObject *self, void *) { return PyLong_FromLongLong(as_draft(self)->size); }
PyObject *get_open(PyObject *self, void *) { return PyBool_FromLong(as_draft(self)->state == DraftState::open); }
PyObject *get_address(PyObject *self, void *) { return PyLong_FromVoidPtr(as_draft(self)->data); }

PyMethodDef draft_methods[] = {
    {"publish", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(draft_publish)), METH_FASTCALL,
     "publish(size=None, /)\n--\n\nPublish the first size bytes (all of them by default).\n\nRaises BufferError, and "
     "publishes nothing, while a writable view of the draft is alive."},
    {"cancel", draft_cancel, METH_NOARGS, "cancel()\n--\n\nGive the memory back unpublished."},
    {"view", draft_view, METH_NOARGS,
     "view()\n--\n\nA writable memoryview, which leaving the with block or cancel() releases."},
    {"write", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(draft_write)), METH_FASTCALL,
     "write(data, offset=0, /)\n--\n\nCopy data in; returns the offset after it."},
    {"array", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(draft_array)), METH_FASTCALL | METH_KEYWORDS,
     "array(shape=None, dtype='uint8')\n--\n\nA writable numpy array over the draft, without a copy."},
    {"__enter__", draft_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(draft_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef draft_getset[] = {{"size", get_size, nullptr, "Bytes reserved.", nullptr},
                              {"open", get_open, nullptr, "Neither published nor cancelled yet.", nullptr},
                              {"address", get_address, nullptr, "Where the bytes are in memory.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef draft_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Draft, weakrefs), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};

PyType_Slot draft_slots[] = {
    {Py_tp_doc, const_cast<char *>("The writable buffer between reserve and publish.\n\nLeaving its with block "
                                   "publishes it; an exception there cancels it.")},
    {Py_tp_dealloc, reinterpret_cast<void *>(draft_dealloc)},
    {Py_tp_repr, reinterpret_cast<void *>(draft_repr)},
    {Py_tp_methods, draft_methods},
    {Py_tp_getset, draft_getset},
    {Py_tp_members, draft_members},
    {Py_sq_length, reinterpret_cast<void *>(draft_length)},
    {Py_bf_getbuffer, reinterpret_cast<void *>(draft_getbuffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void *>(draft_releasebuffer)},
    {0, nullptr}};

PyType_Spec draft_spec = {"penstock._core.Draft", sizeof(Draft), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, draft_slots};

}  // namespace

PyObject *draft_new(std::uint8_t *data, std::int64_t size, DraftOwner *owner, std::uint64_t token, PyObject *keep) {
    auto *draft = PyObject_New(Draft, draft_type);
    if (!draft) return nullptr;
    draft->data = data;
    draft->size = size;
    draft->owner = owner;
    draft->token = token;
    draft->keep = Py_XNewRef(keep);
    draft->views = nullptr;
    draft->weakrefs = nullptr;
    draft->exports = 0;
    draft->state = DraftState::open;
    draft->memory_held = true;
    return reinterpret_cast<PyObject *>(draft);
}

bool draft_ready(PyObject *module) {
    draft_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&draft_spec));
    return draft_type && PyModule_AddObjectRef(module, "Draft", reinterpret_cast<PyObject *>(draft_type)) == 0;
}

}  // namespace penstock
