/* Writes small JSON values as compact text. */
#include "native.h"

enum { MAX_DEPTH = 16, START_SIZE = 1024 };

/* Text that grows. */
typedef struct {
    char *at;
    size_t size, room;
    bool is_line;   /* of ASCII alone, with numbers of one decimal, and bytes that are JSON already */
    bool is_sorted; /* whether members stand in the order of their names */
} Buffer;

/* What has become of a value. */
typedef enum { WRITTEN, NOT_ORDINARY, FAILED } Outcome;

/* Makes room for so many bytes more. Returns false, with an exception set, where there is none. */
static bool reserve(Buffer *buffer, size_t more) {
    if (buffer->room - buffer->size >= more)
        return true;
    size_t room = buffer->room * 2 + more + START_SIZE;
    char *at = PyMem_Realloc(buffer->at, room);
    if (at == NULL) {
        PyErr_NoMemory();
        return false;
    }
    buffer->at = at;
    buffer->room = room;
    return true;
}

static Outcome put(Buffer *buffer, const char *text, size_t size) {
    if (!reserve(buffer, size))
        return FAILED;
    memcpy(buffer->at + buffer->size, text, size);
    buffer->size += size;
    return WRITTEN;
}

static Outcome put_char(Buffer *buffer, char c) {
    if (buffer->size == buffer->room && !reserve(buffer, 1))
        return FAILED;
    buffer->at[buffer->size++] = c;
    return WRITTEN;
}

static Outcome write_text(Buffer *buffer, PyObject *value) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == NULL) { /* half of a surrogate pair */
        PyErr_Clear();
        return NOT_ORDINARY;
    }
    unsigned char span = buffer->is_line ? '~' - 0x20 : 0xff - 0x20;
    bool escapes = false;
    for (Py_ssize_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        escapes |= ((unsigned char)(c - 0x20) > span) | (c == '"') | (c == '\\');
    }
    if (escapes)
        return NOT_ORDINARY;
    if (!reserve(buffer, (size_t)size + 2))
        return FAILED;
    char *to = buffer->at + buffer->size;
    *to = '"';
    memcpy(to + 1, text, (size_t)size);
    to[size + 1] = '"';
    buffer->size += (size_t)size + 2;
    return WRITTEN;
}

static Outcome write_integer(Buffer *buffer, PyObject *value) {
    char digits[24], *at = digits + sizeof digits;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0)
        return NOT_ORDINARY;
    unsigned long long left = number < 0 ? 0 - (unsigned long long)number : (unsigned long long)number;
    do
        *--at = (char)('0' + left % 10);
    while ((left /= 10) > 0);
    if (number < 0)
        *--at = '-';
    return put(buffer, at, (size_t)(digits + sizeof digits - at));
}

/* Writes a number with one decimal, as `_decimal` in writing.py does. */
static Outcome write_decimal(Buffer *buffer, double number) {
    char digits[24], *at = digits + sizeof digits;
    if (!(number >= 0 && number < 1e15))
        return NOT_ORDINARY;
    unsigned long long left = (unsigned long long)(number * 10 + 0.5);
    *--at = (char)('0' + left % 10);
    *--at = '.';
    left /= 10;
    do
        *--at = (char)('0' + left % 10);
    while ((left /= 10) > 0);
    return put(buffer, at, (size_t)(digits + sizeof digits - at));
}

static Outcome write_value(Buffer *buffer, PyObject *value, int depth);

static Outcome write_list(Buffer *buffer, PyObject *list, int depth) {
    Outcome outcome = put_char(buffer, '[');
    for (Py_ssize_t i = 0; outcome == WRITTEN && i < PyList_Size(list); i++) {
        if (i > 0)
            outcome = put_char(buffer, ',');
        if (outcome == WRITTEN)
            outcome = write_value(buffer, PyList_GetItem(list, i), depth);
    }
    return outcome == WRITTEN ? put_char(buffer, ']') : outcome;
}

static Outcome write_member(Buffer *buffer, PyObject *key, PyObject *value, bool is_first, int depth) {
    Outcome outcome = is_first ? WRITTEN : put_char(buffer, ',');
    if (!PyUnicode_CheckExact(key))
        return NOT_ORDINARY;
    if (outcome == WRITTEN)
        outcome = write_text(buffer, key);
    if (outcome == WRITTEN)
        outcome = put_char(buffer, ':');
    return outcome == WRITTEN ? write_value(buffer, value, depth) : outcome;
}

/* Writes the members in the order of their names, which are compared by their code points. */
static Outcome write_sorted(Buffer *buffer, PyObject *dict, int depth) {
    PyObject *keys = PyDict_Keys(dict);
    Outcome outcome = WRITTEN;
    if (keys == NULL)
        return FAILED;
    for (Py_ssize_t i = 0; outcome == WRITTEN && i < PyList_Size(keys); i++)
        if (!PyUnicode_CheckExact(PyList_GetItem(keys, i)))
            outcome = NOT_ORDINARY;
    if (outcome == WRITTEN && PyList_Sort(keys) < 0)
        outcome = FAILED;
    for (Py_ssize_t i = 0; outcome == WRITTEN && i < PyList_Size(keys); i++) {
        PyObject *key = PyList_GetItem(keys, i), *value = PyDict_GetItemWithError(dict, key);
        outcome = value == NULL ? FAILED : write_member(buffer, key, value, i == 0, depth);
    }
    Py_DECREF(keys);
    return outcome;
}

static Outcome write_dict(Buffer *buffer, PyObject *dict, int depth) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    bool is_first = true;
    Outcome outcome = put_char(buffer, '{');
    if (outcome == WRITTEN && buffer->is_sorted)
        outcome = write_sorted(buffer, dict, depth);
    while (outcome == WRITTEN && !buffer->is_sorted && PyDict_Next(dict, &position, &key, &value)) {
        outcome = write_member(buffer, key, value, is_first, depth);
        is_first = false;
    }
    return outcome == WRITTEN ? put_char(buffer, '}') : outcome;
}

static Outcome write_value(Buffer *buffer, PyObject *value, int depth) {
    if (PyLong_CheckExact(value))
        return write_integer(buffer, value);
    if (PyUnicode_CheckExact(value))
        return write_text(buffer, value);
    if (value == Py_None)
        return put(buffer, "null", 4);
    if (value == Py_True)
        return put(buffer, "true", 4);
    if (value == Py_False)
        return put(buffer, "false", 5);
    if (buffer->is_line && PyFloat_CheckExact(value))
        return write_decimal(buffer, PyFloat_AsDouble(value));
    if (buffer->is_line && PyBytes_CheckExact(value))
        return put(buffer, PyBytes_AsString(value), (size_t)PyBytes_Size(value));
    if (depth == MAX_DEPTH)
        return NOT_ORDINARY;
    if (PyList_CheckExact(value))
        return write_list(buffer, value, depth + 1);
    return PyDict_CheckExact(value) ? write_dict(buffer, value, depth + 1) : NOT_ORDINARY;
}

/* Returns what was written, or None, and frees the buffer. */
static PyObject *finish(Buffer *buffer, Outcome outcome) {
    PyObject *made = NULL;
    if (outcome == WRITTEN)
        made = PyBytes_FromStringAndSize(buffer->at, (Py_ssize_t)buffer->size);
    else if (outcome == NOT_ORDINARY)
        made = Py_NewRef(Py_None);
    PyMem_Free(buffer->at);
    return made;
}

/* write_object(members: dict, is_sorted: bool) -> bytes | None
 *
 * As `pydantic_core.to_json`, with members in their order or in that of their names. None where a text needs escapes,
 * a number is not whole or has more than 64 bits, or there is something else in it. */
PyObject *write_object(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Buffer buffer = {0};
    (void)module;
    if (!has_arguments(count, 2))
        return NULL;
    buffer.is_sorted = args[1] == Py_True;
    return finish(&buffer, PyDict_CheckExact(args[0]) ? write_dict(&buffer, args[0], 0) : NOT_ORDINARY);
}

/* fill_line(pieces: tuple[bytes, ...], values: tuple) -> bytes | None
 *
 * The values as JSON between the pieces, which are one more: texts in ASCII, numbers that are not whole with one
 * decimal, bytes as they are. None where there is anything else among them, or a text that needs escapes. */
PyObject *fill_line(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Buffer buffer = {.is_line = true};
    (void)module;
    if (!has_arguments(count, 2))
        return NULL;
    Py_ssize_t values = PyTuple_Check(args[1]) ? PyTuple_Size(args[1]) : -1;
    if (values < 0 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != values + 1) {
        PyErr_SetString(PyExc_TypeError, "two tuples are needed, and one piece more than values");
        return NULL;
    }
    Outcome outcome = WRITTEN;
    for (Py_ssize_t i = 0; outcome == WRITTEN && i <= values; i++) {
        PyObject *piece = PyTuple_GetItem(args[0], i);
        char *text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(piece, &text, &size) < 0)
            outcome = FAILED;
        else
            outcome = put(&buffer, text, (size_t)size);
        if (outcome == WRITTEN && i < values)
            outcome = write_value(&buffer, PyTuple_GetItem(args[1], i), 0);
    }
    return finish(&buffer, outcome);
}
