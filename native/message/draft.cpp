// Draft: the writable buffer between reserve and publish. Bytes that readers see are never changed through it: publishing
// releases the memoryviews that view() gave and makes the arrays that array() gave read-only. Other writable views (a
// memoryview that a user made, a slice of such a view or array) cannot be revoked: publishing a draft that has one is
// refused.
//
// The draft has only weak references to its views and arrays: they refer to the draft, and a cycle would keep its memory.
#include <Python.h>
#include <structmember.h>

#include <cstring>
#include <initializer_list>
#include <utility>

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

void cancel_memory(Draft *draft) {
    draft->state = DraftState::cancelled;
    if (draft->exports == 0) give_back(draft);
    else draft->token = draft->owner->strand(draft->token);
}

void stop_lending(Draft *draft) {
    if (std::exchange(draft->lent, false)) draft->owner->let_go(draft->token);
}

void draft_dealloc(PyObject *self) {
    Draft *draft = as_draft(self);
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (draft->weakrefs) PyObject_ClearWeakRefs(self);
    give_back(draft);
    Py_XDECREF(draft->views);
    Py_XDECREF(draft->arrays);
    Py_XDECREF(draft->keep);
    type->tp_free(self);
    Py_DECREF(type);
}

// A publisher may have the draft among its attributes: the collector sees the cycle and breaks it there.
int draft_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_draft(self)->keep);
    return 0;
}

bool refuse_inherited() {
    raise_error("StateError", "this draft was reserved before this process was forked, and its memory is the parent's; open "
                              "a publisher in the child");
    return false;
}

// Whether who lent the memory still lends it. Before the state is checked: it may run Python, which may publish the draft.
bool check_lender(Draft *draft) {
    if (draft->state != DraftState::open) return true;
    if (draft->owner->inherited()) [[unlikely]]
        return refuse_inherited();
    if (!draft->owner->closed(draft)) [[likely]]
        return true;
    raise_error("ClosedError", "this publisher was closed; its draft cannot be written or published any more");
    return false;
}

// `to_use`: not only to be cancelled, which a forked child may do: it changes nothing of its parent's.
bool check_open(Draft *draft, bool to_use = true) {
    if (to_use && !check_lender(draft)) return false;
    if (draft->state == DraftState::open) return true;
    raise_error("StateError", draft->state == DraftState::published ? "this draft was published before"
                                                                    : "this draft was cancelled");
    return false;
}

int draft_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    Draft *draft = as_draft(self);
    if (!check_lender(draft)) [[unlikely]] {
        view->obj = nullptr;
        return -1;
    }
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
    if (--draft->exports) return;
    if (draft->state == DraftState::cancelled) give_back(draft);
    stop_lending(draft);
}

PyObject *object_of(PyObject *reference) { return PyObject_CallNoArgs(reference); }  // None where it is gone

// Adds weak references to `objects` to the list, and removes those of destroyed objects.
bool remember(PyObject *&list, std::initializer_list<PyObject *> objects) {
    if (!list && !(list = PyList_New(0))) return false;
    auto group = static_cast<Py_ssize_t>(objects.size());
    for (Py_ssize_t i = PyList_GET_SIZE(list) - group; i >= 0; i -= group) {
        PyObject *first = object_of(PyList_GET_ITEM(list, i));
        bool gone = first == Py_None;
        Py_XDECREF(first);
        if (gone && PyList_SetSlice(list, i, i + group, nullptr) != 0) return false;
    }
    for (PyObject *object : objects) {
        PyObject *reference = PyWeakref_NewRef(object, nullptr);
        int failed = reference ? PyList_Append(list, reference) : -1;
        Py_XDECREF(reference);
        if (failed) return false;
    }
    return true;
}

PyObject *draft_view(PyObject *self, PyObject *) {
    Draft *draft = as_draft(self);
    if (!check_open(draft)) return nullptr;
    PyObject *view = PyMemoryView_FromObject(self);
    if (view && !remember(draft->views, {view})) Py_CLEAR(view);
    return view;
}

// Releases the memoryviews that view() gave, but for those that are exported themselves.
void release_views(Draft *draft) {
    PyObject *views = std::exchange(draft->views, nullptr);
    for (Py_ssize_t i = 0; views && i < PyList_GET_SIZE(views); ++i) {
        PyObject *view = object_of(PyList_GET_ITEM(views, i));
        PyObject *done = view && view != Py_None ? PyObject_CallMethod(view, "release", nullptr) : nullptr;
        if (!done) PyErr_Clear();  // publish reports it, and says what to do
        Py_XDECREF(done);
        Py_XDECREF(view);
    }
    Py_XDECREF(views);
}

// Calls function(root, given) for each array that is still alive: root is the array that holds the draft's buffer;
// given, the view of it that array() returned, may be None. False if the function returns false.
template <typename Function>
bool each_array(Draft *draft, Function &&function) {
    PyObject *arrays = Py_XNewRef(draft->arrays);
    bool going = true;
    for (Py_ssize_t i = 0; arrays && going && i + 1 < PyList_GET_SIZE(arrays); i += 2) {
        PyObject *root = object_of(PyList_GET_ITEM(arrays, i)), *given = object_of(PyList_GET_ITEM(arrays, i + 1));
        going = root && given && (root == Py_None || function(root, given));
        Py_XDECREF(given);
        Py_XDECREF(root);
    }
    Py_XDECREF(arrays);
    return going;
}

// Every view of an array has a reference to its root. One is ours, one is the given array's; any other view could
// write.
bool has_slices(Draft *draft, std::uint32_t &roots) {
    roots = 0;
    return !each_array(draft, [&](PyObject *root, PyObject *given) {
        ++roots;
        return Py_REFCNT(root) <= (given == Py_None ? 1 : 2);
    });
}

bool set_writable(Draft *draft, bool writable) {
    return each_array(draft, [&](PyObject *root, PyObject *given) {
        for (PyObject *array : {root, given}) {
            PyObject *done = array == Py_None ? Py_NewRef(Py_None)
                                              : PyObject_CallMethod(array, "setflags", "O", writable ? Py_True : Py_False);
            Py_XDECREF(done);
            if (!done) return false;
        }
        return true;
    });
}

PyObject *publish_size(Draft *draft, Py_ssize_t size) {
    if (!check_open(draft)) return nullptr;
    if (size < 0 || size > draft->size)
        return raise_error("InvalidArgument", "size %zd is not between 0 and the %zd bytes reserved", size,
                           static_cast<Py_ssize_t>(draft->size));
    if (!draft_begin_publish(draft)) return nullptr;
    return draft_end_publish(draft, draft->owner->publish(reinterpret_cast<PyObject *>(draft), draft->token, size));
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
    if (!check_open(draft, false)) return nullptr;
    release_views(draft);
    cancel_memory(draft);
    Py_RETURN_NONE;
}

PyObject *draft_write(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Draft *draft = as_draft(self);
    if (count < 1 || count > 2) return PyErr_Format(PyExc_TypeError, "write() takes data and an offset");
    Py_ssize_t offset = 0;
    if (count == 2) {
        offset = PyNumber_AsSsize_t(arguments[1], PyExc_OverflowError);
        if (offset == -1 && PyErr_Occurred()) return nullptr;
    }
    Py_buffer data;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_CONTIG_RO) != 0) return nullptr;
    if (!check_open(draft)) {  // after everything that runs other code, which may have closed the publisher
        PyBuffer_Release(&data);
        return nullptr;
    }
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
    Draft *draft = as_draft(self);
    if (!check_open(draft)) return nullptr;
    PyObject *root = nullptr;
    PyObject *array = array_over(self, arguments, count, names, &root);
    if (array && root && !remember(draft->arrays, {root, array})) Py_CLEAR(array);
    Py_XDECREF(root);
    return array;
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
    PyObject *result = publish_size(draft, static_cast<Py_ssize_t>(draft->size));
    if (!result && draft->state == DraftState::open && !PyErr_ExceptionMatches(PyExc_BufferError)) {
        // nobody will publish it after its block; after a BufferError the user still can
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        cancel_memory(draft);
        PyErr_Restore(type, value, trace);
    }
    if (!result) return nullptr;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

Py_ssize_t draft_length(PyObject *self) { return static_cast<Py_ssize_t>(as_draft(self)->size); }

// Items are bytes; a slice accepts any buffer of the same size. Reading a slice gives a copy: a view could still be
// written to after the draft was published.
bool find_slice(Draft *draft, PyObject *key, Py_ssize_t &begin, Py_ssize_t &step, Py_ssize_t &count) {
    Py_ssize_t end = 0;
    if (PySlice_Unpack(key, &begin, &end, &step) != 0) return false;
    count = PySlice_AdjustIndices(static_cast<Py_ssize_t>(draft->size), &begin, &end, step);
    return true;
}

bool find_item(Draft *draft, PyObject *key, Py_ssize_t &index) {
    if (!PyIndex_Check(key)) {
        PyErr_Format(PyExc_TypeError, "a draft is indexed by numbers and slices, not %s", Py_TYPE(key)->tp_name);
        return false;
    }
    index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) return false;
    const auto size = static_cast<Py_ssize_t>(draft->size);
    const Py_ssize_t asked = index;
    if (index < 0) index += size;
    if (index >= 0 && index < size) return true;
    PyErr_Format(PyExc_IndexError, "byte %zd is not among the %zd reserved", asked, size);
    return false;
}

PyObject *draft_get_item(PyObject *self, PyObject *key) {
    Draft *draft = as_draft(self);
    Py_ssize_t begin = 0, step = 0, count = 0;
    if (!PySlice_Check(key)) {
        if (!find_item(draft, key, begin) || !check_open(draft)) return nullptr;
        return PyLong_FromLong(draft->data[begin]);
    }
    if (!find_slice(draft, key, begin, step, count) || !check_open(draft)) return nullptr;
    PyObject *copy = PyBytes_FromStringAndSize(nullptr, count);
    if (!copy) return nullptr;
    char *out = PyBytes_AS_STRING(copy);
    for (Py_ssize_t i = 0; i < count; ++i) out[i] = static_cast<char>(draft->data[begin + i * step]);
    return copy;
}

int set_slice(Draft *draft, PyObject *key, PyObject *value) {
    Py_ssize_t begin = 0, step = 0, count = 0;
    Py_buffer data;
    if (!find_slice(draft, key, begin, step, count)) return -1;
    if (PyObject_GetBuffer(value, &data, PyBUF_CONTIG_RO) != 0) return -1;
    bool done = false;
    if (data.len != count)
        raise_error("InvalidArgument", "this slice of the draft has %zd bytes, not %zd: publish(size) sends fewer than "
                                       "were reserved", count, data.len);
    else done = check_open(draft);  // checked after everything that runs other code, which may have published it
    const auto *from = static_cast<const std::uint8_t *>(data.buf);
    if (done && count && step == 1) std::memmove(draft->data + begin, from, static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; done && step != 1 && i < count; ++i) draft->data[begin + i * step] = from[i];
    PyBuffer_Release(&data);
    return done ? 0 : -1;
}

int draft_set_item(PyObject *self, PyObject *key, PyObject *value) {
    Draft *draft = as_draft(self);
    if (!value) {
        PyErr_SetString(PyExc_TypeError, "bytes of a draft cannot be deleted: publish(size) sends fewer than were reserved");
        return -1;
    }
    if (PySlice_Check(key)) return set_slice(draft, key, value);
    Py_ssize_t index = 0;
    if (!find_item(draft, key, index)) return -1;
    if (!PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "an item of a draft is a number from 0 to 255, not %s", Py_TYPE(value)->tp_name);
        return -1;
    }
    // clipped, so that a number that is too large stays too large
    const Py_ssize_t number = PyNumber_AsSsize_t(value, nullptr);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (number < 0 || number > 255) {
        raise_error("InvalidArgument", "an item of a draft is a number from 0 to 255");
        return -1;
    }
    if (!check_open(draft)) return -1;
    draft->data[index] = static_cast<std::uint8_t>(number);
    return 0;
}

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
     "publish(size=None, /)\n--\n\nPublish the first size bytes (all of them by default).\n\nMemoryviews of view() "
     "are released, arrays of array() become read-only. Raises BufferError, and publishes nothing, while somebody else "
     "could write: a slice of either, or a view made by other means."},
    {"cancel", draft_cancel, METH_NOARGS, "cancel()\n--\n\nGive the memory back unpublished."},
    {"view", draft_view, METH_NOARGS,
     "view()\n--\n\nA writable memoryview, which publishing or cancelling releases."},
    {"write", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(draft_write)), METH_FASTCALL,
     "write(data, offset=0, /)\n--\n\nCopy data in; returns the offset after it."},
    {"array", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(draft_array)), METH_FASTCALL | METH_KEYWORDS,
     "array(shape=None, dtype='uint8')\n--\n\nA writable numpy array over the draft, without a copy; "
     "publishing makes it read-only."},
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
    {Py_tp_traverse, reinterpret_cast<void *>(draft_traverse)},
    {Py_tp_repr, reinterpret_cast<void *>(draft_repr)},
    {Py_tp_methods, draft_methods},
    {Py_tp_getset, draft_getset},
    {Py_tp_members, draft_members},
    {Py_mp_length, reinterpret_cast<void *>(draft_length)},
    {Py_mp_subscript, reinterpret_cast<void *>(draft_get_item)},
    {Py_mp_ass_subscript, reinterpret_cast<void *>(draft_set_item)},
    {Py_bf_getbuffer, reinterpret_cast<void *>(draft_getbuffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void *>(draft_releasebuffer)},
    {0, nullptr}};

PyType_Spec draft_spec = {"penstock._core.Draft", sizeof(Draft), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, draft_slots};

}  // namespace

PyObject *draft_new(std::uint8_t *data, std::int64_t size, DraftOwner *owner, std::uint64_t token, PyObject *keep) {
    auto *draft = PyObject_GC_New(Draft, draft_type);
    if (!draft) return nullptr;
    draft->data = data;
    draft->size = size;
    draft->owner = owner;
    draft->token = token;
    draft->keep = Py_XNewRef(keep);
    draft->views = nullptr;
    draft->arrays = nullptr;
    draft->weakrefs = nullptr;
    draft->exports = 0;
    draft->state = DraftState::open;
    draft->memory_held = true;
    draft->lent = false;
    PyObject_GC_Track(reinterpret_cast<PyObject *>(draft));
    return reinterpret_cast<PyObject *>(draft);
}

bool keeper_closed(const Draft *draft) {
    PyObject *value = draft->keep ? PyObject_GetAttrString(draft->keep, "closed") : nullptr;
    const bool closed = value && PyObject_IsTrue(value) == 1;
    Py_XDECREF(value);
    if (PyErr_Occurred()) PyErr_Clear();  // publishing says what is wrong with it
    return closed;
}

bool draft_begin_publish(Draft *draft) {
    if (!check_open(draft)) return false;
    std::uint32_t roots = 0;
    bool slices = false;
    if (draft->exports) [[unlikely]] {
        slices = has_slices(draft, roots);
        if (!slices) release_views(draft);
    }
    if (PyErr_Occurred()) return false;
    if (slices || draft->exports != roots) {
        PyErr_SetString(PyExc_BufferError,
                        "a writable view of this draft is still alive (a slice of its array or view, or one made by "
                        "memoryview(draft)); delete it and publish again: nothing was published");
        return false;
    }
    if (roots && !set_writable(draft, false)) return false;
    // Set first: other threads that publish, cancel or write to it while its owner waits must see it as published.
    draft->state = DraftState::published;
    if (roots) draft->owner->hold(draft->token), draft->lent = true;
    return true;
}

PyObject *draft_end_publish(Draft *draft, PyObject *result) {
    if (result) {
        draft->memory_held = false;
        if (draft->exports == 0) stop_lending(draft);
    } else if (draft->memory_held) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        stop_lending(draft);
        draft->state = DraftState::open;
        if (draft->arrays && !set_writable(draft, true)) PyErr_WriteUnraisable(nullptr);
        PyErr_Restore(type, value, trace);
    }
    return result;
}

bool draft_ready(PyObject *module) {
    draft_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&draft_spec));
    return draft_type && PyModule_AddObjectRef(module, "Draft", reinterpret_cast<PyObject *>(draft_type)) == 0;
}

}  // namespace penstock
