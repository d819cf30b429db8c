/* What the parts of the extension share. Only the stable ABI of CPython 3.11 is used, so one build serves all later
 * versions. */
#ifndef KVPARAMS_NATIVE_H
#define KVPARAMS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Text that belongs to somebody else. */
typedef struct {
    const char *at;
    Py_ssize_t size;
} Slice;

/* The functions of the module; each source file says what they do. */
PyObject *member_spans(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *find_words(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *find_member(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *edit_members(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pack_numbers(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *write_object(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *fill_line(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *has_form(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *are_within(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *request_head(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *response_head(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *read_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *copy_values(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *gather_pages(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *scatter_pages(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *hash_blocks(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *find_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *find_runs(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *link_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *unlink_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *remove_leaves(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *split_buckets(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *put_values(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *get_values(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *find_file_values(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* Returns false, with an exception set, unless a function got so many arguments. */
static inline bool has_arguments(Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, count);
    return count == wanted;
}

/* Words of 4 or 8 bytes in the memory of another object. */
typedef struct {
    Py_buffer view;
    Py_ssize_t count;
} Words;

/* Returns false, with an exception set, unless the object has such words in one piece. Otherwise the caller releases
 * them. */
static inline bool get_words(PyObject *object, Py_ssize_t width, bool writable, Words *words) {
    if (PyObject_GetBuffer(object, &words->view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return false;
    words->count = words->view.len / width;
    bool is_aligned = words->count == 0 || (uintptr_t)words->view.buf % (uintptr_t)width == 0;
    if (words->view.len % width == 0 && is_aligned)
        return true;
    PyBuffer_Release(&words->view);
    PyErr_Format(PyExc_ValueError, "words of %zd bytes are needed", width);
    return false;
}

/* Returns false, with an exception set, unless it is a tuple. */
static inline bool is_tuple(PyObject *item) {
    if (item != NULL && !PyTuple_Check(item))
        PyErr_SetString(PyExc_TypeError, "a tuple is needed");
    return item != NULL && PyTuple_Check(item);
}

/* Returns the position behind white space of JSON. */
static inline const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

#endif
