// GatewayMessage: a Message (its buffer is the content) whose properties and content never change and which any number
// of modules hold by reference: release() leaves it alone, the last reference gives the memory back.
//
// Its memory begins with the bus's header, so that the queues of a bus take it as one of their own.
#include <cstring>
#include <new>

#include "gateway/codec.hpp"
#include "gateway/objects.hpp"
#include "gil.hpp"
#include "message/wall_clock.hpp"

namespace penstock::gateway {

PyTypeObject *message_type = nullptr;

namespace {

constexpr std::size_t copied_frame_bytes = 65536;

Message *as_message(PyObject *self) { return reinterpret_cast<Message *>(self); }

// What one message keeps alive: the object that lends the content (bytes or another message), or null if it was copied,
// and the bytes made for it, which follow this struct.
struct Block final : Owner {
    bus::Header header{};
    Py_buffer content{};
    bool shared = false;  // the lender lends the properties too
    std::uint8_t *room() { return reinterpret_cast<std::uint8_t *>(this + 1); }

    void release(std::uint64_t) noexcept override {
        if (content.obj) calling_python([&] { PyBuffer_Release(&content); });
        this->~Block();
        PyMem_Free(this);
    }
    static Block *make(std::size_t bytes) {
        void *memory = PyMem_Malloc(sizeof(Block) + bytes);
        if (!memory) {
            PyErr_NoMemory();
            return nullptr;
        }
        return new (memory) Block;
    }
};

// Bytes that may be lent instead of copied: nothing else can change them.
bool may_lend(PyObject *object) { return PyBytes_CheckExact(object) || message_check(object); }

// The gateway message that lends this one its content, or null: it owns its content, or has it from another object.
PyObject *lender_of(PyObject *message) {
    const auto *block = static_cast<Block *>(as_message(message)->owner);
    PyObject *lender = block ? block->content.obj : nullptr;
    return lender && PyObject_TypeCheck(lender, message_type) ? lender : nullptr;
}

// The object that owns the content of `object`. A message that is published again and again (in a ring of modules)
// borrows from the first one; a chain of messages that hold each other would grow without end.
PyObject *content_holder(PyObject *object) {
    if (!PyObject_TypeCheck(object, message_type)) return object;
    while (PyObject *lender = lender_of(object)) object = lender;
    return object;
}

PyObject *finish(PyTypeObject *type, Envelope &envelope, Block *block) {
    envelope.token = reinterpret_cast<std::uint64_t>(&block->header);
    PyObject *self = message_new_of(type, envelope, block, nullptr, nullptr);
    if (!self) block->release(0);
    return self;
}

bool too_large(std::size_t properties, std::size_t content) {
    if (encoded_size(properties, content) <= largest_size) return false;
    raise_error("InvalidArgument", "a gateway message has at most %zu bytes with its properties, this one has %zu",
                largest_size, encoded_size(properties, content));
    return true;
}

// One text of a property; null with an error set where it cannot be encoded.
const char *property_text(PyObject *object, const char *what, Py_ssize_t *size) {
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "a property's %s is a str, not %s: %R", what, Py_TYPE(object)->tp_name, object);
        return nullptr;
    }
    const char *text = PyUnicode_AsUTF8AndSize(object, size);
    if (text && std::memchr(text, 0, static_cast<std::size_t>(*size))) {
        raise_error("InvalidArgument", "a property's %s cannot hold a NUL: %R", what, object);
        return nullptr;
    }
    return text;
}

// The bytes that the properties of `dict` take, or -1 with an error set.
Py_ssize_t properties_size(PyObject *dict) {
    Py_ssize_t total = 0, at = 0, size;
    PyObject *key, *value;
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (!property_text(key, "key", &size)) return -1;
        total += size + 1;
        if (!property_text(value, "value", &size)) return -1;
        total += size + 1;
    }
    return total;
}

void write_properties(PyObject *dict, std::uint8_t *out) {
    Py_ssize_t at = 0, size;
    PyObject *key, *value;
    while (PyDict_Next(dict, &at, &key, &value)) {
        for (PyObject *object : {key, value}) {
            const char *text = PyUnicode_AsUTF8AndSize(object, &size);  // encoded by properties_size, so it is there
            std::memcpy(out, text, static_cast<std::size_t>(size) + 1);
            out += size + 1;
        }
    }
}

// A new reference to a dict with what `properties` (None, a dict, any mapping) holds.
PyObject *as_dict(PyObject *properties) {
    if (!properties || properties == Py_None) return PyDict_New();
    if (PyDict_CheckExact(properties)) return Py_NewRef(properties);
    PyObject *dict = PyDict_New();
    if (dict && PyDict_Update(dict, properties) != 0) {
        Py_DECREF(dict);
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Format(PyExc_TypeError, "properties are a mapping of str to str, not %s", Py_TYPE(properties)->tp_name);
        return nullptr;
    }
    return dict;
}

PyObject *build(PyTypeObject *type, PyObject *content, PyObject *dict, std::int64_t timestamp_ns, bool clocked) {
    const Py_ssize_t text_size = properties_size(dict);
    if (text_size < 0) return nullptr;
    Py_buffer view;
    if (PyObject_GetBuffer(content, &view, PyBUF_SIMPLE) != 0) return nullptr;
    const bool lend = may_lend(content);
    const void *bytes = view.buf;
    const auto size = static_cast<std::size_t>(view.len);
    if (PyObject *holder = content_holder(content); holder != content) {
        Py_buffer held;
        if (PyObject_GetBuffer(holder, &held, PyBUF_SIMPLE) != 0) {
            PyBuffer_Release(&view);
            return nullptr;
        }
        PyBuffer_Release(&view);
        view = held;
    }
    const std::size_t copied = lend ? 0 : size;
    Block *block = too_large(static_cast<std::size_t>(text_size), size)
                       ? nullptr
                       : Block::make(static_cast<std::size_t>(text_size) + copied);
    if (!block) {
        PyBuffer_Release(&view);
        return nullptr;
    }
    Envelope envelope;
    envelope.timestamp_ns = timestamp_ns;
    envelope.clocked = clocked;
    envelope.properties = block->room();
    envelope.properties_size = static_cast<std::uint32_t>(text_size);
    envelope.size = static_cast<std::int64_t>(size);
    write_properties(dict, block->room());
    if (lend) {
        block->content = view;
        envelope.data = static_cast<const std::uint8_t *>(bytes);
    } else {
        envelope.data = block->room() + text_size;
        if (size) std::memcpy(block->room() + text_size, bytes, size);
        PyBuffer_Release(&view);
    }
    return finish(type, envelope, block);
}

PyObject *gateway_message_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"content", "properties", "timestamp_ns", nullptr};
    PyObject *content = nullptr, *properties = nullptr;
    long long timestamp = Envelope::no_time;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|OO$L", const_cast<char **>(keywords), &content, &properties,
                                     &timestamp))
        return nullptr;
    PyObject *dict = as_dict(properties);
    if (!dict) return nullptr;
    const bool given = timestamp != Envelope::no_time;
    PyObject *nothing = content ? nullptr : PyBytes_FromStringAndSize(nullptr, 0);
    PyObject *self = build(type, content ? content : nothing, dict, given ? timestamp : wall_ns(), !given);
    Py_XDECREF(nothing);
    Py_DECREF(dict);
    return self;
}

// The message whose byte form begins at `skip` of `view`, which it takes over where it lends and else gives back.
PyObject *decode_from(PyTypeObject *type, Py_buffer &view, std::size_t skip, bool lend, std::int32_t id) {
    Parts parts;
    const auto *bytes = static_cast<const std::uint8_t *>(view.buf) + skip;
    const auto size = static_cast<std::size_t>(view.len) - skip;
    const char *wrong = decode(bytes, size, parts);
    Block *block = wrong ? nullptr : Block::make(lend ? 0 : size);
    if (!block) {
        PyBuffer_Release(&view);
        return wrong ? raise_error("ProtocolError", "not a gateway message of %zu bytes: %s", size, wrong) : nullptr;
    }
    const std::uint8_t *base = bytes;
    if (lend) {
        block->content = view;
    } else {
        std::memcpy(block->room(), bytes, size);
        base = block->room();
        PyBuffer_Release(&view);
    }
    Envelope envelope;
    envelope.timestamp_ns = wall_ns();
    envelope.clocked = true;
    envelope.properties = base + (parts.properties - bytes);
    envelope.properties_size = parts.properties_size;
    envelope.data = base + (parts.content - bytes);
    envelope.size = parts.content_size;
    envelope.id = id;
    return finish(type, envelope, block);
}

PyObject *from_bytes(PyObject *type, PyObject *data) {
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) != 0) return nullptr;
    return decode_from(reinterpret_cast<PyTypeObject *>(type), view, 0, may_lend(data), -1);
}

PyObject *from_frame(PyObject *type, PyObject *data) {
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) != 0) return nullptr;
    if (static_cast<std::size_t>(view.len) < source_size) {
        PyBuffer_Release(&view);
        return raise_error("ProtocolError", "a frame of %zd bytes has no source id", view.len);
    }
    const std::uint64_t source = load_source(static_cast<const std::uint8_t *>(view.buf));
    if (source > 0xffff) {
        PyBuffer_Release(&view);
        return raise_error("ProtocolError", "source id %llu is not one of 0 to 65535",
                           static_cast<unsigned long long>(source));
    }
    // A small one is copied, so that a module which keeps it keeps no slot of the channel.
    const bool lend = may_lend(data) && static_cast<std::size_t>(view.len) > copied_frame_bytes;
    return decode_from(reinterpret_cast<PyTypeObject *>(type), view, source_size, lend,
                       static_cast<std::int32_t>(source));
}

Parts parts_of(const Message *message) {
    Parts parts;
    const Envelope &e = message->envelope;
    parts.properties = e.properties;
    parts.properties_size = e.properties_size;
    for (std::uint32_t i = 0; i < e.properties_size; ++i) parts.property_count += e.properties[i] == 0;
    parts.property_count /= 2;
    parts.content = e.data;
    parts.content_size = static_cast<std::uint32_t>(e.size);
    return parts;
}

std::size_t size_of(const Message *message) {
    return encoded_size(message->envelope.properties_size, static_cast<std::size_t>(message->envelope.size));
}

PyObject *to_bytes(PyObject *self, PyObject *) {
    PyObject *bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size_of(as_message(self))));
    if (bytes) encode(parts_of(as_message(self)), reinterpret_cast<std::uint8_t *>(PyBytes_AS_STRING(bytes)));
    return bytes;
}

PyObject *to_frame(PyObject *self, PyObject *) {
    const Message *message = as_message(self);
    PyObject *bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(source_size + size_of(message)));
    if (!bytes) return nullptr;
    auto *out = reinterpret_cast<std::uint8_t *>(PyBytes_AS_STRING(bytes));
    store_source(out, message->envelope.id < 0 ? 0 : static_cast<std::uint64_t>(message->envelope.id));
    encode(parts_of(message), out + source_size);
    return bytes;
}

// The frames of messages, and the size of the largest.
PyObject *to_frames(PyObject *, PyObject *messages) {
    PyObject *list = PySequence_List(messages);
    if (!list) return nullptr;
    Py_ssize_t largest = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        PyObject *message = PyList_GET_ITEM(list, i);
        PyObject *frame = PyObject_TypeCheck(message, message_type) ? to_frame(message, nullptr) : nullptr;
        if (!frame) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "frames are made of GatewayMessages");
            Py_DECREF(list);
            return nullptr;
        }
        if (PyBytes_GET_SIZE(frame) > largest) largest = PyBytes_GET_SIZE(frame);
        PyList_SetItem(list, i, frame);
    }
    return Py_BuildValue("(Nn)", list, largest);
}

// The messages of frames; what is no complete frame stays in the list unchanged. Also returns whether all of them were
// frames.
PyObject *from_frames(PyObject *type, PyObject *frames) {
    PyObject *iterator = PyObject_GetIter(frames);
    if (!iterator) return nullptr;
    PyObject *list = PyList_New(0);
    bool whole = true;
    while (PyObject *data = list ? PyIter_Next(iterator) : nullptr) {
        PyObject *message = from_frame(type, data);
        if (!message && !PyErr_ExceptionMatches(PyExc_MemoryError)) {
            PyErr_Clear();  // decoding it alone raises the error
            whole = false;
            message = Py_NewRef(data);
        }
        Py_DECREF(data);
        if (!message || PyList_Append(list, message) != 0) Py_CLEAR(list);
        Py_XDECREF(message);
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred()) Py_CLEAR(list);
    return list ? Py_BuildValue("(NO)", list, whole ? Py_True : Py_False) : nullptr;
}

PyObject *encode_into(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 1 || count > 2) return PyErr_Format(PyExc_TypeError, "encode_into takes a buffer and an offset");
    const Py_ssize_t offset = count > 1 ? PyNumber_AsSsize_t(arguments[1], PyExc_OverflowError) : 0;
    if (offset == -1 && PyErr_Occurred()) return nullptr;
    Py_buffer view;
    if (PyObject_GetBuffer(arguments[0], &view, PyBUF_WRITABLE) != 0) return nullptr;
    const auto size = static_cast<Py_ssize_t>(size_of(as_message(self)));
    if (offset < 0 || offset > view.len || view.len - offset < size) {
        PyBuffer_Release(&view);
        return raise_error("InvalidArgument", "the message takes %zd bytes; the buffer has no room for them at %zd", size,
                           offset);
    }
    encode(parts_of(as_message(self)), static_cast<std::uint8_t *>(view.buf) + offset);
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(size);
}

PyObject *with_properties(PyObject *self, PyObject *properties) {
    PyObject *dict = as_dict(properties);
    if (!dict) return nullptr;
    PyObject *other = build(Py_TYPE(self), self, dict, as_message(self)->envelope.timestamp_ns,
                            as_message(self)->envelope.clocked);
    Py_DECREF(dict);
    return other;
}

PyObject *no_release(PyObject *, PyObject *) { Py_RETURN_NONE; }
PyObject *enter(PyObject *self, PyObject *) { return Py_NewRef(self); }
PyObject *leave(PyObject *, PyObject *const *, Py_ssize_t) { Py_RETURN_NONE; }

PyObject *get_content(PyObject *self, void *) { return PyMemoryView_FromObject(self); }
PyObject *get_encoded_size(PyObject *self, void *) { return PyLong_FromSize_t(size_of(as_message(self))); }
PyObject *get_encoded_properties(PyObject *self, void *) {
    const Envelope &e = as_message(self)->envelope;
    return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(e.properties), e.properties_size);
}

template <typename Function>
PyCFunction method(Function *function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"from_bytes", from_bytes, METH_O | METH_CLASS,
     "from_bytes(data)\n--\n\nThe message that `data` is the byte form of; ProtocolError says what is wrong with it."},
    {"from_frame", from_frame, METH_O | METH_CLASS,
     "from_frame(data)\n--\n\nThe message of a frame; its source's number becomes its id."},
    {"from_frames", from_frames, METH_O | METH_CLASS,
     "from_frames(frames)\n--\n\nThe messages of frames, and whether all were frames: others stand in the list as they came."},
    {"to_frames", to_frames, METH_O | METH_STATIC,
     "to_frames(messages)\n--\n\nThe frames of messages, and the size of the largest."},
    {"to_frame", to_frame, METH_NOARGS,
     "to_frame()\n--\n\nIts source's number (u64, big-endian), then its byte form."},
    {"to_bytes", to_bytes, METH_NOARGS, "to_bytes()\n--\n\nIts byte form."},
    {"encode_into", method(encode_into), METH_FASTCALL,
     "encode_into(buffer, offset=0, /)\n--\n\nWrite the byte form into a writable buffer; gives its size."},
    {"with_properties", with_properties, METH_O,
     "with_properties(properties)\n--\n\nA new message over the same content, with other properties."},
    {"release", no_release, METH_NOARGS,
     "release()\n--\n\nDoes nothing: other modules may hold this message. Its memory goes with the last reference."},
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", method(leave), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"content", get_content, nullptr, "The content as a read-only memoryview.", nullptr},
    {"encoded_size", get_encoded_size, nullptr, "Bytes of the byte form.", nullptr},
    {"encoded_properties", get_encoded_properties, nullptr, "The properties as `key NUL value NUL ...`.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char *>("GatewayMessage(content=b'', properties=None, *, timestamp_ns=now)\n--\n\n"
                                   "What modules pass: properties (text to text) and content (bytes), never changed.\n\n"
                                   "bytes and messages given as content are kept by reference; anything else is "
                                   "copied.")},
    {Py_tp_new, reinterpret_cast<void *>(gateway_message_new)},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, nullptr}};

PyType_Spec spec = {"penstock._core.gateway.GatewayMessage", sizeof(Message), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

bool message_types(PyObject *module) {
    message_type =
        reinterpret_cast<PyTypeObject *>(PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject *>(penstock::message_type)));
    return message_type &&
           PyModule_AddObjectRef(module, "GatewayMessage", reinterpret_cast<PyObject *>(message_type)) == 0;
}

PyObject *share(PyObject *message) {
    const auto *from = static_cast<Block *>(as_message(message)->owner);
    Py_buffer view;
    if (PyObject_GetBuffer(from && from->shared ? from->content.obj : message, &view, PyBUF_SIMPLE) != 0) return nullptr;
    Block *block = Block::make(0);
    if (!block) {
        PyBuffer_Release(&view);
        return nullptr;
    }
    block->content = view;
    block->shared = true;
    Envelope envelope = as_message(message)->envelope;
    envelope.ordinal = 0;
    return finish(Py_TYPE(message), envelope, block);
}

}  // namespace penstock::gateway
